"""Events of the gateway as frozen values; telemetry/ turns them into metrics and log lines.

Rule: no inputs, no keys, no vectors in an event.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from backends.contract import ConnectionFaultKind, UnloadReason

# Stages of a call, in the order of `server-timing`.
Stage = Literal["parse", "fetch", "auth", "quota", "queue", "cache", "upstream", "encode"]


class CallFinished(msgspec.Struct, frozen=True):
    """One HTTP call ended, with a reply or an error.

    route: the path's template. outcome: "ok" or an error's kind. duration_s: from the first byte read to
    the last byte written. tenant: of the accepted key, even if the call was refused then. stages: seconds
    per stage, as in `server-timing`. trace_id: 32 hex digits, None where calls are not traced. key_id: id
    of the API key, None if none was accepted. address: of the client. path: as sent, cut and escaped,
    only if no handler serves it. reason: class of the cause of a refusal, None if its kind has only one; the
    name that was asked for, cut, if no model has it.
    message: of the error, as its caller got it, cut; only of kinds whose messages have no words of a body.
    is_bulk: it yielded to interactive calls. is_recorded: its trace has spans. replicas, attempts,
    upstream_status, upstream_words: as in `AttemptRecord`. end_user: for whom it was sent, by digest unless
    `end_users.log` is plain. cost: of a served call, in the gateway's currency; None if its model has no
    price. truncated_inputs: number of inputs that were cut, None if the upstream does not report it.
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
    key_id: str | None = None
    address: str | None = None
    path: str | None = None
    reason: str | None = None
    is_bulk: bool = False
    is_recorded: bool = False
    replicas: tuple[str, ...] = ()
    attempts: int = 0
    upstream_status: str | None = None
    upstream_words: str | None = None
    end_user: str | None = None
    cost: float | None = None
    truncated_inputs: int | None = 0
    message: str | None = None


class UpstreamServer(msgspec.Struct, frozen=True):
    """Server of a replica, as OpenTelemetry names it.

    provider: a value of `gen_ai.provider.name`. address: a host, or the path of a socket, which has no port.
    """

    provider: str
    address: str
    port: int | None = None


class AttemptStarted(msgspec.Struct, frozen=True):
    """One batch was sent to one replica; emitted only if a call in it is traced.

    server: of the replica, None if it is not known. model: name of the model at the replica. calls: number of
    calls in the batch. tries_before: attempts that its first slice has behind it.
    """

    upstream: str
    replica: str
    server: UpstreamServer | None
    model: str
    operation: str
    inputs: int
    calls: int
    hedge: bool
    tries_before: int


class UpstreamLimited(msgspec.Struct, frozen=True):
    """The account of an upstream had no room for a request, which was not sent."""

    upstream: str


class AttemptFinished(msgspec.Struct, frozen=True):
    """One attempt of a batch at one replica ended; outcome is "ok" or a BackendError's kind.

    calls: number of calls in the batch. hedge: it was a second attempt for a batch that was late. server,
    model: as in `AttemptStarted`. tokens: of all inputs, 0 if the work is free or failed. status: HTTP status
    or gRPC code of an answer that was no success. trace_id: of the first of its calls whose trace is
    recorded, None if there is none.
    """

    upstream: str
    replica: str
    outcome: str
    duration_s: float
    inputs: int = 0
    calls: int = 1
    hedge: bool = False
    server: UpstreamServer | None = None
    model: str = ""
    operation: str = ""
    tokens: int = 0
    status: str | None = None
    trace_id: str | None = None


# As of `State`, and drained: it could work, and an operator keeps work away from it.
ReplicaState: TypeAlias = Literal["joining", "up", "probation", "down", "drained", "gone"]


class ReplicaChanged(msgspec.Struct, frozen=True):
    """Change of the state of a replica, such as joining, ejection or removal. reason: safe to log."""

    upstream: str
    replica: str
    state: ReplicaState
    reason: str = ""


