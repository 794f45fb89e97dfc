"""What happened, as frozen values; exporters in telemetry/ turn them into metrics and log lines.

Rule: no inputs, no keys, no vectors in an event.
"""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import msgspec

from backends.contract import UnloadReason

# Where a call's time goes.
Stage = Literal["parse", "auth", "quota", "queue", "upstream", "encode"]


class CallFinished(msgspec.Struct, frozen=True):
    """One HTTP call has been answered, well or badly.

    route: the path's template. outcome: "ok" or an error's kind. duration_s: from the first byte read
    to the last byte written. stages: where it went, in seconds, as `server-timing` tells it. trace_id: 32 hex
    digits, where calls are traced.
    """

    request_id: str
    method: str
    route: str
    status: int
    outcome: str
    duration_s: float
    tenant: str | None = None
    model: str | None = None
    inputs: int = 0
    tokens: int = 0
    operation: str | None = None
    stages: Mapping[Stage, float] = {}
    trace_id: str | None = None


class AttemptStarted(msgspec.Struct, frozen=True):
    """One batch is on its way to one replica; made only where a call in it is traced.

    model: as the replica calls it. calls: how many travel in it together. tries_before: how often its first
    slice was tried.
    """

    upstream: str
    replica: str
    model: str
    operation: str
    inputs: int
    calls: int
    hedge: bool
    tries_before: int


class AttemptFinished(msgspec.Struct, frozen=True):
    """One batch came back from one replica; outcome is "ok" or a BackendError's kind.

    calls: how many travelled in it together. hedge: it was sent beside another that was late.
    """

    upstream: str
    replica: str
    outcome: str
    duration_s: float
    inputs: int = 0
    calls: int = 1
    hedge: bool = False


class ReplicaChanged(msgspec.Struct, frozen=True):
    """A replica joined, was ejected, or came back; reason is safe to log."""

    upstream: str
    replica: str
    state: Literal["joining", "up", "probation", "down", "gone"]
    reason: str = ""


# shadow_refused: admitted, and would have been refused were it not for `quotas.shadow`.
Decision = Literal["admitted", "refused", "shadow_refused"]


class QuotaDecided(msgspec.Struct, frozen=True):
    """The ledger admitted or refused a call."""

    tenant: str
    decision: Decision


SpaceOutcome = Literal["fits", "differs", "unchecked"]


class SpaceChecked(msgspec.Struct, frozen=True):
    """A replica's canaries were held against its upstream's fingerprint.

    cosine: the least of the canaries'; None where it takes none. changed: another outcome than the last one
    of this replica, or its first. reason is safe to log.
    """

    upstream: str
    replica: str
    outcome: SpaceOutcome
    cosine: float | None
    reason: str
    changed: bool


class StoreChanged(msgspec.Struct, frozen=True):
    """The quotas' store has been given up, or is back; reason is safe to log."""

    away: bool
    reason: str


# ended: by itself, or by somebody's signal. hung: it answered nothing any more, and the parent killed it.
EndReason = Literal["ended", "hung"]


class ProcessRestarted(msgspec.Struct, frozen=True, tag="restarted"):
    """A child of the parent has ended unasked and is started again.

    process: as logs name it. how: the signal or exit status. times: for that reason, since the gateway's
    start; 0: not yet. at_s: seconds since 1970.
    """

    process: str
    reason: EndReason
    how: str = ""
    times: int = 0
    at_s: float = 0.0


class LaneBacklog(msgspec.Struct, frozen=True):
    """What a lane holds. oldest_s: how long the slice that waits longest has."""

    tokens: int = 0
    inputs: int = 0
    oldest_s: float = 0.0


class ModelStateReported(msgspec.Struct, frozen=True):
    """An engine told of one of its models: what it holds, and what happened since it was last asked.

    unloads: how often it left memory, by why. out_of_memory: batches that did not fit into memory.
    """

    upstream: str
    loaded: bool
    memory_bytes: int
    loads: int = 0
    failed_loads: int = 0
    unloads: dict[UnloadReason, int] = {}
    out_of_memory: int = 0


Event: TypeAlias = (
    StoreChanged
    | CallFinished
    | AttemptFinished
    | ReplicaChanged
    | QuotaDecided
    | SpaceChecked
    | ModelStateReported
    | ProcessRestarted
)
# Called synchronously on the path of a call: an exporter only counts or queues.
Observe: TypeAlias = Callable[[Event], None]
