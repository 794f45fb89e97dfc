"""One HTTP worker process: reads its boot message, serves the application, and drains when it is stopped.

Rule: it lives as long as the parent's pipe, and end of file on standard input stops it at once. Lines that
arrive there are new configs, replies to its requests, and restart counts. Requests, confirmations and
heartbeats leave on the status pipe.
"""

import asyncio
import gc
import logging
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from threading import Thread
from types import FrameType
from typing import Any, TypeVar

import msgspec
import uvicorn
import uvloop

from gateway.api.operators.additions import AdditionsClient
from gateway.api.server.client_tls import verify_mode
from gateway.api.server.connection_limit import connections_within_files
from gateway.api.server.http_protocol import bounded_protocol
from gateway.app import Application, Collaborators, build, start_tasks
from gateway.audit.records import Actor
from gateway.config.diff import ReloadOutcome
from gateway.config.schema import Config, ListenerTls
from gateway.declared.additions import Edit, Listing
from gateway.declared.host import HostCommand, HostResult
from gateway.events import Event, GatewayDrained, ModelSummary, ProcessRestarted, UpstreamJudged
from gateway.processes import messages
from gateway.processes.listeners import join_port
from gateway.processes.messages import CanaryWithdrawn, WorkerBoot, WorkerReady
from gateway.processes.notices import notice_of
from gateway.telemetry.access_log import LOGGED, log_change
from gateway.telemetry.log_lines import CallLines, call_lines, write_lines

logger = logging.getLogger("gateway")

# An engine may have to load a model before the reply.
RELOAD_TIMEOUT_S = 600.0
LISTING_TIMEOUT_S = 10.0
# An instance stops within 30 s for calls in flight and 35 s for its process.
HOST_TIMEOUT_S = 120.0
# The parent kills a worker that has been silent for several times as long.
HEARTBEAT_EVERY_S = 1.0
# Longer than any sensible client's keep-alive pool keeps an idle connection.
KEEP_ALIVE_S = 75
READY_POLL_S = 0.05
STARTING_EVERY_S = 2.0
# A request creates hundreds of objects and hardly any cycles. The default would collect on every second one.
GC_THRESHOLD = 5_000
ABANDON_S = 1.0
READ_BYTES = 65536

_Reply = TypeVar("_Reply", ReloadOutcome, Listing, HostResult, GatewayDrained)


class ParentLink:
    """Connection to the parent, used on the worker's event loop. status_fd: pipe that the parent reads."""

    def __init__(self, status_fd: int) -> None:
        self._status_fd = status_fd
        self._application: Application | None = None
        # Replies that requests wait for, by the request's number.
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()
        self._poll = select.poll()
        self._poll.register(status_fd, select.POLLOUT)

    def attach(self, application: Application) -> None:
        """Set the receiver of what the parent sends. Must precede the first call of `receive`."""
        self._application = application

    def send(self, message: messages.ToParent) -> None:
        """Send one message to the parent."""
        line = msgspec.json.encode(message) + b"\n"
        while line:
            # A signal may interrupt the write of a long line.
            line = line[os.write(self._status_fd, line) :]

    def notify(self, notice: messages.Notice) -> None:
        """Have the parent call the webhook."""
        self._send_if_read(messages.Request(next(self._numbers), notice))

    def _send_if_read(self, message: messages.Heartbeat | messages.Request) -> None:
        """Send a short message, or drop it if the parent reads nothing now.

        A stopped parent does not, and a write that waits for it would block the requests too.
        """
        if self._poll.poll(0):
            self.send(message)

    async def send_heartbeats(self) -> None:
        """Send a heartbeat every second; runs until cancelled."""
        while True:
            self._send_if_read(messages.Heartbeat())
            await asyncio.sleep(HEARTBEAT_EVERY_S)

    async def request_reload(self, by: Actor) -> ReloadOutcome:
        """Ask the parent to read the file again. Raises: TimeoutError."""
        return await self._request(messages.ReadFile(by), RELOAD_TIMEOUT_S, ReloadOutcome)

    async def request_edit(self, edit: Edit) -> ReloadOutcome:
        """Ask the parent to apply an edit of the additions. Raises: TimeoutError."""
        return await self._request(edit, RELOAD_TIMEOUT_S, ReloadOutcome)

    async def request_listing(self) -> Listing:
        """Ask the parent for the additions. Raises: TimeoutError."""
        return await self._request(messages.ListAdditions(), LISTING_TIMEOUT_S, Listing)

    async def request_drain(self, is_drained: bool) -> GatewayDrained:  # noqa: FBT001 - the whole request
        """Ask the parent to drain this gateway, or to put it back. Raises: TimeoutError."""
        return await self._request(messages.SetDrain(is_drained), LISTING_TIMEOUT_S, GatewayDrained)

    async def request_host(self, command: HostCommand) -> HostResult:
        """Ask the parent to carry out a request about this host. Raises: TimeoutError."""
        return await self._request(command, HOST_TIMEOUT_S, HostResult)

    def receive(self, line: bytes) -> None:
        """Handle one line from the parent."""
        application = self._application
        assert application is not None
        match msgspec.json.decode(line, type=messages.ToWorker):
            case messages.ConfigUpdate() as update:
                self._apply(application, update)
            case messages.Reply(number, body):
                waiter = self._replies.get(number)
                if waiter is not None and not waiter.done():
                    waiter.set_result(body)
            case messages.InstancesUpdate(instances):
                application.instances.update(instances)
            case messages.SpaceRequest(number, config):
                self.send(messages.SpaceReply(number, application.groups.differing_spaces(config)))
            case messages.CanaryWithdrawn(model, upstream, reason):
                application.groups.withdraw(model, upstream, reason)
            case ProcessRestarted() | GatewayDrained() as event:
                application.observe(event)

    async def _request(
        self,
        body: messages.ReadFile | messages.ListAdditions | messages.SetDrain | Edit | HostCommand,
        timeout_s: float,
        kind: type[_Reply],
    ) -> _Reply:
        number = next(self._numbers)
        waiter = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(messages.Request(number, body))
            async with asyncio.timeout(timeout_s):
                reply = await waiter
        finally:
            del self._replies[number]
        assert isinstance(reply, kind)
        return reply

    def _apply(self, application: Application, update: messages.ConfigUpdate) -> None:
        try:
            drained = application.follow(update.config, update.engines, update.added_models, update.restored)
        except OSError as error:
            self.send(messages.ConfigAck(update.number, str(error)))
            return
        application.describe(update.configuration)
        self.send(messages.ConfigAck(update.number))
        drained.add_done_callback(lambda _: self.send(messages.ConfigDrained(update.number)))


