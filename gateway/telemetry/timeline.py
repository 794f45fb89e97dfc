"""Time that one call spent in each stage, as `server-timing` shows it."""

import time
from typing import TYPE_CHECKING

from gateway.events import Stage
from gateway.telemetry.attempt_record import AttemptRecord

if TYPE_CHECKING:
    # OpenTelemetry is loaded only where calls are traced.
    from gateway.telemetry.tracing import CallTrace


class Timeline:
    """Laps of one call on the monotonic clock, in seconds, and the labels that its stages found out.

    started_s: on time.perf_counter. trace: the call's trace, None if calls are not traced. attempts: of its
    slices at replicas.
    """

    def __init__(self, started_s: float | None = None) -> None:
        self._last_s = time.perf_counter() if started_s is None else started_s
        self.started_s = self._last_s
        self.laps: dict[Stage, float] = {}
        self.model: str | None = None
        self.operation: str | None = None
        self.trace: CallTrace | None = None
        self.attempts = AttemptRecord()

    def follow(self, trace: "CallTrace") -> None:
        """Record the stages in a trace too."""
        self.trace = trace

    def name(self, model: str | None, operation: str | None) -> None:
        """Set the labels of the call."""
        self.model, self.operation = model, operation

    def lap(self, stage: Stage) -> None:
        """Attribute the time since the last lap to this stage."""
        now_s = time.perf_counter()
        self.laps[stage] = self.laps.get(stage, 0.0) + now_s - self._last_s
        if self.trace is not None:
            self.trace.stage(stage, self._last_s, now_s)
        self._last_s = now_s

    def move(self, source: Stage, target: Stage, seconds: float) -> None:
        """Move part of one stage's time to another, such as time in the queue from `upstream` to `queue`."""
        moved = min(seconds, self.laps.get(source, 0.0))
        self.laps[source] = self.laps.get(source, 0.0) - moved
        self.laps[target] = self.laps.get(target, 0.0) + moved

    def server_timing(self) -> str:
        """Return the laps as a Server-Timing header, durations in milliseconds."""
        return ", ".join([f"{stage};dur={seconds * 1000:.2f}" for stage, seconds in self.laps.items()])

    def milliseconds(self, stage: Stage) -> int:
        """Round one stage to milliseconds, for TEI's x-*-time headers."""
        return round(self.laps.get(stage, 0.0) * 1000)

    def total_s(self) -> float:
        """Sum all laps."""
        return sum(self.laps.values())
