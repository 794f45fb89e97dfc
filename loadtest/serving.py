"""What runs start that use all cores: a stub, and gateways whose log is read.

Knows nothing of what is measured. Everything listens on loopback, on a port that is free.
"""

import os
import re
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx
from httpx_aiohttp import AiohttpTransport

from loadtest.processes import family, group, usage
from loadtest.servers import start_stub

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 40


@contextmanager
def stub(folder: Path, *flags: str) -> Iterator[str]:
    """`loadtest.stub` with these flags, on any core; yields its URL."""
    with group() as started:
        server = start_stub(folder, *flags)
        assert server.process is not None
        started.append(server.process)
        server.process.spread()
        yield f"http://127.0.0.1:{server.target.port}"


class GatewayProcess:
    """`gateway serve`. lines: its log so far, without the lines that each call has."""

    def __init__(self, config: Path, environment: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self.calls_logged = 0
        self._up = threading.Event()
        self._banner = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", "-c", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._readers = [
            threading.Thread(target=one, daemon=True) for one in (self._read_out, self._read_log)
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        """Return when it can be called."""
        if not self._up.wait(START_TIMEOUT_S) or "http://" not in self._banner:
            self.stop()
            raise SystemExit("the gateway did not start:\n" + "\n".join(self.lines))
        return self

    def __exit__(self, *_: object) -> None:
        """End it in order."""
        self.stop()

    @property
    def url(self) -> str:
        """Where it listens."""
        found = re.search(r"http://[\d.]+:\d+", self._banner)
        assert found is not None
        return found[0]

    @property
    def processes(self) -> list[int]:
        """It and its children."""
        return family(self._process.pid)

    def cpu_s(self) -> float:
        """CPU that it and its children have used."""
        return usage(self.processes).cpu_s

    def hang_up(self) -> None:
        """SIGHUP to the parent: it reads its file again."""
        self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """SIGKILL to all of it at once."""
        for pid in self.processes:
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL where that does not end it."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        for reader in self._readers:
            reader.join(5)

    def _read_out(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as out:
            for line in out:
                self._banner += line
                if "curl " in line:
                    self._up.set()
        self._up.set()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as log:
            for line in log:
                if re.search(r" (GET|POST|DELETE) /", line):
                    self.calls_logged += 1
                else:
                    self.lines.append(line.rstrip())


def client(url: str, key: str) -> httpx.AsyncClient:
    """One that costs little itself, so that it does not measure itself."""
    return httpx.AsyncClient(
        base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=30, transport=AiohttpTransport()
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Of a few values, the nearest; 0 of none."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
