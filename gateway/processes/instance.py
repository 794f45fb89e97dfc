"""One instance of this host: its log, the start of its process, and its state.

The process is an engine, or a command from a template on a port of this machine. It restarts when it exits,
and joins its upstream once it is ready; one that exits again and again before that has failed.
"""

import asyncio
import json
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import msgspec

from backends.torch import wire
from gateway.config.schema import CommandTemplate, EngineSettings, UpstreamSettings
from gateway.declared.composition import Joined
from gateway.declared.host import ENGINE, InstanceInfo, InstanceRecord, LogSlice, Status, timestamp
from gateway.declared.instances import render, values_of
from gateway.events import EndReason
from gateway.processes.child import Child, ChildSpec, watch_liveness
from gateway.processes.engine_process import KILL_AFTER_S, EngineGroup, responds

READY_POLL_S = 0.25
CHECK_EVERY_S = 5.0
# Exits in a row before the first readiness, after which an instance has failed.
START_EXITS_MAX = 3
LINES_MAX = 1000
BYTES_MAX = 1024 * 1024
LINE_BYTES_MAX = 8 * 1024
CUT = "… (cut)"
# Time for one question whether a server is healthy.
CHECK_TIMEOUT_S = 5.0
LOOPBACK = "127.0.0.1"
# A command has 30 s of it, and its host process kills it then.
COMMAND_PATIENCE_S = 35.0


class Host(msgspec.Struct, frozen=True):
    """The host, as processes of instances need it.

    environment: of every process. folder: returns the private folder for sockets.
    """

    environment: Mapping[str, str]
    folder: Callable[[], str]


class Launch(Protocol):
    """A way to run an instance's process.

    address: of the replica. port: that it listens on, None if it has none. patience_s: time to stop in order.
    polls: readiness is found by `is_healthy`, rather than reported.
    """

    address: str
    port: int | None
    patience_s: float
    polls: bool

    def create(self, instance: "Instance") -> Child:
        """Return the process, which is not started."""

    async def is_healthy(self) -> bool:
        """Return whether the process answers now."""


class EngineLaunch:
    """An engine for one model, with a socket of its own."""

    port: int | None = None
    patience_s = KILL_AFTER_S
    polls = False

    def __init__(
        self, record: InstanceRecord, upstream: UpstreamSettings, bounds: EngineSettings, host: Host
    ) -> None:
        path = f"{host.folder()}/{record.name}.sock"
        self._group = EngineGroup(f"instance {record.name}", path, {record.upstream: upstream})
        self._bounds = bounds
        self._environment = host.environment
        self.address = wire.address_of(path, record.upstream)

    def create(self, instance: "Instance") -> Child:
        """Return the engine's process, which is not started."""

        def on_state(state: wire.State) -> None:
            if state.state == "failed":
                instance.fail(state.detail)
                return
            instance.log.add(f"{state.state}: {state.detail}" if state.detail else state.state)
            if state.state == "loaded":
                instance.on_ready()

        return self._group.child(self._bounds, self._environment, on_state, instance.on_exit)

    async def is_healthy(self) -> bool:
        """Return whether the engine's event loop answers."""
        return await responds(self._group.socket_path)


