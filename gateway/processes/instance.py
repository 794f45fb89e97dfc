"""One instance: its process, its state and its log."""

import asyncio
import signal
import time
from collections.abc import Callable
from functools import partial

from gateway.config.schema import UpstreamSettings
from gateway.events import EndReason
from gateway.instances.log_lines import LogLines
from gateway.instances.overlay import Joined
from gateway.instances.records import ENGINE, InstanceInfo, Record, Status, timestamp
from gateway.processes.child import Child, watch_liveness
from gateway.processes.instance_launch import Launch, Watch, is_free

READY_POLL_S = 0.25
CHECK_EVERY_S = 5.0
# Exits in a row before the first readiness, after which an instance has failed.
START_EXITS_MAX = 3


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

    def __init__(self, record: Record, on_change: Callable[[], None]) -> None:
        self.record = record
        self.status: Status = "stopped"
        self.log = LogLines()
        self.lock = asyncio.Lock()
        self.restarts = 0
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
        watch = Watch(self._on_ready, self.fail, self._on_exit, self._on_pid, self.log.add)
        child = self._child = launch.create(watch)
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
            restarts=self.restarts,
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

    def _on_pid(self, pid: int) -> None:
        self._pid = pid
        self._on_change()

    def _on_ready(self) -> None:
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

    def _on_exit(self, reason: EndReason, how: str) -> None:
        """Note that the process has exited by itself; it restarts unless it never became ready."""
        self.log.finish()
        self.log.add(f"the process {'was killed because it hung' if reason == 'hung' else 'exited'} ({how})")
        self._pid, self._exits, self._started_s = None, self._exits + 1, time.time()
        if self.status in ("stopping", "stopped", "failed"):
            return
        if not self._is_joined and self._exits >= START_EXITS_MAX:
            self.fail(f"the process exited {self._exits} times before it was ready ({how})")
            return
        self.restarts += 1
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
                self._on_ready()

    async def _fail_if_late(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        if not self._is_joined and self.status == "starting":
            self.fail(f"it was not ready within {timeout_s:g} s")
