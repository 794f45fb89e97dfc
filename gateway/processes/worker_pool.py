"""The HTTP worker processes of one gateway: start, messages, confirmations and exit."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from weakref import WeakValueDictionary

import msgspec

from gateway.config.boot import AppBoot
from gateway.config.problems import Problem
from gateway.config.schema import Config
from gateway.declared.host import InstanceInfo
from gateway.events import EndReason, GatewayDrained, ProcessRestarted
from gateway.processes import messages
from gateway.processes.child import (
    WORKER_CHECK_EVERY_S,
    WORKER_START_MISSES,
    Child,
    ChildSpec,
    Heartbeats,
    Restarts,
    watch_liveness,
)
from gateway.processes.listeners import address_of
from gateway.telemetry.metrics import forget_worker


class ConfigProgress:
    """Confirmations that each worker has applied an update, and has drained everything that it removed.

    A worker that exits delays neither, because it restarts with the current config.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        loop = asyncio.get_running_loop()
        self._applied: dict[int, asyncio.Future[str | None]] = {
            each: loop.create_future() for each in workers
        }
        self._drained: dict[int, asyncio.Future[None]] = {
            each: loop.create_future() for each in self._applied
        }

    async def problems(self, timeout_s: float) -> dict[int, str]:
        """Wait until the update is applied, and return why some workers did not, by worker."""
        if self._applied:
            await asyncio.wait(self._applied.values(), timeout=timeout_s)
        problems = {
            worker: waiter.result() if waiter.done() else "it does not answer"
            for worker, waiter in self._applied.items()
        }
        return {worker: problem for worker, problem in problems.items() if problem is not None}

    async def wait_until_drained(self, timeout_s: float) -> None:
        """Wait until no request uses anything that the update removed, for at most this time."""
        if self._drained:
            await asyncio.wait(self._drained.values(), timeout=timeout_s)

    def record_applied(self, worker: int, problem: str | None = None) -> None:
        """Record that a worker has applied the update; problem: why it has not."""
        waiter = self._applied.get(worker)
        if waiter is not None and not waiter.done():
            waiter.set_result(problem)

    def record_drained(self, worker: int) -> None:
        """Record that a worker has drained everything that the update removed."""
        waiter = self._drained.get(worker)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class SharedResources(msgspec.Struct, frozen=True):
    """Resources that all workers use.

    admin: the operators' listener, if it is a separate one. metrics_folder: folder of the counters that
    several workers share; None for a single worker. environment: variables of every worker. grpc: reserves
    the port of `grpc.listen`. manager: listener of the API for instances. more: those of `listeners`.
    """

    listener: socket.socket
    admin: socket.socket | None
    metrics_folder: str | None
    environment: Mapping[str, str]
    grpc: socket.socket | None = None
    manager: socket.socket | None = None
    more: tuple[socket.socket, ...] = ()

    @property
    def inherited(self) -> tuple[socket.socket, ...]:
        """The sockets that workers inherit."""
        return tuple(filter(None, (self.listener, self.admin, self.manager, *self.more)))


