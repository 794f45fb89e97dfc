"""The parent process: starts engines and HTTP workers, restarts what dies, stops everything in order.

Imports neither the web framework nor torch.
"""

import asyncio
import logging
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count

import msgspec

from backends.torch import wire
from gateway.additions.state import AdditionsState
from gateway.additions.store import AdditionsInMemory, AdditionsInRedis
from gateway.config.diff import ReloadOutcome
from gateway.config.schema import Config
from gateway.config.worker_share import worker_share
from gateway.events import EndReason, ProcessRestarted
from gateway.processes import listeners
from gateway.processes import liveness as watching
from gateway.processes import messages as pipes
from gateway.processes.child import Child
from gateway.processes.config_applier import ConfigApplier
from gateway.processes.engine_pool import Engine, EngineSet
from gateway.processes.engine_process import KILL_AFTER_S, child_environment
from gateway.processes.liveness import WORKER_EVERY_S, WORKER_GRACE, Heartbeats
from gateway.processes.reload_queue import ReloadQueue, Source, WorkerAcks, watch
from gateway.processes.restarts import Restarts
from gateway.store.redis_client import RedisClient
from gateway.telemetry.metrics import forget_worker

logger = logging.getLogger("gateway")

# How long a reload waits for its workers to take the config.
FOLLOW_TIMEOUT_S = 10.0
# No caller waits for what was added: a connection has the time to be made.
STORE_TIMEOUT_S = 2.0


class StartError(Exception):
    """The gateway cannot start; the message says why and what to do."""


class Places(msgspec.Struct, frozen=True):
    """Where the processes of one gateway meet. metrics: the folder that several workers share."""

    listener: socket.socket
    admin: socket.socket | None
    metrics: str | None


