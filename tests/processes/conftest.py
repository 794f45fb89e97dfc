"""`gateway serve` as a user starts it, on a port that is free."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

KEY = "process-test-key"
START_TIMEOUT_S = 50


class Served:
    """A running gateway. url, key: how to call it; banner: what it printed."""

    def __init__(self, config: Path, environment: dict[str, str] | None = None) -> None:
        variables = {"LISTEN": "127.0.0.1:0", "GATEWAY_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", "-c", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables, **(environment or {})},
        )
        self.banner = ""
        self.log: list[str] = []
        self._up = threading.Event()
        self._readers = [
            threading.Thread(target=self._read_banner, daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def wait_until_up(self) -> "Served":
        """Return when the banner is complete."""
        if not self._up.wait(START_TIMEOUT_S) or not self.banner:
            self.stop()
            raise AssertionError("the gateway did not start:\n" + "".join(self.log))
        return self

    @property
    def url(self) -> str:
        """Where it listens."""
        found = re.search(r"https?://[\d.]+:\d+", self.banner)
        assert found is not None
        return found[0]

    def client(self) -> httpx.Client:
        """A client with the key."""
        return httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=40, trust_env=False
        )

    def children(self) -> dict[int, str]:
        """The processes below it, with their command lines."""
        return dict(_processes(self.process.pid))

    def child(self, module: str) -> int:
        """The process that runs a module."""
        return next(pid for pid, line in self.children().items() if module in line)

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            for reader in self._readers:
                reader.join(5)
            for stream in (self.process.stdout, self.process.stderr):
                if stream is not None:
                    stream.close()

    def _read_banner(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.banner += line
            if "curl " in line:
                self._up.set()
        self._up.set()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)


def _processes(parent: int) -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            line = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            yield int(entry.name), line


def alive(pid: int) -> bool:
    """Whether a process still runs; one that is only waiting to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: "object", timeout_s: float = 20) -> bool:
    """Poll what another process does; there is no event to wait for."""
    assert callable(condition)
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="session")
def repository() -> Path:
    """The project's root."""
    return Path(__file__).parents[2]


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[Served]:
    """The project's own router.yaml, served."""
    gateway = Served(repository / "router.yaml").wait_until_up()
    yield gateway
    gateway.stop()