class WorkerPool:
    """All HTTP workers of one gateway. all_ready: set once each has reported that it is ready.

    app_boot: returns the settings that a worker starts with now. on_ready: called once, with the report of
    the last worker that became ready. on_request: called with a worker's index and its request. instances:
    returns those of this host.
    """

    def __init__(
        self,
        resources: SharedResources,
        restarts: Restarts,
        app_boot: Callable[[], AppBoot],
        on_ready: Callable[[messages.WorkerReady], None],
        on_request: Callable[[int, messages.Request], None],
        instances: Callable[[], tuple[InstanceInfo, ...]],
    ) -> None:
        self._resources = resources
        self._app_boot = app_boot
        self._on_ready = on_ready
        self._on_request = on_request
        self._instances = instances
        self._restarts = restarts
        self._children: list[Child] = []
        self._heartbeats: list[Heartbeats] = []
        self._ready: set[int] = set()
        # Updates that something waits for, by number.
        self._updates: WeakValueDictionary[int, ConfigProgress] = WeakValueDictionary()
        self._update_numbers = count()
        self._space_replies: dict[int, asyncio.Future[tuple[Problem, ...]]] = {}
        # Canaries that a worker has withdrawn since they were put back, by model.
        self._withdrawn: dict[str, messages.CanaryWithdrawn] = {}
        self._drained = GatewayDrained()
        # When each worker was last heard of, on the clock of the loop; what it waits for while it starts.
        self._heard_s: dict[int, float] = {}
        self._waiting: dict[int, tuple[str, ...]] = {}
        self.all_ready = asyncio.Event()

    def start(self, number_of_workers: int) -> list[asyncio.Task[None]]:
        """Start the workers; return the tasks that keep them running, for the caller to cancel."""
        self._heartbeats = [Heartbeats() for _ in range(number_of_workers)]
        self._children = [self._create(worker) for worker in range(number_of_workers)]
        tasks = [asyncio.create_task(child.keep_running()) for child in self._children]
        for child, heartbeats in zip(self._children, self._heartbeats, strict=True):
            watching = watch_liveness(
                child, heartbeats.is_alive, WORKER_CHECK_EVERY_S, start_misses=WORKER_START_MISSES
            )
            tasks.append(asyncio.create_task(watching))
        return tasks

    async def differing_spaces(self, config: Config, timeout_s: float) -> tuple[Problem, ...]:
        """Return the models of a config whose upstreams are known to be of different vector spaces.

        None are known where no worker answers in time.
        """
        number = next(self._update_numbers)
        waiter = self._space_replies[number] = asyncio.get_running_loop().create_future()
        line = msgspec.json.encode(messages.SpaceRequest(number, config))
        try:
            if not any(child.send(line) for child in self._children):
                return ()
            await asyncio.wait((waiter,), timeout=timeout_s)
        finally:
            del self._space_replies[number]
        return waiter.result() if waiter.done() else ()

    def update_config(self, boot: AppBoot, restored: frozenset[str] | None) -> ConfigProgress:
        """Send the config of new workers to every worker, and return their confirmations.

        restored: models whose withdrawn canary is put back; None, all of them.
        """
        number = next(self._update_numbers)
        line = msgspec.json.encode(
            messages.ConfigUpdate(
                number, boot.config, boot.engines, boot.added_models, boot.configuration or {}, restored
            )
        )
        kept = () if restored is None else self._withdrawn.keys() - restored
        self._withdrawn = {model: self._withdrawn[model] for model in kept}
        # A worker that is being started receives this config with its boot message.
        sent = [worker for worker, child in enumerate(self._children) if child.send(line)]
        progress = self._updates[number] = ConfigProgress(sent)
        return progress

    def responds(self, within_s: float) -> bool:
        """Return whether any worker has sent a message within a time."""
        now_s = asyncio.get_running_loop().time()
        return any(now_s - heard_s <= within_s for heard_s in self._heard_s.values())

    @property
    def waiting(self) -> tuple[str, ...] | None:
        """Upstreams that workers which start wait for; None if none of them has reported yet."""
        if not self._waiting:
            return None
        return tuple(sorted({name for names in self._waiting.values() for name in names}))

    def drain(self, drained: GatewayDrained) -> None:
        """Have every worker report that this gateway is drained, or no longer is."""
        self._drained = drained
        self.broadcast(drained)

    def broadcast(
        self, news: ProcessRestarted | GatewayDrained | messages.InstancesUpdate | messages.CanaryWithdrawn
    ) -> None:
        """Send news to every worker that runs; one that starts receives them when it boots."""
        line = msgspec.json.encode(news)
        for child in self._children:
            child.send(line)

    def reply(self, worker: int, reply: messages.Reply) -> None:
        """Send the reply to a worker's request."""
        self._children[worker].send(msgspec.json.encode(reply))

    async def stop(self, signal_number: signal.Signals, patience_s: float) -> None:
        """Stop all workers in parallel, so that each has the full time to exit."""
        await asyncio.gather(*(child.stop(signal_number, patience_s) for child in self._children))

    def _create(self, worker: int) -> Child:
        resources = self._resources
        name, environment = "worker", resources.environment
        if resources.metrics_folder is not None:
            name = f"worker {worker}"
            environment = {**environment, "PROMETHEUS_MULTIPROC_DIR": resources.metrics_folder}
        fds = tuple(listener.fileno() for listener in resources.inherited)
        self._restarts.register(name)
        return Child(
            ChildSpec(name, "gateway.processes.worker", environment, fds),
            partial(self._boot, worker),
            partial(self._on_line, worker),
            partial(self._on_exit, worker, name),
        )

    def _boot(self, worker: int, status_fd: int) -> bytes:
        listener, admin = self._resources.listener, self._resources.admin
        manager = self._resources.manager
        app = msgspec.structs.replace(
            self._app_boot(),
            admin_port=admin.getsockname()[1] if admin else None,
            manager_port=manager.getsockname()[1] if manager else None,
            listener_ports=tuple([more.getsockname()[1] for more in self._resources.more]),
            worker=None if self._resources.metrics_folder is None else worker,
        )
        boot = messages.WorkerBoot(
            app,
            listener.fileno(),
            status_fd,
            admin.fileno() if admin else None,
            manager.fileno() if manager else None,
            address_of(self._resources.grpc) if self._resources.grpc else None,
            self._resources.metrics_folder,
            self._restarts.latest,
            self._instances(),
            tuple(self._withdrawn.values()),
            self._drained,
            tuple([more.fileno() for more in self._resources.more]),
        )
        return msgspec.json.encode(boot)

    def _on_line(self, worker: int, line: bytes) -> None:
        self._heartbeats[worker].record()
        self._heard_s[worker] = asyncio.get_running_loop().time()
        match msgspec.json.decode(line, type=messages.ToParent):
            case messages.Starting() | messages.WorkerReady() as report:
                self._on_start(worker, report)
            case messages.ConfigAck(number, problem):
                self._updates.get(number, ConfigProgress(())).record_applied(worker, problem)
            case messages.ConfigDrained(number):
                self._updates.get(number, ConfigProgress(())).record_drained(worker)
            case messages.SpaceReply(number, problems):
                self._on_space_reply(number, problems)
            case messages.CanaryWithdrawn() as withdrawn:
                self._on_withdrawn(withdrawn)
            case messages.Request() as request:
                self._on_request(worker, request)

    def _on_start(self, worker: int, report: messages.Starting | messages.WorkerReady) -> None:
        if isinstance(report, messages.Starting):
            self._waiting[worker] = report.waiting
            return
        self._waiting[worker] = ()
        self._ready.add(worker)
        if not self.all_ready.is_set() and len(self._ready) == len(self._children):
            self.all_ready.set()
            self._on_ready(report)

    def _on_space_reply(self, number: int, problems: tuple[Problem, ...]) -> None:
        waiter = self._space_replies.get(number)
        if waiter is not None and not waiter.done():
            waiter.set_result(problems)

    def _on_withdrawn(self, withdrawn: messages.CanaryWithdrawn) -> None:
        """Have every worker withdraw a canary that one of them has withdrawn."""
        if self._withdrawn.get(withdrawn.model) != withdrawn:
            self._withdrawn[withdrawn.model] = withdrawn
            self.broadcast(withdrawn)

    def _on_exit(self, worker: int, name: str, reason: EndReason, how: str) -> None:
        for progress in self._updates.values():
            progress.record_applied(worker)
            progress.record_drained(worker)
        self._heartbeats[worker].reset()
        self._heard_s.pop(worker, None)
        if self._resources.metrics_folder is not None:
            forget_worker(self._resources.metrics_folder, worker)
        self._restarts.record(name, reason, how)