class Supervisor:
    """All processes of one gateway.

    config: what it starts with. source: where another is read. first_key_waits: the first key stands in only
    if the store, which has not answered yet, holds no tenants. progress: told what is going on while the
    gateway starts. ready: told a worker's report, once, when each has made one.
    """

    def __init__(
        self,
        config: Config,
        source: Source,
        first_key_digest: str | None,
        progress: Callable[[str], None],
        ready: Callable[[bytes, str], None],
        *,
        first_key_waits: bool = False,
    ) -> None:
        # What was given to sockets and processes, and stays; what is served now is told by the other.
        self._config = config
        self._source = source
        self._first_key_digest = first_key_digest
        self._first_key_waits = first_key_waits
        self._environment = child_environment(source.environment)
        self._kept = AdditionsState(_addition_store(config), source.environment)
        self._now = ConfigApplier(
            config, source, self._kept, self._tell_workers, has_first_key=first_key_digest is not None
        )
        self._reloads = ReloadQueue(self._now.done)
        self._answers = WorkerAcks()
        self._restarts = Restarts(self._tell_restarted)
        self._numbers = count()
        self._workers: list[Child] = []
        self._signs: list[Heartbeats] = []
        self._retiring: set[asyncio.Task[None]] = set()
        self._progress = progress
        self._ready = ready
        self._reported: set[int] = set()
        self._up = asyncio.Event()
        self._failure: str | None = None
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises: StartError.
        """
        with ExitStack() as held:
            places = self._places(held)
            self._engines = EngineSet(
                partial(_folder, held, "gateway-"), self._environment, self._engine_said, self._restarts
            )
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop.set)
            loop.add_signal_handler(signal.SIGHUP, self._hung_up, sys.stdin.isatty())
            await self._run(places)
        if self._failure is not None:
            raise StartError(self._failure)

    def _places(self, held: ExitStack) -> Places:
        """Ports first: one that is in use is told before anything is started. held: gives them all back."""
        config, several = self._config, self._config.workers > 1
        opened = listeners.holding if several else listeners.listening
        listener = held.enter_context(_bind(opened, config.listen, "listen"))
        admin = config.admin.listen and _bind(listeners.listening, config.admin.listen, "admin.listen")
        return Places(
            listener,
            held.enter_context(admin) if admin else None,
            _folder(held, "gateway-metrics-") if several else None,
        )

    async def _run(self, places: Places) -> None:
        await self._now.start(self._engines)
        self._workers = workers = [self._worker(number, places) for number in range(self._config.workers)]
        self._signs = [Heartbeats() for _ in workers]
        running = [asyncio.create_task(one.keep_running()) for one in workers]
        running += [
            asyncio.create_task(watching.watch(one, signs.answered, WORKER_EVERY_S, WORKER_GRACE))
            for one, signs in zip(workers, self._signs, strict=True)
        ]
        running.append(asyncio.create_task(self._reload_once_up()))
        running.append(asyncio.create_task(self._follow_once_up()))
        if self._config.reload.watch:
            running.append(asyncio.create_task(watch(self._source, self._reloads.ask)))
        await self._stop.wait()
        # A second Ctrl-C does not wait for what is in flight.
        self._stop.clear()
        hurry = asyncio.create_task(self._stop.wait())
        await _first_of(_stopped(workers, signal.SIGTERM, self._config.drain_s + KILL_AFTER_S), hurry)
        hurry.cancel()
        await _stopped(workers, signal.SIGKILL, KILL_AFTER_S)
        # What a reload is doing ends before the engines do, or it would start others.
        running += self._retiring
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._kept.aclose()
        await self._engines.stop_all()

    async def _reload_once_up(self) -> None:
        """What is wrong with the first config ends the gateway; with a later one, it ends nothing."""
        await self._up.wait()
        await self._reloads.keep()

    async def _follow_once_up(self) -> None:
        """Take what was added, and whatever others add from then on."""

        async def take() -> None:
            await self._reloads.done("added")

        await self._up.wait()
        if self._kept.current.additions.upstreams:
            await take()
        await self._kept.follow(take)

    def _hung_up(self, has_terminal: bool) -> None:  # noqa: FBT001 - a signal handler's argument
        """SIGHUP: an operator wants a reload, or the terminal has gone, and whoever watches with it."""
        if has_terminal and not sys.stdin.isatty():
            self._stop.set()
        else:
            self._reloads.ask()

    async def _tell_workers(self, before: Config, left: Sequence[Engine]) -> None:
        """Have all of them follow, and stop those engines when nobody needs them any more.

        before: what calls that go on began with.
        """
        number = next(self._numbers)
        message = msgspec.json.encode(
            {
                "type": "follow",
                "number": number,
                "config": worker_share(self._now.config),
                "engines": self._engines.addresses,
            }
        )
        # One that is just being started is sent this config with its boot message.
        told = [index for index, worker in enumerate(self._workers) if worker.send(message)]
        for index, problem in (await self._answers.followed(number, told, FOLLOW_TIMEOUT_S)).items():
            logger.error("worker %d did not follow, and serves on as before: %s", index, problem)
        if not left:
            self._answers.forget_drained(number)
        else:
            longest_s = max((one.deadline_s for one in before.models.values()), default=0.0)
            task = asyncio.create_task(self._retire(number, left, longest_s))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def _retire(self, number: int, left: Sequence[Engine], longest_s: float) -> None:
        await self._answers.drained(number, longest_s)
        await self._engines.stop(left)

    def _engine_said(self, said: wire.State) -> None:
        is_up = self._up.is_set()
        if said.state == "failed" and is_up:
            logger.error("upstream %s: its model cannot be loaded: %s", said.model, said.detail)
        elif said.state == "failed":
            self._failure = f"upstreams.{said.model}: {said.detail}"
            self._stop.set()
        elif not is_up:
            detail = said.detail if said.state == "loading" else f"{said.state}, {said.detail}"
            self._progress(f"{said.model}: {detail}")

    def _worker(self, number: int, places: Places) -> Child:
        several = places.metrics is not None

        def boot(status_fd: int) -> bytes:
            # Encoded by hand, because its structs live beside the web framework, which stays out of here.
            message = {
                "boot": {
                    # As it is now: one that is started later starts with what the others follow.
                    "config": worker_share(self._now.config),
                    "first_key_digest": self._first_key_digest,
                    "first_key_waits": self._first_key_waits,
                    "engines": self._engines.addresses,
                    "admin_port": places.admin.getsockname()[1] if places.admin else None,
                    "worker": number if several else None,
                },
                "listen_fd": places.listener.fileno(),
                "status_fd": status_fd,
                "admin_fd": places.admin.fileno() if places.admin else None,
                "metrics_folder": places.metrics,
                "restarts": self._restarts.told,
            }
            return msgspec.json.encode(message)

        name = f"worker {number}" if several else "worker"
        report = partial(self._worker_said, number, _address(places.listener, self._config))
        fds = tuple(one.fileno() for one in (places.listener, places.admin) if one)
        environment = self._environment
        if places.metrics is not None:
            environment = {**environment, "PROMETHEUS_MULTIPROC_DIR": places.metrics}
        self._restarts.expect(name)
        ended = partial(self._worker_ended, name, number, places.metrics)
        return Child(name, "gateway.processes.worker", boot, report, fds, environment, ended)

    def _worker_ended(self, name: str, number: int, metrics: str | None, reason: EndReason, how: str) -> None:
        self._answers.gone(number)
        self._signs[number].forget()
        if metrics is not None:
            forget_worker(metrics, number)
        self._restarts.ended(name, reason, how)

    def _tell_restarted(self, restart: ProcessRestarted) -> None:
        # One that is just being started is told with its boot message.
        line = msgspec.json.encode(restart)
        for worker in self._workers:
            worker.send(line)

    def _worker_said(self, number: int, address: str, line: bytes) -> None:
        self._signs[number].heard()
        match msgspec.json.decode(line, type=pipes.ToParent):
            case pipes.Ready():
                self._reported.add(number)
                if not self._up.is_set() and len(self._reported) == self._config.workers:
                    self._up.set()
                    self._ready(line, address)
            case pipes.ConfigAck(reload, problem):
                self._answers.heard_followed(reload, number, problem)
            case pipes.Drained(reload):
                self._answers.heard_drained(reload, number)
            case pipes.ReloadRequest(asked, edit):
                self._reloads.ask(edit or "file", partial(self._answer, number, asked))
            case pipes.AskedListing(asked):
                self._tell(number, pipes.ListingReply(asked, self._kept.listing))

    def _answer(self, worker: int, asked: int, outcome: ReloadOutcome) -> None:
        self._tell(worker, pipes.ReloadReply(asked, outcome))

    def _tell(self, worker: int, told: pipes.ReloadReply | pipes.ListingReply) -> None:
        self._workers[worker].send(msgspec.json.encode(told))


def _addition_store(config: Config) -> AdditionsInMemory | AdditionsInRedis:
    store = config.quotas.store
    return AdditionsInMemory() if store == "memory" else AdditionsInRedis(RedisClient(store, STORE_TIMEOUT_S))


def _bind(opened: Callable[[str], socket.socket], listen: str, key: str) -> socket.socket:
    try:
        return opened(listen)
    except OSError as error:
        raise StartError(
            f"cannot listen on {listen}: {error.strerror or error}. Stop what listens there, or set "
            f"{'LISTEN (or `listen:` in router.yaml)' if key == 'listen' else f'`{key}:` in router.yaml'} "
            "to another address"
        ) from error


def _folder(held: ExitStack, prefix: str) -> str:
    # Mode 0700: what is inside is private. Children remove them where this process cannot.
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
