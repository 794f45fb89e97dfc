"""Trace context of a piece of work: W3C headers to the upstream, and an engine's phases in return.

This module knows nothing of OpenTelemetry. Rule: only the tracing code sets a carrier. Without a carrier no
trace headers are sent and no phases are read.
"""

from collections.abc import Mapping
from contextvars import ContextVar

import msgspec

# Response header with an engine's phases, sent if the request's trace is sampled.
PHASES_HEADER = "x-engine-phases"


class EnginePhases(msgspec.Struct, frozen=True):
    """Durations of an engine's phases, each starting when the previous one ends. started_ns: Unix time."""

    started_ns: int
    tokenize_s: float
    queue_s: float
    forward_s: float


class Carrier:
    """Trace headers of an attempt's requests, and the phases it received.

    headers: traceparent, tracestate.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self.phases: EnginePhases | None = None


carrier: ContextVar[Carrier | None] = ContextVar("carrier", default=None)


def is_sampled(traceparent: bytes) -> bool:
    """Return True if a traceparent has the sampled flag of W3C Trace Context."""
    flags = traceparent.rpartition(b"-")[2]
    return len(traceparent) >= 55 and flags.isalnum() and flags[-1:] in b"13579bdf"


def record_phases(headers: Mapping[str, str]) -> None:
    """Store the phases in an engine's response headers, if a carrier is set."""
    phases = headers.get(PHASES_HEADER)
    current = carrier.get()
    if phases is not None and current is not None:
        current.phases = msgspec.json.decode(phases, type=EnginePhases)
