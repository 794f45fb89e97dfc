"""The trace that a piece of work belongs to, as adapters carry it: W3C headers out, an engine's phases back.

Knows nothing of OpenTelemetry. Rule: only who traces sets a carrier; without one nothing is sent or read.
"""

from collections.abc import Mapping
from contextvars import ContextVar

import msgspec

# In which header an engine tells its phases, to a request whose trace is recorded.
PHASES_HEADER = "x-engine-phases"


class EnginePhases(msgspec.Struct, frozen=True):
    """Where an engine's time went. started_ns: Unix time; each phase begins where the one before ended."""

    started_ns: int
    tokenize_s: float
    queue_s: float
    forward_s: float


class Carrier:
    """What goes with each request of an attempt, and what came back. headers: traceparent, tracestate."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self.phases: EnginePhases | None = None


carrier: ContextVar[Carrier | None] = ContextVar("carrier", default=None)


def is_sampled(traceparent: bytes) -> bool:
    """Whether a request's traceparent says that its trace is kept (W3C Trace Context, sampled flag)."""
    flags = traceparent.rpartition(b"-")[2]
    return len(traceparent) >= 55 and flags.isalnum() and flags[-1:] in b"13579bdf"


def record_phases(headers: Mapping[str, str]) -> None:
    """Keep what an engine told beside its reply, if somebody traces this."""
    told = headers.get(PHASES_HEADER)
    current = carrier.get()
    if told is not None and current is not None:
        current.phases = msgspec.json.decode(told, type=EnginePhases)
