"""The parent process: starts engines and HTTP workers, restarts what dies, stops everything in order.

Imports neither the web framework nor torch. Rule: children hold the read end of a pipe whose write end
only this process has, so that they end with it however it ends.
"""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from backends.torch import wire
from gateway.config import Config, host_and_port

logger = logging.getLogger("gateway")

RESTART_FIRST_S = 0.1
RESTART_LONGEST_S = 5.0
# A child that ran this long died of something new: it is restarted at once again.
STABLE_S = 30.0
# After a drain, how long a child may take to end before it is killed.
KILL_AFTER_S = 5.0

# What Python, the Hub's tools and the numeric libraries read.
CHILD_VARIABLES = re.compile(
    r"(PATH|HOME|USER|LANG|LC_\w+|TZ|TMPDIR|TERM|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHON\w*|SSL_CERT_\w+|XDG_\w+"
    r"|HF_\w+|HUGGINGFACE_\w+|TRANSFORMERS_\w+|TOKENIZERS_\w+|TORCH\w*|CUDA_\w+|NVIDIA_\w+|OMP_\w+|KMP_\w+"
    r"|MKL_\w+|ONEDNN_\w+|https?_proxy|HTTPS?_PROXY|no_proxy|NO_PROXY)$"
)
# An engine whose event loop answers nothing for this long hangs, whatever its model is doing.
WATCH_EVERY_S = 5.0
WATCH_MISSES_MAX = 4

Report = Callable[[bytes], None]


class StartError(Exception):
    """The gateway cannot start; the message says why and what to do."""


class Child:
    """One process that is started again when it dies, until it is stopped.

    boot: its first line of standard input, given the number of its status pipe. environment: all that it
    sees of this process' own.
    """

    def __init__(
        self,
        name: str,
        module: str,
        boot: Callable[[int], bytes],
        report: Report,
        fds: tuple[int, ...],
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self._module = module
        self._boot = boot
        self._report = report
        self._fds = fds
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    async def keep_running(self) -> None:
        """Start, wait for the end, start again; returns after `stop`."""
        wait_s = RESTART_FIRST_S
        loop = asyncio.get_running_loop()
        while not self._stopping:
            started_s = loop.time()
            code = await self._run_once()
            if self._stopping:
                return
            if loop.time() - started_s > STABLE_S:
                wait_s = RESTART_FIRST_S
            logger.warning("%s ended (%s); starting it again", self.name, _ending(code))
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, RESTART_LONGEST_S)

    def kill(self) -> None:
        """End it at once; `keep_running` starts it again."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self, sign: signal.Signals, patience_s: float) -> None:
        """Ask it to end, wait, then kill it."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(sign)
            try:
                async with asyncio.timeout(patience_s):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    async def _run_once(self) -> int:
        read_fd, write_fd = os.pipe()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(write_fd, *self._fds),
                # Its own session: the terminal's Ctrl-C reaches this process only.
                start_new_session=True,
                env=self._environment,
            )
        finally:
            os.close(write_fd)
        assert process.stdin is not None
        process.stdin.write(self._boot(write_fd) + b"\n")
        reading = asyncio.create_task(_read_lines(read_fd, self._report))
        code = await process.wait()
        await reading
        return code


