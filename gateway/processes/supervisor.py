"""The parent process: starts engines and HTTP workers, restarts those that exit, stops everything in order.

Imports neither the web framework nor torch.
"""

import asyncio
import logging
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from backends.torch import wire
from gateway.audit.records import Actor, AuditRecord
from gateway.audit.trail import AuditTrail
from gateway.config.boot import AppBoot, worker_share
from gateway.config.diff import ReloadOutcome
from gateway.config.digest import section_digests
from gateway.config.identity import new_identity
from gateway.config.problems import Problem, count_of
from gateway.config.schema import Config
from gateway.config.state_folder import state_folder
from gateway.declared.additions import Drain, Listing, Put, Remove
from gateway.declared.audited import host_record, reload_record
from gateway.declared.composition import AdditionsState
from gateway.declared.host import ActOnModel, AddModel, HostCommand, HostResult, InstanceRecord, ListModels
from gateway.declared.instances import InstanceFile, StateFileError
from gateway.declared.store import AdditionsInMemory, AdditionsInRedis
from gateway.events import GatewayDrained, ProcessRestarted
from gateway.processes import messages
from gateway.processes.child import Restarts
from gateway.processes.config_applier import (
    ConfigApplier,
    ConfigSource,
    ReloadJob,
    ReloadQueue,
    watch_file,
    watch_secrets,
)
from gateway.processes.engine_pool import EnginePool, EngineProcess
from gateway.processes.engine_process import KILL_AFTER_S, child_environment, worker_environment
from gateway.processes.instance import Host
from gateway.processes.instance_pool import GatewayView, InstancePool
from gateway.processes.listeners import address_of, open_listener, reserve_port
from gateway.processes.model_requests import ModelRequests
from gateway.processes.service_manager import ServiceManager
from gateway.processes.worker_pool import ConfigProgress, SharedResources, WorkerPool
from gateway.store.redis_client import RedisClient
from gateway.telemetry.access_log import log_event
from gateway.telemetry.log_lines import WRITE_ALWAYS

if TYPE_CHECKING:
    # Loaded only where there is a webhook.
    from gateway.processes.notifier import Notifier

logger = logging.getLogger("gateway")

# Time for the workers to apply a new config.
UPDATE_TIMEOUT_S = 10.0
# Time for calls in flight to an instance that is being stopped.
INSTANCE_DRAIN_S = 30.0
# No caller waits for additions, which leaves enough time to open a connection to Redis.
STORE_TIMEOUT_S = 2.0
DRAINED = "this gateway is drained: /readyz is 503, calls are served; `gateway drain --undo` puts it back"
# Silence during a start after which an operator would wonder.
START_REPORT_EVERY_S = 5.0
UNDRAINED = "this gateway is no longer drained"


class StartError(Exception):
    """The gateway cannot start; the message gives the reason and the way out."""