class ReplicaSlow(msgspec.Struct, frozen=True):
    """A replica has been slower than its peers for a while; emitted once, until it is not any more.

    slowness: times that its batches take as long as alike ones at the fastest replica. for_s: how long.
    """

    upstream: str
    replica: str
    slowness: float
    for_s: float


class ConnectionFaulted(msgspec.Struct, frozen=True):
    """A connection to a replica ended badly and cost no call; the fields are those of `ConnectionFault`."""

    upstream: str
    replica: str
    kind: ConnectionFaultKind
    pause_s: float = 0.0


class DescriptionRejected(msgspec.Struct, frozen=True):
    """A replica responded, and its description of itself was not accepted.

    reason is safe to log. changed: the reason differs from the last one, or is the first.
    """

    upstream: str
    replica: str
    reason: str
    changed: bool


# shadow_refused: admitted only because of `quotas.shadow`. bad_request: charged a request for bad content.
Decision = Literal["admitted", "refused", "shadow_refused", "bad_request"]


class QuotaDecided(msgspec.Struct, frozen=True):
    """The ledger admitted or refused a call."""

    tenant: str
    decision: Decision


SpaceOutcome = Literal["fits", "differs", "unchecked"]


class SpaceChecked(msgspec.Struct, frozen=True):
    """The reference texts of a replica were compared with its upstream's fingerprint.

    cosine: the smallest of all reference texts; None if the replica embeds none. changed: the outcome differs
    from the replica's last one, or is its first. reason is safe to log.
    """

    upstream: str
    replica: str
    outcome: SpaceOutcome
    cosine: float | None
    reason: str
    changed: bool


class CacheLookedUp(msgspec.Struct, frozen=True):
    """The texts of a call were looked up in the cache."""

    model: str
    hits: int
    misses: int


class BudgetAlert(msgspec.Struct, frozen=True):
    """Most of a budget is used: emitted once in its period, by the gateway whose settlement reached it.

    budget: name of the limit, which contains the id of a key. spent, amount: in the currency; spent includes
    what other calls have reserved.
    """

    tenant: str
    budget: str
    spent: float
    amount: float


# serving: it takes calls. waiting: its vectors are not known yet. refused: it does not fit the model.
# withdrawn: as a canary it gave other vectors.
Standing = Literal["serving", "waiting", "refused", "withdrawn"]


class UpstreamJudged(msgspec.Struct, frozen=True):
    """An upstream of a model that has several began to serve it, or no longer does; reason is safe to log."""

    model: str
    upstream: str
    standing: Standing
    reason: str = ""


class UpstreamTried(msgspec.Struct, frozen=True):
    """A call of a model that has several upstreams was sent to one of them.

    outcome: "ok" or an error's kind; after an error, the call may have moved to the next upstream.
    """

    model: str
    upstream: str
    outcome: str


class CanaryCompared(msgspec.Struct, frozen=True):
    """Vectors of a canary upstream were compared with another's. cosine: the smallest of the inputs."""

    model: str
    upstream: str
    cosine: float


# Why the gateway sends a copy of a call.
CopyPurpose = Literal["compare", "mirror"]


class CopyFinished(msgspec.Struct, frozen=True):
    """A copy of a call ended. outcome: "ok", "dropped", or an error's kind."""

    model: str
    upstream: str
    purpose: CopyPurpose
    outcome: str
    duration_s: float = 0.0


# Routes of the lines of batches in metrics, by their endpoint. No line has a log line of its own.
LINE_ROUTES: Mapping[str, str] = {
    path: f"{path} (batch)" for path in ("/v1/embeddings", "/v2/rerank", "/score")
}


class BatchChanged(msgspec.Struct, frozen=True):
    """A batch has reached a status, one of OpenAI's API. completed, failed: its lines so far."""

    batch: str
    tenant: str
    status: str
    completed: int
    failed: int

    @property
    def has_ended(self) -> bool:
        """Return whether no status follows."""
        return self.status in {"failed", "completed", "expired", "cancelled"}


class StoreChanged(msgspec.Struct, frozen=True):
    """The quota store became unreachable (away), or responds again; reason is safe to log."""

    away: bool
    reason: str


