"""`gateway status` with a gateway that runs, that cannot be reached, and that restarts."""

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import yaml

from gateway.cli.context import BLANK_NOTE
from gateway.cli.gateway_client import GatewayClient, GatewayUnavailable, RequestRefused
from gateway.cli.printable import plain
from gateway.cli.status import StatusDisplay
from gateway.telemetry.snapshot import Snapshot
from gateway.tenants.keyring import key_digest
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import KEY, ON_A_MACHINE_OF_ONE, Served, wait_until
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

OPERATOR = "operator-key"
CONFIG = """
listen: 127.0.0.1:{port}
workers: {workers}
quotas: {{store: "{store}"}}
admin: {{keys: [{keys}]}}
upstreams: {{one: {{backend: tei, replicas: ["{url}"]}}}}
models: {{bge: {{upstream: one}}, "org/[red]bge": {{upstream: one}}}}
"""
CALLS = 12


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def status(config: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway", "status", "-c", str(config), *words]
    environment = {name: value for name, value in os.environ.items() if name != "GATEWAY_API_KEY"}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**environment, **variables},
    )


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with serve_in_thread(FakeTei()) as url:
        yield url


@pytest.fixture
def config(tmp_path: Path, upstream: str) -> Path:
    """Return the config of a gateway that does not run yet."""
    path = tmp_path / "router.yaml"
    path.write_text(CONFIG.format(port=free_port(), workers=1, store="memory", keys="", url=upstream))
    return path


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory, upstream: str) -> Iterator[Path]:
    """Return the config of a running gateway with two workers and admin keys, after some requests."""
    folder = tmp_path_factory.mktemp("status")
    redis = RedisServer(folder)
    path = folder / "router.yaml"
    keys = f'"{key_digest(OPERATOR)}"'
    path.write_text(
        CONFIG.format(port=free_port(), workers=2, store=redis.url, keys=keys, url=upstream),
        encoding="utf-8",
    )
    gateway = Served(path).wait_until_up()
    for _ in range(CALLS):
        # On separate connections, so that both workers receive some.
        with gateway.client() as client:
            assert 200 == client.post("/v1/embeddings", json={"input": "a b", "model": "bge"}).status_code
    yield path
    gateway.stop()
    redis.stop()


def test_snapshot_adds_up_all_workers(two_workers: Path) -> None:
    for _ in range(4):
        ended = status(two_workers, "--json", GATEWAY_API_KEY=OPERATOR)
        snapshot = msgspec.json.decode(ended.stdout, type=Snapshot)

        assert 0 == ended.returncode
        assert (2, "redis") == (snapshot.workers, snapshot.store.kind)
        assert {"ok": CALLS} == snapshot.calls.outcomes
        assert [("default", CALLS, 4 * CALLS)] == [
            (tenant.name, tenant.calls, tenant.tokens) for tenant in snapshot.tenants
        ]
        assert [("one", "up", CALLS)] == [
            (replica.upstream, replica.state, replica.attempts) for replica in snapshot.replicas
        ]


