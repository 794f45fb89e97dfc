"""The parent process: starts engines and HTTP workers, restarts what dies, stops everything in order.

Imports neither the web framework nor torch.
"""

import asyncio
import logging
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import msgspec

from backends.torch import wire
from gateway import listeners
from gateway.child import Child
from gateway.config import Config, Upstream
from gateway.engines import KILL_AFTER_S, Group, child_environment, engine_child
from gateway.shares import worker_share
from gateway.telemetry.metrics import forget_worker

logger = logging.getLogger("gateway")

# An engine whose event loop answers nothing for this long hangs, whatever its model is doing.
WATCH_EVERY_S = 5.0
WATCH_MISSES_MAX = 4


class StartError(Exception):
    """The gateway cannot start; the message says why and what to do."""


class Places(msgspec.Struct, frozen=True):
    """Where the processes of one gateway meet. metrics: the folder that several workers share."""

    listener: socket.socket
    admin: socket.socket | None
    engines: Sequence[Group]
    metrics: str | None


class Supervisor:
    """All processes of one gateway.

    first_key_waits: it stands in only if the store, which has not answered yet, holds no tenants.
    progress: told what is going on while the gateway starts. ready: told a worker's report, once, when each
    has made one.
    """

    def __init__(
        self,
        config: Config,
        first_key_digest: str | None,
        environment: Mapping[str, str],
        progress: Callable[[str], None],
        ready: Callable[[bytes, str], None],
        *,
        first_key_waits: bool = False,
    ) -> None:
        self._config = config
        self._first_key_digest = first_key_digest
        self._first_key_waits = first_key_waits
        self._environment = child_environment(environment)
        self._progress = progress
        self._ready = ready
        self._reported: set[int] = set()
        self._is_ready = False
        self._failure: str | None = None
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises: StartError.
        """
        with ExitStack() as held:
            places = self._places(held)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop.set)
            await self._run(places)
        if self._failure is not None:
            raise StartError(self._failure)

    def _places(self, held: ExitStack) -> Places:
        """Ports first: one that is in use is told before anything is started. held: gives them all back."""
        config, several = self._config, self._config.workers > 1
        opened = listeners.holding if several else listeners.listening
        listener = held.enter_context(_bind(opened, config.listen, "listen"))
        admin = config.admin.listen and _bind(listeners.listening, config.admin.listen, "admin.listen")
        torch = {name: one for name, one in config.upstreams.items() if one.backend == "torch"}
        # Mode 0700: what is inside is private. Children remove them where this process cannot.
        engines = _folder(held, "gateway-") if torch else ""
        return Places(
            listener,
            held.enter_context(admin) if admin else None,
            _groups(torch, engines),
            _folder(held, "gateway-metrics-") if several else None,
        )

    async def _run(self, places: Places) -> None:
        engines = [self._engine(group) for group in places.engines]
        workers = [self._worker(number, places) for number in range(self._config.workers)]
        running = [asyncio.create_task(one.keep_running()) for one in (*engines, *workers)]
        running += [
            asyncio.create_task(_watch(child, group.socket_path))
            for child, group in zip(engines, places.engines, strict=True)
        ]
        await self._stop.wait()
        # A second Ctrl-C does not wait for what is in flight.
        self._stop.clear()
        hurry = asyncio.create_task(self._stop.wait())
        await _first_of(_stopped(workers, signal.SIGTERM, self._config.drain_s + KILL_AFTER_S), hurry)
        hurry.cancel()
        await _stopped(workers, signal.SIGKILL, KILL_AFTER_S)
        await _stopped(engines, signal.SIGTERM, KILL_AFTER_S)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _engine(self, group: Group) -> Child:
        return engine_child(group, self._config.engine, self._environment, self._engine_said)

    def _engine_said(self, said: wire.State) -> None:
        if not self._is_ready and said.state == "failed":
            self._failure = f"upstreams.{said.model}: {said.detail}"
            self._stop.set()
        elif not self._is_ready:
            detail = said.detail if said.state == "loading" else f"{said.state}, {said.detail}"
            self._progress(f"{said.model}: {detail}")
        elif said.state == "failed":
            logger.error("upstream %s: its model cannot be loaded: %s", said.model, said.detail)

    def _worker(self, number: int, places: Places) -> Child:
        several = places.metrics is not None
        # Encoded by hand, because its structs live beside the web framework, which stays out of here.
        config = msgspec.to_builtins(worker_share(self._config))
        engines = {name: at for group in places.engines for name, at in group.addresses.items()}

        def boot(status_fd: int) -> bytes:
            message = {
                "boot": {
                    "config": config,
                    "first_key_digest": self._first_key_digest,
                    "first_key_waits": self._first_key_waits,
                    "engines": engines,
                    "admin_port": places.admin.getsockname()[1] if places.admin else None,
                    "worker": number if several else None,
                },
                "listen_fd": places.listener.fileno(),
                "status_fd": status_fd,
                "admin_fd": places.admin.fileno() if places.admin else None,
                "metrics_folder": places.metrics,
            }
            return msgspec.json.encode(message)

        name = f"worker {number}" if several else "worker"
        report = partial(self._worker_said, number, _address(places.listener, self._config))
        fds = tuple(one.fileno() for one in (places.listener, places.admin) if one)
        if places.metrics is None:
            return Child(name, "gateway.worker", boot, report, fds, self._environment)
        environment = {**self._environment, "PROMETHEUS_MULTIPROC_DIR": places.metrics}
        forget = partial(forget_worker, places.metrics, number)
        return Child(name, "gateway.worker", boot, report, fds, environment, forget)

    def _worker_said(self, number: int, address: str, line: bytes) -> None:
        self._reported.add(number)
        if not self._is_ready and len(self._reported) == self._config.workers:
            self._is_ready = True
            self._ready(line, address)


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


def _bind(opened: Callable[[str], socket.socket], listen: str, key: str) -> socket.socket:
    try:
        return opened(listen)
    except OSError as error:
        raise StartError(
            f"cannot listen on {listen}: {error.strerror or error}. Stop what listens there, or set "
            f"{'LISTEN (or `listen:` in router.yaml)' if key == 'listen' else f'`{key}:` in router.yaml'} "
            "to another address"
        ) from error


def _groups(upstreams: Mapping[str, Upstream], folder: str) -> list[Group]:
    """Upstreams by the process that they name. folder: for the sockets."""
    names = dict.fromkeys(one.process for one in upstreams.values())
    return [
        Group(
            f"engine {process}" if len(names) > 1 else "engine",
            f"{folder}/{i}.sock",
            {name: one for name, one in upstreams.items() if one.process == process},
        )
        for i, process in enumerate(names)
    ]


def _folder(held: ExitStack, prefix: str) -> str:
    return held.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True))


def _address(listener: socket.socket, config: Config) -> str:
    """What callers write before a path."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _stopped(children: Sequence[Child], sign: signal.Signals, patience_s: float) -> None:
    """All at once: each has the whole of the patience."""
    await asyncio.gather(*(one.stop(sign, patience_s) for one in children))


async def _first_of(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
