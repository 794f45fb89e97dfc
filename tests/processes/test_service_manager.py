"""Messages to a service manager over a real socket, the unit for systemd, and lines of start and stop."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.processes.service_manager import ServiceManager
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.callers import is_logged
from tests.processes.conftest import Served, run_serve, wait_until

pytestmark = pytest.mark.slow

UNIT = Path("deploy/systemd/embedding-gateway.service")
PROGRAM = "/opt/embedding-gateway/bin/gateway"
CONFIG = """
listen: 127.0.0.1:0
lame_duck_s: 0.5
drain_s: 7
upstreams: {{one: {{backend: tei, replicas: ["{url}"]}}}}
models: {{m: {{upstream: one}}}}
"""
WATCHDOG_S = 2.0


class Manager:
    """Service manager that only listens. messages: those that have arrived, each as its lines."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notify"
        self.messages: list[list[str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def environment(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": str(self.path), "WATCHDOG_USEC": str(int(WATCHDOG_S * 1_000_000))}

    def received(self, line: str) -> int:
        """Return how many messages have had a line so far."""
        return sum(line in message for message in self.messages)

    def is_silent(self) -> bool:
        """Return whether no sign of life arrives within the time of the watchdog."""
        before = self.received("WATCHDOG=1")
        return not wait_until(lambda: self.received("WATCHDOG=1") > before, WATCHDOG_S)

    def close(self) -> None:
        # Wakes the reader, which a closed descriptor does not.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.path))
        self._reader.join(5)
        self._socket.close()

    def _read(self) -> None:
        while message := self._socket.recv(65536):
            self.messages.append(message.decode().splitlines())


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path)
    yield made
    made.close()


def test_start_reload_watchdog_and_stop_are_reported(manager: Manager, tmp_path: Path) -> None:
    with serve_in_thread(FakeTei()) as url:
        path = tmp_path / "router.yaml"
        path.write_text(CONFIG.format(url=url))
        gateway = Served(path, manager.environment()).wait_until_up()
        try:
            assert wait_until(lambda: manager.received("READY=1") == 1)
            assert manager.received(f"STATUS=serving 1 model at {gateway.url}")
            assert wait_until(lambda: manager.received("WATCHDOG=1") >= 2)

            check_reloads(gateway, manager, path)
            worker = gateway.child("gateway.processes.worker")
            os.kill(worker, signal.SIGSTOP)
            # The parent lives, and no worker does.
            assert wait_until(manager.is_silent)
            os.kill(worker, signal.SIGCONT)
            before = manager.received("WATCHDOG=1")
            assert wait_until(lambda: manager.received("WATCHDOG=1") > before)
            assert 0 == gateway.stop()
        finally:
            gateway.stop()

    check_stop(manager, gateway)
    # Without a terminal everything is JSON, and there is one stream.
    assert ["ready"] == [event for line in gateway.log if (event := json.loads(line)["event"]) == "ready"]
    assert [gateway.banner] == [line for line in gateway.log if '"event":"ready"' in line]


def check_reloads(gateway: Served, manager: Manager, path: Path) -> None:
    gateway.process.send_signal(signal.SIGHUP)
    assert wait_until(lambda: manager.received("READY=1") == 2)
    [reload] = [message for message in manager.messages if "RELOADING=1" in message]
    assert any(line.partition("=")[2].isdigit() for line in reload if "MONOTONIC_USEC=" in line)
    path.write_text("upstreams: {}\n")
    gateway.process.send_signal(signal.SIGHUP)
    assert wait_until(lambda: manager.received("READY=1") == 3)
    assert any("was not reloaded" in line for message in manager.messages for line in message)


def check_stop(manager: Manager, gateway: Served) -> None:
    [stop] = [message for message in manager.messages if "STOPPING=1" in message]
    # lame_duck_s, drain_s, and the time until a process is killed.
    [extension] = [line for line in stop if line.startswith("EXTEND_TIMEOUT_USEC=")]
    assert int(extension.partition("=")[2]) >= 7_500_000
    words = "stopping (SIGTERM): calls are served for 0.5 s, then calls in flight have 7 s"
    assert f"STATUS={words}" in stop
    assert is_logged(gateway, words)


def test_a_start_that_waits_names_what_it_waits_for(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        path.write_text(CONFIG.format(url=f"http://127.0.0.1:{silent.getsockname()[1]}"))
        gateway = Served(path)
        try:
            assert wait_until(lambda: is_logged(gateway, "waiting for one"))
        finally:
            gateway.stop()


@pytest.mark.parametrize("text", ["upstreams: {}\n", "models: [", CONFIG.format(url="http://x") + "bad: 1\n"])
def test_a_failed_start_is_json_too(tmp_path: Path, text: str) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    ended = run_serve(path)
    lines = [json.loads(line) for line in ended.stderr.splitlines()]

    assert (1, "") == (ended.returncode, ended.stdout)
    assert "cannot start" in lines[0]["message"]
    assert {"error"} == {line["level"] for line in lines}


async def test_signs_of_life_depend_on_the_workers(manager: Manager) -> None:
    service = ServiceManager(manager.environment() | {"WATCHDOG_USEC": "30000"})
    alive = False
    feeding = asyncio.create_task(service.feed_watchdog(lambda _: alive))
    await asyncio.sleep(0.2)
    assert not manager.messages
    alive = True
    assert await asyncio.to_thread(wait_until, lambda: manager.received("WATCHDOG=1") >= 2)
    feeding.cancel()
    service.close()


def test_a_manager_that_is_gone_or_not_meant_hurts_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "x"), "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"})
    assert other.watchdog_s is None
    for _ in range(3):
        other.ready("serving")
    assert 1 == len(caplog.records)
    other.close()

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
        abstract.bind(f"\0gateway-{os.getpid()}")
        named = ServiceManager({"NOTIFY_SOCKET": f"@gateway-{os.getpid()}"})
        named.show("two\nlines")
        assert b"STATUS=two lines" == abstract.recv(100)
        named.close()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(repository: Path, tmp_path: Path) -> None:
    text = (repository / UNIT).read_text()
    assert PROGRAM in text
    unit = tmp_path / UNIT.name
    # systemd checks that the program is there.
    unit.write_text(text.replace(PROGRAM, sys.executable))
    ended = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )

    own = [line for line in ended.stderr.splitlines() if UNIT.name in line]
    assert (0, []) == (ended.returncode, own), ended.stderr