class CommandLaunch:
    """A command from a template, on a port of this machine."""

    patience_s = COMMAND_PATIENCE_S
    polls = True

    def __init__(self, record: InstanceRecord, model: str, template: CommandTemplate, host: Host) -> None:
        settings = record.settings
        port = settings.port or free_port()
        self.port: int | None = port
        self._argv = render(template.argv, values_of(settings, model, port), settings.extra_args or ())
        self._health = template.health
        self._environment = host.environment
        self._name = f"instance {record.name}"
        self.address = f"http://{LOOPBACK}:{port}"

    def create(self, instance: "Instance") -> Child:
        """Return the process around the command, which is not started."""

        def boot(status_fd: int) -> bytes:
            return json.dumps({"argv": self._argv, "status_fd": status_fd}).encode()

        spec = ChildSpec(self._name, "gateway.processes.command_host", self._environment)
        return Child(spec, boot, lambda line: instance.on_pid(int(line)), instance.on_exit)

    async def is_healthy(self) -> bool:
        """Return whether the server answers 200 at the path of its health."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await _answers_200(self.port or 0, self._health)
        except (OSError, TimeoutError):
            return False


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


class LogLines:
    """Log of one instance. Later lines push out the oldest."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._rest = b""
        self._skipping = False

    def feed(self, chunk: bytes) -> None:
        """Add output of a process, which may end within a line."""
        *lines, rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if not self._skipping:
                self.add(line.decode(errors="replace").rstrip("\r"))
            self._skipping = False
        if len(rest) > LINE_BYTES_MAX:
            # The rest of a line that is too long is dropped as it arrives.
            if not self._skipping:
                self.add(rest.decode(errors="replace"))
            self._skipping, rest = True, b""
        self._rest = b"" if self._skipping else rest

    def finish(self) -> None:
        """Add a last line that has no end, because its process has exited."""
        if self._rest:
            self.add(self._rest.decode(errors="replace"))
        self._rest, self._skipping = b"", False

    def add(self, line: str) -> None:
        """Add one line."""
        encoded = line.encode(errors="replace")
        if len(encoded) > LINE_BYTES_MAX:
            line = encoded[:LINE_BYTES_MAX].decode(errors="ignore") + CUT
            encoded = line.encode(errors="replace")
        self._lines.append(encoded)
        self._bytes += len(encoded) + 1
        while len(self._lines) > LINES_MAX or self._bytes > BYTES_MAX:
            self._bytes -= len(self._lines.popleft()) + 1

    def slice(self, start: int | None, end: int | None) -> LogSlice:
        """Return the lines from start to end as Python's slices do; negative numbers count from the end."""
        total = len(self._lines)
        first, last, _ = slice(start, end).indices(total)
        lines = [line.decode() for line in list(self._lines)[first:last]]
        return LogSlice(lines, first, last, total)