class DrainingServer(uvicorn.Server):
    """uvicorn server that finishes requests in flight before it closes, and answers new ones with 503.

    settings: with `lame_duck_s`, during which it still serves, and `drain_s`.
    """

    def __init__(self, config: uvicorn.Config, application: Application, settings: Config) -> None:
        super().__init__(config)
        self._application = application
        self._settings = settings
        self._stopping: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the drain on SIGTERM; exit on a second one."""
        del sig, frame
        if self._stopping is not None:
            self.force_exit = True
            self.should_exit = True
            return
        loop = asyncio.get_event_loop()
        self._stopping = loop.create_task(self._drain())

    async def _drain(self) -> None:
        in_flight = self._application.in_flight
        if self._settings.lame_duck_s:
            await in_flight.serve_on(self._settings.lame_duck_s)
        if not await in_flight.drain(self._settings.drain_s):
            logger.warning("stopped with %d calls unfinished", in_flight.calls)
            # Their callers receive an error; give the replies a moment to leave.
            in_flight.abandon()
            await in_flight.drain(ABANDON_S)
        self.should_exit = True


def main() -> None:
    """Run the worker; entry point of the child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines = _parent_lines()
    boot = msgspec.json.decode(next(lines), type=WorkerBoot)
    write_lines(boot.app.config.logs)
    for chatty in ("uvicorn", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(boot, lines))


async def _serve(boot: WorkerBoot, parent_lines: Iterator[bytes]) -> None:
    access_lines = call_lines(boot.app.config.logs)
    link = ParentLink(boot.status_fd)
    _start_reader(parent_lines, link.receive, boot.metrics_folder)
    application = _build(boot, link, access_lines)
    server = DrainingServer(_server_config(application, boot.app.config), application, boot.app.config)
    # Objects created until now live as long as the process, and no generation of the collector need scan
    # them.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    reporting = start_tasks((link.send_heartbeats(), _report_ready(application, link, server)))
    try:
        async with application.lifespan(), _grpc_listener(application, boot.grpc_address):
            await server.serve(sockets=_sockets(boot))
            # uvicorn has restored its handlers. A signal must not interrupt the last writes to Redis.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        access_lines.flush()
        for task in reporting:
            task.cancel()


@asynccontextmanager
async def _grpc_listener(application: Application, address: str | None) -> AsyncIterator[None]:
    """Serve gRPC at host:port, if the configuration has an address for it. Raises: OSError."""
    if application.create_grpc is None or address is None:
        yield
        return
    server = application.create_grpc()
    await server.start(address)
    logger.info("gRPC listens on %s", address)
    try:
        yield
    finally:
        await server.stop()


