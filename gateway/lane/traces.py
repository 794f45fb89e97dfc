"""Interfaces of a call's trace, as far as its slices and attempts add to it.

`gateway.telemetry.tracing` implements them. A lane does not import it, because OpenTelemetry is loaded only
if calls are traced.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from backends.tracing import Carrier
from gateway.events import AttemptStarted


class AttemptSpans(Protocol):
    """Spans of one attempt, one in each recorded call's trace. carrier: the context sent upstream."""

    carrier: Carrier

    def end(self, outcome: str, status: str | None = None, words: str = "") -> None:
        """End the spans. outcome: "ok" or the error's kind; only the first call counts.

        status, words: of the upstream's answer to an attempt that failed.
        """


class SliceTrace(Protocol):
    """Trace of the call that a slice belongs to."""

    recorded: bool

    def waited(self, seconds: float) -> None:
        """Record that a slice has waited in the lane until now."""

    def carrier(self) -> Carrier:
        """Return the context that is sent upstream if none of an attempt's calls is recorded."""


class RecordedTrace(SliceTrace, Protocol):
    """Trace whose spans are exported."""

    def begin_attempt(
        self,
        others: Sequence[Any],  # traces of the implementation's own class
        started: AttemptStarted,
        /,
    ) -> AttemptSpans:
        """Begin the spans of an attempt that carries this call and those of other recorded traces."""