class HealthChecks:
    """Checks of a process since its start. last_s: time of the last, in seconds since 1970.

    failures: of a process that had been healthy before.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.last_s: float | None = None
        self._was_healthy = False

    async def run(self, launch: Launch) -> bool:
        """Return whether the process is healthy."""
        is_healthy = await launch.is_healthy()
        self.last_s = time.time()
        self.failures += self._was_healthy and not is_healthy
        self._was_healthy = self._was_healthy or is_healthy
        return is_healthy


class Instance:
    """One instance, running or not.

    record: as it is stored. on_change: called after each change of its state. lock: held by a request about
    it.
    """

    def __init__(self, record: InstanceRecord, on_change: Callable[[], None]) -> None:
        self.record = record
        self.status: Status = "stopped"
        self.log = LogLines()
        self.lock = asyncio.Lock()
        self._restarts = 0
        self._upstream: UpstreamSettings | None = None
        self._on_change = on_change
        self._launch: Launch | None = None
        self._child: Child | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: asyncio.Task[None] | None = None
        # Joined: workers are to send it calls. Served: all of them do.
        self._is_joined = self._is_served = False
        self._reset()

    def _reset(self) -> None:
        self._reason: str | None = None
        self._pid: int | None = None
        self._exits = 0
        self._checks = HealthChecks()
        self._started_s = time.time()

    def start(self, launch: Launch, upstream: UpstreamSettings, startup_timeout_s: float) -> None:
        """Start the process. Its port may have been taken since the instance was created.

        upstream: settings of an upstream for the instance.
        """
        self._reset()
        self.status, self._launch, self._upstream = "starting", launch, upstream
        if launch.port is not None and not is_free(launch.port):
            self.fail(f"port {launch.port} is in use by another process")
            return
        child = self._child = launch.create(self)
        child.capture(self.log.feed)
        loops = [
            child.keep_running(),
            watch_liveness(child, partial(self._checks.run, launch), CHECK_EVERY_S),
            self._fail_if_late(startup_timeout_s),
        ]
        if launch.polls:
            loops.append(self._poll_until_ready())
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        self._on_change()

    def set_started(self, *, started: bool) -> None:
        """Set whether the instance is to run, in its record."""
        self.record = msgspec.structs.replace(self.record, started=started)

    def count_restart(self) -> None:
        """Count a restart that an operator asked for."""
        self._restarts += 1

    def confirm(self) -> None:
        """Note that every worker sends it calls."""
        if not self._is_joined or self._is_served:
            return
        self._is_served = True
        if self.status == "starting":
            self.status = "running"
        self._on_change()

    def leave(self) -> None:
        """Stop to be sent calls; `stop` follows once those in flight have finished."""
        self.status, self._is_joined, self._is_served = "stopping", False, False
        self._on_change()

    async def stop(self) -> None:
        """Stop the process and everything that it has started."""
        if self._ending is not None:
            await self._ending
        await self._end_process()
        self.status, self._is_joined, self._is_served = "stopped", False, False
        self._on_change()

    def fail(self, reason: str) -> None:
        """End the process for good; a request may start it again."""
        self.log.add(f"failed: {reason}")
        self.status, self._reason, self._is_joined, self._is_served = "failed", reason, False, False
        self._on_change()
        self._ending = asyncio.create_task(self._end_process())

    @property
    def joined(self) -> Joined | None:
        """The instance as a replica, or None while no calls are sent to it."""
        if self._launch is None or self._upstream is None or not self._is_joined:
            return None
        return Joined(self.record.upstream, self._upstream, self._launch.address)

    def info(self, gateway_port: int) -> InstanceInfo:
        """Return the instance as operators see it. gateway_port: where callers of an engine send requests."""
        settings, runs = self.record.settings, self.status in ("starting", "running", "stopping")
        port = self._launch.port if self._launch is not None else settings.port
        checked_s = self._checks.last_s
        return InstanceInfo(
            name=self.record.name,
            model_id=settings.model_id,
            port=port or (gateway_port if self.record.kind == ENGINE else 0),
            status=self.status,
            pid=(self._pid or (None if self._child is None else self._child.pid)) if runs else None,
            created_at=timestamp(self.record.created_at_s),
            uptime_secs=max(0, int(time.time() - self._started_s)) if runs else 0,
            restarts=self._restarts,
            health_check_failures=self._checks.failures,
            last_health_check=None if checked_s is None else timestamp(checked_s),
            gpu_id=settings.gpu_id,
            prometheus_port=settings.prometheus_port,
            kind=self.record.kind,
            upstream=self.record.upstream,
            device=(self._upstream.first_device if self._upstream else None) or settings.device,
            reason=self._reason,
            joined=self._is_served,
        )

    def on_pid(self, pid: int) -> None:
        """Note the process that does the work."""
        self._pid = pid
        self._on_change()

    def on_ready(self) -> None:
        """Note that the process can be used."""
        if self.status != "starting":
            return
        self._exits = 0
        if self._is_served:
            # After an exit: workers know it, and probe it by themselves.
            self.status = "running"
        elif self._is_joined:
            # Workers learn of it now, which waits for the gateway's own start.
            return
        self._is_joined = True
        self._on_change()

    def on_exit(self, reason: EndReason, how: str) -> None:
        """Note that the process has exited by itself; it restarts unless it never became ready."""
        self.log.finish()
        self.log.add(f"the process {'was killed because it hung' if reason == 'hung' else 'exited'} ({how})")
        self._pid, self._exits, self._started_s = None, self._exits + 1, time.time()
        if self.status in ("stopping", "stopped", "failed"):
            return
        if not self._is_joined and self._exits >= START_EXITS_MAX:
            self.fail(f"the process exited {self._exits} times before it was ready ({how})")
            return
        self._restarts += 1
        self.status = "starting"
        self._on_change()

    async def _end_process(self) -> None:
        child, tasks = self._child, self._tasks
        self._child, self._tasks = None, []
        if child is not None:
            assert self._launch is not None
            await child.stop(signal.SIGTERM, self._launch.patience_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.log.finish()

    async def _poll_until_ready(self) -> None:
        assert self._launch is not None
        while True:
            await asyncio.sleep(READY_POLL_S)
            if self.status == "starting" and self._pid is not None and await self._launch.is_healthy():
                self.on_ready()

    async def _fail_if_late(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        if not self._is_joined and self.status == "starting":
            self.fail(f"it was not ready within {timeout_s:g} s")