class StoreLost(msgspec.Struct, frozen=True):
    """The store has lost keys and tenants, which no operator removed.

    keys, tenants: number of lost ones. until: moment until which they stay valid here, in UTC.
    is_repeated: this was noticed before the start, and these are still missing.
    """

    keys: int
    tenants: int
    reason: str
    until: str
    is_repeated: bool = False


class AuditRecorded(msgspec.Struct, frozen=True):
    """An operator has changed something; the fields are those of `AuditRecord`.

    record: its id. at: its time. changes: each with `field`, `was` and `is`.
    """

    record: str
    at: str
    actor: str
    actor_kind: str
    address: str
    action: str
    object: str
    changes: tuple[Any, ...]
    request_id: str
    gateway: str


def tenants_and_keys(tenants: int, keys: int) -> str:
    """Return both numbers in words, as in `1 tenant and 3 keys`."""
    return f"{tenants} tenant{'s' * (tenants != 1)} and {keys} key{'s' * (keys != 1)}"


# ended: it exited, or a signal killed it. hung: it stopped responding, and the supervisor killed it.
EndReason = Literal["ended", "hung"]


class ProcessRestarted(msgspec.Struct, frozen=True, tag="restarted"):
    """A child process exited unexpectedly and is restarted.

    process: its name in logs. how: the signal or exit status. times: restarts for that reason since the
    gateway's start, 0 for none yet. at_s: seconds since 1970.
    """

    process: str
    reason: EndReason
    how: str = ""
    times: int = 0
    at_s: float = 0.0


class ModelSummary(msgspec.Struct, frozen=True):
    """Model that a start has found. operations: empty if no replica of it could be reached."""

    name: str
    backend: str
    operations: tuple[str, ...]
    dtype: str | None = None
    dimensions: int | None = None
    max_input_tokens: int | None = None


class GatewayReady(msgspec.Struct, frozen=True):
    """All workers are ready. url, docs, console: addresses for people. key: where a caller finds one."""

    url: str
    docs: str
    console: str
    key: str
    models: tuple[ModelSummary, ...]


class GatewayDrained(msgspec.Struct, frozen=True, tag="drained"):
    """An operator took this gateway out of its load balancers, or put it back.

    since_s: seconds since 1970; None if it is not drained.
    """

    since_s: float | None = None


class LaneBacklog(msgspec.Struct, frozen=True):
    """Work that waits in a lane. oldest_s: age of the oldest slice."""

    tokens: int = 0
    inputs: int = 0
    oldest_s: float = 0.0


class ModelStateReported(msgspec.Struct, frozen=True):
    """An engine reported the state of one model, and the events since its last report.

    memory_bytes: used by the model. unloads: by reason. out_of_memory: batches that did not fit into memory.
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
    | StoreLost
    | AuditRecorded
    | BudgetAlert
    | CallFinished
    | AttemptFinished
    | UpstreamLimited
    | ReplicaChanged
    | ReplicaSlow
    | ConnectionFaulted
    | DescriptionRejected
    | QuotaDecided
    | CacheLookedUp
    | UpstreamJudged
    | UpstreamTried
    | CanaryCompared
    | CopyFinished
    | BatchChanged
    | SpaceChecked
    | ModelStateReported
    | ProcessRestarted
    | GatewayDrained
    | GatewayReady
)
# Called synchronously while a call is served: an exporter only counts or queues.
Observe: TypeAlias = Callable[[Event], None]


class Observers:
    """Functions that take events, by the type of event. Called with an event, it hands it to each of them."""

    def __init__(self) -> None:
        self._by_type: dict[type, list[Callable[[Any], None]]] = {kind: [] for kind in get_args(Event)}

    def add(self, observe: Callable[[Any], None], *types: type) -> None:
        """Have a function take the events of some types; of all types if none is named."""
        for kind in types or self._by_type:
            self._by_type[kind].append(observe)

    def __call__(self, event: Event) -> None:
        """Hand an event to the functions that take its type, in the order in which they were added."""
        for observe in self._by_type[type(event)]:
            observe(event)
