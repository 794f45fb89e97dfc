"""`gateway serve` as a user starts it, on a free port, and helpers for child processes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from gateway.config.host_users import people
from tests.waiting import PATIENCE_S

KEY = "process-test-key"
SERVE = (sys.executable, "-m", "gateway", "serve")
# httpx loads all certificate authorities for each client without a context, in 17 ms.
TLS_CONTEXT = httpx.create_ssl_context(trust_env=False)


ON_A_MACHINE_OF_ONE = pytest.mark.skipif(
    len(people()) > 1, reason="several people can log in to this machine: /admin needs a key"
)


class Served:
    """A gateway in a child process. log: lines of its standard error. banner: its standard output.

    Where lines are JSON, the banner is the line of the event `ready`.

    models: arguments of `serve` in place of the file, whose folder then only contains the state.
    command: in place of `python -m gateway serve`. folder: in which it is started.
    """

    def __init__(
        self,
        config: Path,
        environment: dict[str, str] | None = None,
        models: Sequence[str] = (),
        *,
        command: Sequence[str] = SERVE,
        folder: Path | None = None,
    ) -> None:
        variables = {"LISTEN": "127.0.0.1:0", "GATEWAY_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
        variables["XDG_STATE_HOME"] = str(config.parent / "state")
        self.process = subprocess.Popen(
            [*command, *(models or ["-c", str(config)])],
            cwd=folder,
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
        """Wait for the complete banner."""
        if not self._up.wait(PATIENCE_S) or not self.banner:
            self.stop()
            raise AssertionError("the gateway did not start:\n" + "".join(self.log))
        return self

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        found = re.search(r"https?://[\d.]+:\d+", self.banner)
        assert found is not None
        return found[0]

    def client(self) -> httpx.Client:
        """Open a client that sends the key."""
        return httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {KEY}"},
            timeout=PATIENCE_S,
            trust_env=False,
            verify=TLS_CONTEXT,
        )

    def children(self) -> dict[int, str]:
        """Return its child processes: process id → command line."""
        return dict(_processes(self.process.pid))

    def child(self, module: str) -> int:
        """Return the id of the child that runs a module."""
        return next(pid for pid, line in self.children().items() if module in line)

    def stop(self) -> int:
        """Send SIGTERM and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
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

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if '"event":"ready"' in line:
                self.banner += line
                self._up.set()
        self._up.set()


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
    """Return True if a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: "object", timeout_s: float = PATIENCE_S) -> bool:
    """Poll a condition that no event signals, because another process fulfils it."""
    assert callable(condition)
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.05)
    return False


def run_serve(config: Path) -> subprocess.CompletedProcess[str]:
    """Run `gateway serve` until it exits, for a config that it cannot start with."""
    command = [sys.executable, "-m", "gateway", "serve", "-c", str(config)]
    environment = os.environ | {"XDG_STATE_HOME": str(config.parent / "state")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment
    )


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the project's root."""
    return Path(__file__).parents[2]


@pytest.fixture(scope="module")
def served(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the project's own router.yaml, with lines and a banner for people."""
    config = tmp_path_factory.mktemp("served") / "router.yaml"
    config.write_text((repository / "router.yaml").read_text() + "\nlogs: {format: text}\n")
    gateway = Served(config).wait_until_up()
    yield gateway
    gateway.stop()