class Supervisor:
    """All processes of one gateway.

    progress: told what is going on while the gateway starts. ready: told the worker's report, once.
    """

    def __init__(
        self,
        config: Config,
        first_key_digest: str | None,
        environment: Mapping[str, str],
        progress: Callable[[str], None],
        ready: Callable[[bytes, str], None],
    ) -> None:
        self._config = config
        self._first_key_digest = first_key_digest
        # Keys of upstreams and callers stay here: a child's environment can be read from outside it.
        self._environment = {name: v for name, v in environment.items() if CHILD_VARIABLES.match(name)}
        self._progress = progress
        self._ready = ready
        self._is_ready = False
        self._failure: str | None = None
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises: StartError.
        """
        listener = _bind(self._config.listen, "listen")
        admin = self._config.admin.listen and _bind(self._config.admin.listen, "admin.listen")
        names = [name for name, one in self._config.upstreams.items() if one.backend == "torch"]
        # Mode 0700: the sockets are private. Engines remove it where this process cannot.
        folder = Path(tempfile.mkdtemp(prefix="gateway-")) if names else None
        engines = {name: str(folder / f"{i}.sock") for i, name in enumerate(names) if folder}
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        try:
            await self._run(listener, admin or None, engines)
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            listener.close()
            if admin:
                admin.close()
        if self._failure is not None:
            raise StartError(self._failure)

    async def _run(
        self, listener: socket.socket, admin: socket.socket | None, engines: Mapping[str, str]
    ) -> None:
        engine_children = [self._engine(name, path) for name, path in engines.items()]
        worker = self._worker(listener, admin, engines)
        running = [asyncio.create_task(one.keep_running()) for one in (*engine_children, worker)]
        running += [
            asyncio.create_task(_watch(child, path))
            for child, path in zip(engine_children, engines.values(), strict=True)
        ]
        await self._stop.wait()
        # A second Ctrl-C does not wait for what is in flight.
        self._stop.clear()
        hurry = asyncio.create_task(self._stop.wait())
        await _first_of(worker.stop(signal.SIGTERM, self._config.drain_s + KILL_AFTER_S), hurry)
        hurry.cancel()
        await worker.stop(signal.SIGKILL, KILL_AFTER_S)
        for one in engine_children:
            await one.stop(signal.SIGTERM, KILL_AFTER_S)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _engine(self, name: str, socket_path: str) -> Child:
        settings = self._config.upstreams[name]
        assert settings.model is not None

        def boot(status_fd: int) -> bytes:
            return msgspec.json.encode(
                wire.Boot(
                    name=name,
                    model=settings.model or "",
                    socket_path=socket_path,
                    status_fd=status_fd,
                    revision=settings.revision,
                    dtype=settings.dtype,
                    device=settings.device,
                    batch_tokens=settings.batch_tokens,
                )
            )

        def report(line: bytes) -> None:
            self._engine_said(name, msgspec.json.decode(line, type=wire.State))

        return Child(f"engine {name}", "backends.torch.server", boot, report, (), self._environment)

    def _engine_said(self, name: str, said: wire.State) -> None:
        if said.state == "failed":
            if self._is_ready:
                logger.error("engine %s cannot load its model: %s", name, said.detail)
            else:
                self._failure = f"upstreams.{name}: {said.detail}"
                self._stop.set()
        elif not self._is_ready:
            self._progress(f"{name}: {said.detail if said.state == 'loading' else 'ready'}")

    def _worker(
        self, listener: socket.socket, admin: socket.socket | None, engines: Mapping[str, str]
    ) -> Child:
        # Encoded by hand, because its structs live beside the web framework, which stays out of here.
        plain = msgspec.to_builtins(self._config)

        def boot(status_fd: int) -> bytes:
            message = {
                "boot": {
                    "config": plain,
                    "first_key_digest": self._first_key_digest,
                    "engines": engines,
                    "admin_port": admin.getsockname()[1] if admin else None,
                },
                "listen_fd": listener.fileno(),
                "status_fd": status_fd,
                "admin_fd": admin.fileno() if admin else None,
            }
            return msgspec.json.encode(message)

        host, port = listener.getsockname()[:2]
        scheme = "https" if self._config.tls else "http"
        address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

        def report(line: bytes) -> None:
            if not self._is_ready:
                self._is_ready = True
                self._ready(line, address)

        fds = tuple(one.fileno() for one in (listener, admin) if one)
        return Child("worker", "gateway.worker", boot, report, fds, self._environment)


async def _watch(engine: Child, socket_path: str) -> None:
    """Kill an engine that once answered and no longer does: stopped, hung, or without its socket."""
    misses: int | None = None
    while True:
        await asyncio.sleep(WATCH_EVERY_S)
        if await _answers(socket_path):
            misses = 0
        elif misses is not None:
            misses += 1
            if misses >= WATCH_MISSES_MAX:
                logger.warning("%s answers nothing; ending it", engine.name)
                engine.kill()
                misses = None


async def _answers(socket_path: str) -> bool:
    """Whether an engine's event loop still takes a request."""
    try:
        async with asyncio.timeout(WATCH_EVERY_S):
            reader, writer = await asyncio.open_unix_connection(socket_path)
            writer.write(b"GET /info HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n\r\n")
            answered = bool(await reader.read(1))
            writer.close()
            return answered
    except (OSError, TimeoutError):
        return False


def _bind(listen: str, key: str) -> socket.socket:
    """The listening socket, before anything else is started: a port in use is told at once."""
    host, port = host_and_port(listen)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        raise StartError(
            f"cannot listen on {listen}: {error.strerror or error}. Stop what listens there, or set "
            f"{'LISTEN (or `listen:` in router.yaml)' if key == 'listen' else f'`{key}:` in router.yaml'} "
            "to another address"
        ) from error
    listener.set_inheritable(True)
    return listener


async def _read_lines(fd: int, report: Report) -> None:
    """Pass on each line of a child's status pipe until the child has closed it."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    with os.fdopen(fd, "rb") as pipe:
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        while line := await reader.readline():
            report(line)
        transport.close()


async def _first_of(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