class Supervisor:
    """All processes of one gateway.

    boot: the config that it starts with, and its first key. source: where a later config is read from.
    progress: called with each step while the gateway starts. on_ready: called once, with a worker's report
    and the gateway's address, when all workers are ready.
    """

    def __init__(
        self,
        boot: AppBoot,
        source: ConfigSource,
        progress: Callable[[str], None],
        on_ready: Callable[[messages.WorkerReady, str], None],
    ) -> None:
        # Sockets and processes keep these settings; `self._applier.config` is the served config.
        self._start_config = boot.config
        self._boot = boot
        self._source = source
        self._progress = progress
        self._on_ready = on_ready
        store = boot.config.quotas.store
        redis = None if store == "memory" else RedisClient(store, STORE_TIMEOUT_S)
        folder = state_folder(boot.config.state_dir, source.environment)
        self._trail = AuditTrail(redis, folder, boot.config.audit, log_event)
        additions = (
            AdditionsInMemory(self._trail.record)
            if redis is None
            else AdditionsInRedis(redis, boot.config.audit, log_event)
        )
        self._additions = AdditionsState(additions, source.environment)
        self._applier = ConfigApplier(
            boot.config,
            source,
            self._additions,
            self._update_workers,
            self._differing_spaces,
            self._with_instances,
            has_first_key=boot.first_key_digest is not None,
        )
        self._instances: InstancePool | None = None
        self._stored_instances: tuple[InstanceRecord, ...] = ()
        self._draining: asyncio.Task[None] | None = None
        self._reloads = ReloadQueue(self._apply)
        self._retiring: set[asyncio.Task[None]] = set()
        self._failure: str | None = None
        # Upstreams whose models could not be loaded at the start.
        self._unusable: set[str] = set()
        self._stop = asyncio.Event()
        self._stop_at_once = asyncio.Event()
        self._service = ServiceManager(source.environment)
        self._status = "starting"
        # What each engine last reported about its models.
        self._loading: dict[str, str] = {}
        self._drained = GatewayDrained()
        self._notifier: Notifier | None = None
        self._enqueue_notice: Callable[[messages.Notice], None] = lambda _: None

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises: StartError.
        """
        with ExitStack() as resources:
            resources.callback(self._service.close)
            self._open(resources)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_stop, number.name)
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup, sys.stdin.isatty())
            await self._serve()
        if self._failure is not None:
            raise StartError(self._failure)

    def _open(self, resources: ExitStack) -> None:
        """Create the pools. Ports are bound first, so that one in use is reported before anything starts."""
        config = self._start_config
        environment = child_environment(self._source.environment)
        has_several_workers = config.workers > 1
        open_socket = reserve_port if has_several_workers else open_listener
        listener = resources.enter_context(_bind(open_socket, config.listen, "listen"))
        admin = config.admin.listen and _bind(open_listener, config.admin.listen, "admin.listen")
        # grpc opens its listeners itself: one in each worker, on the reserved port.
        grpc = config.grpc and _bind(reserve_port, config.grpc.listen, "grpc.listen")
        manager = config.manager and _bind(open_listener, config.manager.listen, "manager.listen")
        more = [
            resources.enter_context(_bind(open_socket, each.address, f"listeners[{index}].address"))
            for index, each in enumerate(config.listeners)
        ]
        shared = SharedResources(
            listener,
            resources.enter_context(admin) if admin else None,
            _private_folder(resources, "gateway-metrics-") if has_several_workers else None,
            worker_environment(self._source.environment, config),
            resources.enter_context(grpc) if grpc else None,
            resources.enter_context(manager) if manager else None,
            tuple(more),
        )

        def broadcast(restart: ProcessRestarted) -> None:
            # The pool exists once a process can restart.
            self._workers.broadcast(restart)

        restarts = Restarts(broadcast)
        self._identity = new_identity(address_of(listener))
        address = f"{'https' if config.tls else 'http'}://{address_of(listener)}"
        self._workers = WorkerPool(
            shared,
            restarts,
            self._app_boot,
            partial(self._on_workers_ready, address),
            self._on_worker_request,
            lambda: self._instances.infos if self._instances is not None else (),
        )
        new_folder = partial(_private_folder, resources, "gateway-")
        self._engines = EnginePool(new_folder, environment, self._on_engine_state, restarts)
        if config.notify is not None:
            # An HTTP client takes 0.1 s to import, which a gateway without a webhook does not need here.
            from gateway.processes.notifier import Notifier

            self._notifier = Notifier(config.notify)
            self._enqueue_notice = self._notifier.enqueue
        if config.manager is not None:
            view = GatewayView(
                lambda: self._applier.config,
                self._publish_instances,
                lambda instances: self._workers.broadcast(messages.InstancesUpdate(instances)),
                lambda: int(listener.getsockname()[1]),
            )
            file, self._stored_instances = _open_state(resources, config, self._source.environment)
            self._instances = InstancePool(file, Host(environment, cache(new_folder)), view)
            self._model_requests = ModelRequests(view.config, file.folder, environment)

    async def _serve(self) -> None:
        await self._applier.start(self._engines)
        tasks = self._workers.start(self._start_config.workers)
        if self._instances is not None:
            await self._instances.start(self._stored_instances)
        tasks.append(asyncio.create_task(self._trail.run()))
        tasks.append(asyncio.create_task(self._run_reloads_when_ready()))
        tasks.append(asyncio.create_task(self._follow_additions_when_ready()))
        if self._notifier is not None:
            tasks.append(asyncio.create_task(self._notifier.run()))
        tasks.append(asyncio.create_task(self._report_start()))
        tasks.append(asyncio.create_task(self._service.feed_watchdog(self._workers.responds)))
        if self._start_config.reload.watch:
            on_change = partial(self._enqueue_reload, self._actor("file watch"))
            tasks.append(asyncio.create_task(watch_file(self._source, on_change)))
        on_rotation = partial(self._enqueue_reload, self._actor("secret file"))
        tasks.append(asyncio.create_task(watch_secrets(self._source, on_rotation)))
        await self._stop.wait()
        # A second Ctrl-C does not wait for requests in flight.
        second_signal = asyncio.create_task(self._stop_at_once.wait())
        drain = self._workers.stop(signal.SIGTERM, self._stop_patience_s)
        await asyncio.wait((asyncio.ensure_future(drain), second_signal), return_when=asyncio.FIRST_COMPLETED)
        second_signal.cancel()
        await self._workers.stop(signal.SIGKILL, KILL_AFTER_S)
        # A reload in progress is stopped before the engines, because it could start others.
        tasks += self._retiring
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._additions.aclose()
        if self._instances is not None:
            await asyncio.gather(self._instances.stop_all(), self._engines.stop_all())
        else:
            await self._engines.stop_all()

    async def _run_reloads_when_ready(self) -> None:
        """Run reloads once the gateway is up. Until then a problem of the config stops the gateway."""
        await self._workers.all_ready.wait()
        await self._reloads.run_jobs()

    async def _follow_additions_when_ready(self) -> None:
        """Apply the stored additions that need an engine, and then those that other gateways add."""

        async def apply_additions() -> None:
            await self._reloads.run("added")

        await self._workers.all_ready.wait()
        if self._additions.current.additions.upstreams:
            await apply_additions()
        await self._additions.follow(apply_additions)

    async def _report_start(self) -> None:
        """Report periodically what a start that takes long is waiting for."""
        started_s = time.monotonic()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(START_REPORT_EVERY_S):
                    await self._workers.all_ready.wait()
                return
            self._show(f"starting for {time.monotonic() - started_s:.0f} s, waiting for {self._awaited()}")

    def _awaited(self) -> str:
        """Return what the start is waiting for, in words."""
        names = self._workers.waiting
        if names is None:
            return "its processes, which are being loaded"
        details = {name: self._loading.get(name) for name in names}
        return "; ".join(name + (f" ({detail})" if detail else "") for name, detail in details.items()) or (
            "its other workers"
        )

    def _show(self, detail: str) -> None:
        """Report a step of the start."""
        self._progress(detail)
        self._service.show(detail)

    async def _apply(self, job: ReloadJob) -> ReloadOutcome:
        """Run a job of the queue, and report to the service manager if it is a reload of the file."""
        if job != "file":
            return await self._applier.apply(job)
        self._service.reloading()
        problems = ""
        try:
            outcome = await self._applier.apply(job)
            if outcome.problems:
                problems = "; router.yaml has problems and was not reloaded, see the log"
            return outcome
        finally:
            self._service.ready(self._service_status + problems)

    def _on_stop(self, cause: str) -> None:
        """Handle a signal to stop. A second one does not wait for requests in flight."""
        config = self._start_config
        if self._stop.is_set():
            self._stop_at_once.set()
            logger.info("stopping at once (%s)", cause, extra=WRITE_ALWAYS)
        else:
            self._stop.set()
            lame_duck = f"calls are served for {config.lame_duck_s:g} s, then " if config.lame_duck_s else ""
            status = f"stopping ({cause}): {lame_duck}calls in flight have {config.drain_s:g} s"
            logger.info("%s", status, extra=WRITE_ALWAYS)
            self._service.stopping(status, self._stop_patience_s)

    @property
    def _service_status(self) -> str:
        """State in words, for the service manager."""
        return self._status if self._drained.since_s is None else DRAINED

    @property
    def _stop_patience_s(self) -> float:
        """Time after which workers that stop are killed."""
        return self._start_config.lame_duck_s + self._start_config.drain_s + KILL_AFTER_S

    def _on_hangup(self, had_terminal: bool) -> None:  # noqa: FBT001 - a signal handler's argument
        """Handle SIGHUP: stop if the terminal was closed, otherwise reload."""
        if had_terminal and not sys.stdin.isatty():
            self._on_stop("SIGHUP, its terminal was closed")
        else:
            self._enqueue_reload(self._actor("SIGHUP"))

    def _actor(self, name: str) -> Actor:
        return Actor(name, "gateway", gateway=self._identity.name)

    def _enqueue_reload(self, by: Actor, reply: Callable[[ReloadOutcome], None] = lambda _: None) -> None:
        """Read the file again, record that, and reply."""

        async def record_and_reply(outcome: ReloadOutcome) -> None:
            await self._record(reload_record(by, outcome))
            reply(outcome)

        self._reloads.enqueue("file", lambda outcome: self._run(record_and_reply(outcome)))

    async def _record(self, record: AuditRecord | None) -> None:
        if record is not None:
            await self._trail.record(record)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in the background, until the gateway stops."""
        task = asyncio.create_task(work)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _app_boot(self) -> AppBoot:
        """Return the current settings, so that a restarted worker has the config of the others."""
        return msgspec.structs.replace(
            self._boot,
            config=worker_share(self._applier.config),
            engines=self._engines.addresses,
            added_models=self._applier.added_models,
            identity=self._identity,
            configuration=section_digests(self._applier.config, self._names_of_instances()),
        )

    def _names_of_instances(self) -> set[str]:
        """Return the upstreams and models that only this host has."""
        infos = () if self._instances is None else self._instances.infos
        return {name for info in infos for name in (info.name, info.upstream)}

    async def _update_workers(self, before: Config, unneeded: Sequence[EngineProcess]) -> None:
        """Send the served config to the workers, and stop engines that requests no longer use.

        before: the config that requests in flight began with.
        """
        progress = self._workers.update_config(self._app_boot(), self._applier.restored)
        for worker, problem in (await progress.problems(UPDATE_TIMEOUT_S)).items():
            logger.error("worker %d did not apply the config, and serves the old one: %s", worker, problem)
        if not unneeded and self._instances is None:
            return
        longest_s = max((model.deadline_s for model in before.models.values()), default=0.0)
        task = self._draining = asyncio.create_task(self._retire_engines(progress, unneeded, longest_s))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _differing_spaces(self, config: Config) -> tuple[Problem, ...]:
        return await self._workers.differing_spaces(worker_share(config), UPDATE_TIMEOUT_S)

    def _with_instances(self, config: Config) -> Config:
        return config if self._instances is None else self._instances.overlay(config)

    async def _publish_instances(self) -> None:
        """Serve the instances that have joined, and wait for calls to those that have left."""
        await self._reloads.run("instances")
        if self._draining is not None:
            await asyncio.wait({self._draining}, timeout=INSTANCE_DRAIN_S)

    async def _retire_engines(
        self, progress: ConfigProgress, engines: Sequence[EngineProcess], longest_s: float
    ) -> None:
        await progress.wait_until_drained(longest_s)
        await self._engines.stop(engines)

    def _on_workers_ready(self, address: str, report: messages.WorkerReady) -> None:
        """Show that the gateway is up, unless its models cannot be served as the file says."""
        if self._stop.is_set():
            # A worker may report while the gateway stops, for example because a model cannot be loaded.
            return
        if report.problems:
            self._failure = "\n".join(f"{problem.path}: {problem.message}" for problem in report.problems)
            self._stop.set()
        else:
            self._status = f"serving {count_of(report.models, 'model')} at {address}"
            self._service.ready(self._status)
            self._on_ready(report, address)

    def _on_engine_state(self, state: wire.State) -> None:
        is_up = self._workers.all_ready.is_set()
        if state.state == "failed" and is_up:
            logger.error("upstream %s: its model cannot be loaded: %s", state.model, state.detail)
        elif state.state == "failed" and self._may_start_without(state.model):
            self._progress(f"{state.model}: not served, its model cannot be loaded")
            logger.error("upstream %s: its model cannot be loaded: %s", state.model, state.detail)
        elif state.state == "failed":
            self._failure = f"upstreams.{state.model}: {state.detail}"
            self._stop.set()
        elif not is_up:
            detail = state.detail if state.state == "loading" else f"{state.state}, {state.detail}"
            self._loading[state.model] = detail
            self._show(f"{state.model}: {detail}")

    def _may_start_without(self, upstream: str) -> bool:
        """Return whether the gateway serves others while an upstream's model cannot be loaded.

        A model of `preload: false` is not needed at the start.
        """
        self._unusable.add(upstream)
        upstreams = self._applier.config.upstreams
        return not upstreams[upstream].preload and not self._unusable.issuperset(upstreams)

    def _on_worker_request(self, worker: int, request: messages.Request) -> None:
        def reply(result: ReloadOutcome | Listing | HostResult | GatewayDrained) -> None:
            self._workers.reply(worker, messages.Reply(request.number, result))

        async def run_and_reply(command: HostCommand) -> None:
            reply(await self._carry_out(command))

        match request.body:
            case messages.ReadFile(by):
                self._enqueue_reload(by, reply)
            case messages.Notice() as notice:
                self._enqueue_notice(notice)
            case messages.ListAdditions():
                reply(self._additions.listing)
            case messages.SetDrain(is_drained):
                self._set_drain(is_drained=is_drained)
                reply(self._drained)
            case Put() | Remove() | Drain() as edit:
                self._reloads.enqueue(edit, reply)
            case command:
                self._run(run_and_reply(command))

    async def _carry_out(self, command: HostCommand) -> HostResult:
        """Carry out a request about the models or the instances of this host, and record it."""
        if isinstance(command, ListModels | AddModel | ActOnModel):
            result = await self._model_requests.run(command)
        else:
            assert self._instances is not None
            result = await self._instances.run(command)
        await self._record(host_record(command, result))
        return result

    def _set_drain(self, *, is_drained: bool) -> None:
        """Have load balancers send this gateway no work, or send it work again."""
        if is_drained == (self._drained.since_s is not None):
            return
        self._drained = GatewayDrained(time.time() if is_drained else None)
        self._workers.drain(self._drained)
        logger.info(DRAINED if is_drained else UNDRAINED, extra=WRITE_ALWAYS)
        self._service.show(self._service_status)


def _open_state(
    resources: ExitStack, config: Config, environment: Mapping[str, str]
) -> tuple[InstanceFile, tuple[InstanceRecord, ...]]:
    """Open the file of the instances, and return it with its records. Raises: StartError."""
    folder = state_folder(config.state_dir, environment)
    if folder is None:
        raise StartError("`manager` keeps instances in a folder, and none is known; set `state_dir`")
    file = InstanceFile(folder)
    resources.callback(file.close)
    try:
        return file, file.open()
    except StateFileError as error:
        raise StartError(str(error)) from error


def _bind(open_socket: Callable[[str], socket.socket], listen: str, key: str) -> socket.socket:
    """Open a listener. key: its setting, for the message. Raises: StartError."""
    try:
        return open_socket(listen)
    except OSError as error:
        raise StartError(
            f"cannot listen on {listen}: {error.strerror or error}. Stop the process there, or set "
            f"{'LISTEN (or `listen:` in router.yaml)' if key == 'listen' else f'`{key}:` in router.yaml'} "
            "to a different address"
        ) from error


def _private_folder(resources: ExitStack, prefix: str) -> str:
    # Created with mode 0700. Children remove their files if this process is killed and cannot.
    return resources.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True))