def test_reads_the_key_from_a_file(two_workers: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(f"{OPERATOR}\n")
    ended = status(two_workers, "--json", "--key-file", str(key))

    assert (0, "") == (ended.returncode, ended.stderr)


@pytest.mark.parametrize("variables", [{}, {"GATEWAY_API_KEY": "wrong"}])
def test_reports_a_wrong_or_missing_key(two_workers: Path, variables: dict[str, str]) -> None:
    ended = status(two_workers, "--json", **variables)

    assert (1, "") == (ended.returncode, ended.stdout)
    assert "401" in ended.stderr
    assert (not variables) is ("GATEWAY_API_KEY, or pass a file with --key-file" in ended.stderr)
    assert "wrong" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_once_shows_every_table(two_workers: Path) -> None:
    ended = status(two_workers, "--once", GATEWAY_API_KEY=OPERATOR)

    assert 0 == ended.returncode
    for word in ("2 workers", "lanes", "replicas", "tenants", "default", "org/[red]bge", "quotas in redis"):
        assert word in ended.stdout


def test_once_writes_one_line_per_replica_to_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    long_url = f"http://127.0.0.1:1/{'deep/' * 30}"
    path.write_text(CONFIG.format(port=free_port(), workers=1, store="memory", keys="", url=long_url))
    gateway = Served(path).wait_until_up()
    try:
        wait_until(lambda: any("is down" in line for line in gateway.log))
        ended = status(path, "--once", GATEWAY_API_KEY=KEY)
    finally:
        gateway.stop()

    (row,) = [line for line in ended.stdout.splitlines() if line.startswith(f"one {long_url} ")]
    assert "down" in row
    assert "nothing listens at its port" in row


def cut_off(*words: str) -> tuple[int, str]:
    """Return the exit status and errors of a command whose output pipe is closed before it writes."""
    with unread() as writing:
        ended = subprocess.run(
            [sys.executable, "-m", "gateway", *words],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env={**os.environ, "GATEWAY_API_KEY": OPERATOR},
        )
    return ended.returncode, ended.stderr


@contextmanager
def unread() -> Iterator[int]:
    """Open a pipe whose reading end is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize(
    "words", [("status", "--json"), ("status", "--once"), ("check",), ("keys", "list"), ("usage", "default")]
)
def test_closed_pipe_ends_a_command_quietly(two_workers: Path, words: tuple[str, ...]) -> None:
    status, error = cut_off(*words, "-c", str(two_workers))
    # Keys and tenants of a new Redis get a hint.
    assert (1, "") == (status, error.removeprefix(f"{BLANK_NOTE}\n"))


def test_closed_pipe_ends_the_help_quietly() -> None:
    assert cut_off("--help") in ((0, ""), (1, ""))


@ON_A_MACHINE_OF_ONE
def test_serves_with_a_closed_standard_output(config: Path) -> None:
    with unread() as writing:
        command = [sys.executable, "-m", "gateway", "serve", "-c", str(config)]
        environment = os.environ | {"XDG_STATE_HOME": str(config.parent / "state")}
        gateway = subprocess.Popen(command, stdout=writing, stderr=subprocess.DEVNULL, env=environment)
    try:
        assert wait_until(lambda: status(config, "--json").returncode == 0)
        assert gateway.poll() is None
    finally:
        gateway.terminate()
        assert 0 == gateway.wait(PATIENCE_S)


@pytest.mark.parametrize("words", [("--json",), ("--once",)])
def test_reports_an_unreachable_gateway_in_one_line(config: Path, words: tuple[str, ...]) -> None:
    ended = status(config, *words)

    assert (1, "") == (ended.returncode, ended.stdout)
    address = f"http://{yaml.safe_load(config.read_text())['listen']}"
    assert re.fullmatch(rf"the gateway at {address} does not answer: .+\n", ended.stderr)


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://127.0.0.1", "http://127.0.0.1:port", "http://"])
def test_refuses_an_invalid_address(url: str) -> None:
    with pytest.raises(RequestRefused, match="is not an address"):
        GatewayClient(url, None)


def test_message_about_an_address_hides_its_password() -> None:
    with pytest.raises(GatewayUnavailable, match=r"^the gateway at http://127.0.0.1:1 does not answer"):
        GatewayClient("http://operator:secret@127.0.0.1:1", None).get("/admin/status", Snapshot)
    with pytest.raises(RequestRefused, match=r"^127.0.0.1:port is not an address"):
        GatewayClient("http://operator:secret@127.0.0.1:port", None)


def test_reports_a_server_that_is_no_gateway(upstream: str) -> None:
    asker = GatewayClient(upstream, None)
    with pytest.raises(RequestRefused, match="is not a gateway of this release"):
        asker.get("/info", Snapshot)
    asker.close()


def test_replaces_terminal_control_characters() -> None:
    assert "a�[31mb�c" == plain("a\x1b[31mb\nc")


class Terminal:
    """`gateway status` on a terminal. seen: everything that it has drawn."""

    def __init__(self, config: Path) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "gateway", "status", "-c", str(config)]
        variables = {"TERM": "xterm-256color", "COLUMNS": "150", "LINES": "60"}
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def shows(self, words: str) -> bool:
        """Return True once the command draws these words, from now on."""
        begun = len(self.seen)
        return wait_until(lambda: words in self.seen[begun:])

    def stop(self) -> int:
        """Press Ctrl-C and return the exit status."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self._reader.join(5)
            os.close(self._ours)

    def _read(self) -> None:
        while True:
            try:
                self.seen += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:
                return


@ON_A_MACHINE_OF_ONE
def test_follows_a_restarting_gateway_until_ctrl_c(config: Path) -> None:
    terminal = Terminal(config)
    try:
        assert terminal.shows("not seen yet")
        gateway = Served(config).wait_until_up()
        assert terminal.shows("quotas in memory")
        gateway.stop()
        assert terminal.shows("asking again")
        gateway = Served(config).wait_until_up()
        assert terminal.shows("quotas in memory")
        gateway.stop()
    finally:
        ended = terminal.stop()

    assert 0 == ended
    assert KEY not in terminal.seen
    assert "Traceback" not in terminal.seen


def test_keeps_the_last_snapshot_while_the_gateway_is_unavailable() -> None:
    display = StatusDisplay("http://127.0.0.1:1")
    display.fail("gone")
    assert display.snapshot is None

    fields = {"version": "1", "at_s": 1.0, "uptime_s": 1.0, "worker": 0, "workers": 1, "calls_in_flight": 0}
    fields |= {"in_flight_bytes": 0, "store": {"kind": "memory", "away": False}, "lanes": (), "replicas": ()}
    fields |= {"calls": {"outcomes": {}, "durations": {}}, "models": (), "tenants": (), "changes": ()}
    display.update(msgspec.convert(fields, Snapshot))
    display.fail("gone")

    assert display.snapshot is not None
    assert (None, "gone") == (display.rates, display.problem)
