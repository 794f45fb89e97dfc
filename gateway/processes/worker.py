"""One HTTP worker process: reads its boot message, serves the application, drains when told to stop.

Rule: it lives as long as the parent's pipe; end of file on standard input ends it at once. What comes there
before is how it serves on: another config, and answers to what it asked.
"""

import asyncio
import gc
import logging
import os
import shutil
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Thread
from types import FrameType
from typing import Any

import msgspec
import uvicorn
import uvloop

from gateway.api.operators.added_models import AdditionsClient
from gateway.api.server.http_protocol import BoundedProtocol
from gateway.app import Application, Collaborators, build
from gateway.config.schema import ListenerTls
from gateway.events import ProcessRestarted
from gateway.processes import listeners
from gateway.processes.messages import AppBoot, ModelLine, Ready
from gateway.processes.worker_link import ParentLink
from gateway.telemetry.access_log import log_change
from gateway.telemetry.log_lines import call_lines, write_lines
from gateway.upstreams.registry import log_failure

# Longer than any sensible client's keep-alive pool holds an idle connection.
KEEP_ALIVE_S = 75
SETTLE_POLL_S = 0.05
# A call makes hundreds of objects and hardly a cycle; the default looks for some after every second call.
GC_THRESHOLD = 5_000
ABANDON_S = 1.0
READ_BYTES = 65536


class WorkerBoot(msgspec.Struct, frozen=True):
    """The first line of standard input, as JSON.

    listen_fd, admin_fd: sockets that the parent has bound. metrics_folder: where several workers count.
    restarts: what each process of the gateway went through before this one was started.
    """

    boot: AppBoot
    listen_fd: int
    status_fd: int
    admin_fd: int | None = None
    metrics_folder: str | None = None
    restarts: tuple[ProcessRestarted, ...] = ()


class DrainingServer(uvicorn.Server):
    """uvicorn that finishes what is in flight, answering 503 to what is new, before it closes."""

    def __init__(self, config: uvicorn.Config, application: Application, drain_s: float) -> None:
        super().__init__(config)
        self._application = application
        self._drain_s = drain_s
        self._stopping: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM starts the drain; a second one ends it."""
        del sig, frame
        if self._stopping is not None:
            self.force_exit = True
            self.should_exit = True
            return
        loop = asyncio.get_event_loop()
        self._stopping = loop.create_task(self._stop())
        logging.getLogger("gateway").info("stopping")

    async def _stop(self) -> None:
        if not await self._application.in_flight.drain(self._drain_s):
            left = self._application.in_flight.calls
            logging.getLogger("gateway").warning("stopped with %d calls unfinished", left)
            # They are told so; a moment for the answers to leave.
            self._application.in_flight.abandon()
            await self._application.in_flight.drain(ABANDON_S)
        self.should_exit = True


def main() -> None:
    """Entry point of the child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines = _lines_of_parent()
    boot = msgspec.json.decode(next(lines), type=WorkerBoot)
    write_lines(boot.boot.config.logs)
    for chatty in ("uvicorn", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(boot, lines))


async def _serve(boot: WorkerBoot, told: Iterator[bytes]) -> None:
    lines = call_lines(boot.boot.config.logs)
    observe = lines.observe if boot.boot.config.logs.access else log_change
    link = ParentLink(boot.status_fd)
    loop = asyncio.get_running_loop()

    def hear(line: bytes) -> None:
        loop.call_soon_threadsafe(link.hear, line)

    Thread(target=_listen_to_parent, args=(told, hear, boot.metrics_folder), daemon=True).start()
    adding = AdditionsClient(link.ask_edit, link.ask_listing)
    application = build(boot.boot, Collaborators(observe=observe, reload=link.ask_reload, adding=adding))
    for restart in boot.restarts:
        application.observe(restart)
    link.listen(application.follow, application.observe)
    drain_s, tls = boot.boot.config.drain_s, boot.boot.config.tls
    config = uvicorn.Config(
        application.asgi,
        http=BoundedProtocol,
        # What runs beside the calls begins before and ends after this server does.
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        **(_tls_options(tls) if tls else {}),
    )
    server = DrainingServer(config, application, drain_s)
    # What was made until now stays for good: the collector need not look at it with every generation.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    reporting = [
        asyncio.create_task(link.tell_alive()),
        asyncio.create_task(_report(application, link, server)),
    ]
    for one in reporting:
        one.add_done_callback(log_failure)
    try:
        async with application.lifespan():
            await server.serve(sockets=_sockets(boot))
            # uvicorn has given its handler back: nothing cuts short what is told to Redis last.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        lines.flush()
        for one in reporting:
            one.cancel()


def _sockets(boot: WorkerBoot) -> list[socket.socket]:
    listener = socket.socket(fileno=boot.listen_fd)
    # One of several has a socket of its own on the same port, which ends with it.
    sockets = [listener if boot.boot.worker is None else listeners.join(listener)]
    if boot.admin_fd is not None:
        sockets.append(socket.socket(fileno=boot.admin_fd))
    return sockets


def _tls_options(tls: ListenerTls) -> dict[str, Any]:
    """As uvicorn calls them."""
    return {
        "ssl_certfile": tls.certificate,
        "ssl_keyfile": tls.private_key,
        "ssl_ca_certs": tls.client_ca,
        "ssl_cert_reqs": ssl.CERT_REQUIRED if tls.client_ca else ssl.CERT_NONE,
    }


async def _report(application: Application, link: ParentLink, server: uvicorn.Server) -> None:
    gateway = application.gateway
    # The prober owns the event of joining; polling for it while starting keeps the two apart.
    while not server.started or not all(one.settled for one in gateway.upstreams.values()):  # noqa: ASYNC110
        await asyncio.sleep(SETTLE_POLL_S)
    link.tell(Ready(tuple(_line(application, name) for name in gateway.serving.config.models)))


def _line(application: Application, name: str) -> ModelLine:
    routes = application.gateway.routes
    upstream = application.gateway.upstreams[routes.upstream_of(name)]
    told = upstream.capabilities
    if told is None:
        return ModelLine(name, upstream.settings.backend, ())
    operations = tuple(one.value for one in routes.operations(name))
    return ModelLine(
        name,
        upstream.settings.backend,
        operations,
        told.dtype,
        told.dimensions,
        told.max_input_tokens,
    )


def _lines_of_parent() -> Iterator[bytes]:
    """Lines of standard input, until the parent has gone.

    Read without Python's own buffer: a thread that waits in that would not let the process end.
    """
    rest = b""
    while read := os.read(sys.stdin.fileno(), READ_BYTES):
        *lines, rest = (rest + read).split(b"\n")
        yield from lines


def _listen_to_parent(
    lines: Iterator[bytes], hear: Callable[[bytes], None], metrics_folder: str | None
) -> None:
    for line in lines:
        # An event loop that has closed has nothing to follow any more.
        with suppress(RuntimeError):
            hear(line)
    # The parent removes it, unless it was killed.
    if metrics_folder is not None:
        shutil.rmtree(metrics_folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
