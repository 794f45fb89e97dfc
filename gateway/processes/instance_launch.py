"""Start of an instance's process: an engine, or a command from a template."""

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from backends.torch import wire
from gateway.config.schema import CommandTemplate, EngineSettings, UpstreamSettings
from gateway.events import EndReason
from gateway.instances.records import Record
from gateway.instances.templates import render, values_of
from gateway.processes.child import Child, ChildSpec
from gateway.processes.engine_process import KILL_AFTER_S, EngineGroup, engine_child, responds

# Time for one question whether a server is healthy.
CHECK_TIMEOUT_S = 5.0
LOOPBACK = "127.0.0.1"
# A command has 30 s of it, and its host process kills it then.
COMMAND_PATIENCE_S = 35.0


class Watch(msgspec.Struct, frozen=True):
    """Receivers of what happens to an instance's process.

    on_ready: it can be used. on_failed: called with the reason why it never will. on_exit: as of `Child`.
    on_pid: of the process that does the work. note: adds a line to the log.
    """

    on_ready: Callable[[], None]
    on_failed: Callable[[str], None]
    on_exit: Callable[[EndReason, str], None]
    on_pid: Callable[[int], None]
    note: Callable[[str], None]


class Launch(Protocol):
    """A way to run an instance's process.

    address: of the replica. port: that it listens on, None if it has none. patience_s: time to stop in order.
    polls: readiness is found by `is_healthy`, rather than reported.
    """

    address: str
    port: int | None
    patience_s: float
    polls: bool

    def create(self, watch: Watch) -> Child:
        """Return the process, which is not started."""

    async def is_healthy(self) -> bool:
        """Return whether the process answers now."""


class EngineLaunch:
    """An engine for one model, with a socket of its own."""

    port: int | None = None
    patience_s = KILL_AFTER_S
    polls = False

    def __init__(
        self, record: Record, upstream: UpstreamSettings, bounds: EngineSettings, host: "Host"
    ) -> None:
        path = f"{host.folder()}/{record.name}.sock"
        self._group = EngineGroup(f"instance {record.name}", path, {record.upstream: upstream})
        self._bounds = bounds
        self._environment = host.environment
        self.address = wire.address_of(path, record.upstream)

    def create(self, watch: Watch) -> Child:
        """Return the engine's process, which is not started."""

        def on_state(state: wire.State) -> None:
            if state.state == "failed":
                watch.on_failed(state.detail)
                return
            watch.note(f"{state.state}: {state.detail}" if state.detail else state.state)
            if state.state == "loaded":
                watch.on_ready()

        return engine_child(self._group, self._bounds, self._environment, on_state, watch.on_exit)

    async def is_healthy(self) -> bool:
        """Return whether the engine's event loop answers."""
        return await responds(self._group.socket_path)


class CommandLaunch:
    """A command from a template, on a port of this machine."""

    patience_s = COMMAND_PATIENCE_S
    polls = True

    def __init__(self, record: Record, model: str, template: CommandTemplate, host: "Host") -> None:
        settings = record.settings
        port = settings.port or free_port()
        self.port: int | None = port
        self._argv = render(template.argv, values_of(settings, model, port), settings.extra_args or ())
        self._health = template.health
        self._environment = host.environment
        self._name = f"instance {record.name}"
        self.address = f"http://{LOOPBACK}:{port}"

    def create(self, watch: Watch) -> Child:
        """Return the process around the command, which is not started."""

        def boot(status_fd: int) -> bytes:
            return json.dumps({"argv": self._argv, "status_fd": status_fd}).encode()

        spec = ChildSpec(self._name, "gateway.processes.command_host", self._environment)
        return Child(spec, boot, lambda line: watch.on_pid(int(line)), watch.on_exit)

    async def is_healthy(self) -> bool:
        """Return whether the server answers 200 at the path of its health."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await _answers_200(self.port or 0, self._health)
        except (OSError, TimeoutError):
            return False


class Host(msgspec.Struct, frozen=True):
    """The host, as processes of instances need it.

    environment: of every process. folder: returns the private folder for sockets.
    """

    environment: Mapping[str, str]
    folder: Callable[[], str]


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def is_free(port: int) -> bool:
    """Return whether a server could listen on a port of the loopback interface."""
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError:
        return False
    return True


async def _answers_200(port: int, path: str) -> bool:
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {LOOPBACK}:{port}\r\nconnection: close\r\n\r\n".encode())
        status = await reader.readline()
        return status.startswith(b"HTTP/1.") and status[8:13] == b" 200 "
    finally:
        writer.close()