def _build(boot: WorkerBoot, link: ParentLink, access_lines: CallLines) -> Application:
    log = access_lines.observe if boot.app.config.logs.access else log_change

    notify = boot.app.config.notify
    notified = () if notify is None else notify.on

    def observe(event: Event) -> None:
        log(event)
        if notified and (notice := notice_of(event)) is not None and notice.kind in notified:
            link.notify(notice)
        if isinstance(event, UpstreamJudged) and event.standing == "withdrawn":
            link.send(CanaryWithdrawn(event.model, event.upstream, event.reason))

    adding = AdditionsClient(link.request_edit, link.request_listing)
    application = build(
        boot.app,
        Collaborators(
            observe=observe,
            observed=LOGGED,
            reload=link.request_reload,
            adding=adding,
            drain=link.request_drain,
            manager=link.request_host if boot.manager_fd is not None else None,
        ),
    )
    for restart in boot.restarts:
        application.observe(restart)
    if boot.drained.since_s is not None:
        application.observe(boot.drained)
    application.instances.update(boot.instances)
    link.attach(application)
    for withdrawn in boot.withdrawn:
        application.groups.withdraw(withdrawn.model, withdrawn.upstream, withdrawn.reason)
    return application


def _server_config(application: Application, config: Config) -> uvicorn.Config:
    return uvicorn.Config(
        application.asgi,
        http=bounded_protocol(application.in_flight, connections_within_files(config.limits.connections)),
        # The application's background tasks start before this server and stop after it.
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        **(_tls_options(config.tls) if config.tls else {}),
    )


def _sockets(boot: WorkerBoot) -> list[socket.socket]:
    shared = [socket.socket(fileno=number) for number in (boot.listen_fd, *boot.more_fds)]
    # One of several workers has its own sockets on the same ports, which close with the worker.
    sockets = shared if boot.app.worker is None else [join_port(listener) for listener in shared]
    others = (boot.admin_fd, boot.manager_fd)
    sockets += [socket.socket(fileno=number) for number in others if number is not None]
    return sockets


def _tls_options(tls: ListenerTls) -> dict[str, Any]:
    """Return the settings under uvicorn's names."""
    return {
        "ssl_certfile": tls.certificate,
        "ssl_keyfile": tls.private_key,
        "ssl_ca_certs": tls.client_ca,
        "ssl_cert_reqs": verify_mode(tls),
    }


async def _report_ready(application: Application, link: ParentLink, server: uvicorn.Server) -> None:
    gateway = application.gateway
    report_s = time.monotonic()
    # Polled, and only while starting, so that the prober need not signal each replica's first attempt.
    while not (
        server.started
        and application.groups.is_settled
        and all(upstream.startup_done for upstream in gateway.upstreams.values())
    ):
        await asyncio.sleep(READY_POLL_S)
        if time.monotonic() >= report_s:
            report_s += STARTING_EVERY_S
            waiting = [name for name, upstream in gateway.upstreams.items() if not upstream.startup_done]
            link.send(messages.Starting(tuple(waiting)))
    config, added = gateway.serving.config, application.added_models
    of_file = msgspec.structs.replace(
        config, models={name: model for name, model in config.models.items() if name not in added}
    )
    summaries = tuple(_summary(application, name) for name in config.models)
    link.send(WorkerReady(summaries, application.groups.differing_spaces(of_file)))


def _summary(application: Application, name: str) -> ModelSummary:
    routes = application.gateway.routes
    upstream = application.gateway.view_of(name)
    capabilities = upstream.capabilities
    if capabilities is None:
        return ModelSummary(name, upstream.settings.backend, ())
    return ModelSummary(
        name,
        upstream.settings.backend,
        tuple(operation.value for operation in routes.operations(name)),
        capabilities.dtype,
        upstream.dimensions,
        capabilities.max_input_tokens,
    )


def _parent_lines() -> Iterator[bytes]:
    """Yield the lines of standard input until the parent has exited.

    Read without Python's own buffer, because a thread that waits in it would keep the process from exiting.
    """
    rest = b""
    while read := os.read(sys.stdin.fileno(), READ_BYTES):
        *lines, rest = (rest + read).split(b"\n")
        yield from lines


def _start_reader(
    lines: Iterator[bytes], receive: Callable[[bytes], None], metrics_folder: str | None
) -> None:
    """Pass the parent's lines to the event loop from a thread, and exit the process when they end."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in lines:
            # A loop that has closed handles no more lines.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(receive, line)
        # The parent removes the folder, unless it was killed.
        if metrics_folder is not None:
            shutil.rmtree(metrics_folder, ignore_errors=True)
        os._exit(1)

    Thread(target=read, daemon=True).start()


if __name__ == "__main__":
    main()
