"""Events as log lines: one per call, one per change of state. No event contains inputs or keys."""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, get_args
from urllib.parse import quote

import msgspec

from gateway.events import (
    LINE_ROUTES,
    AuditRecorded,
    BatchChanged,
    BudgetAlert,
    CallFinished,
    ConnectionFaulted,
    DescriptionRejected,
    Event,
    GatewayReady,
    ModelStateReported,
    ReplicaChanged,
    ReplicaSlow,
    SpaceChecked,
    SpaceOutcome,
    Stage,
    Standing,
    StoreChanged,
    StoreLost,
    UpstreamJudged,
    tenants_and_keys,
)

logger = logging.getLogger("gateway")

# Monitoring requests these every few seconds; their lines would bury all others.
PROBED_ROUTES = frozenset({"/livez", "/readyz", "/health", "/ping", "/models/{model}/health", "/metrics"})
# An open /ui and `gateway status` request the status every second, and the list of batches every other. Load
# balancers get / for their health check. A refusal has a line: it may be an attack.
POLLED_ROUTES = frozenset(
    {
        "/admin/status",
        "/admin/traffic",
        "/admin/calls",
        "/admin/batches",
        "/usage/calls",
        "/v1/batches",
        "/",
    }
)
QUIET_ROUTES = PROBED_ROUTES | POLLED_ROUTES | frozenset(LINE_ROUTES.values())

# The longest IPv6 address with a zone is shorter.
ADDRESS_CHARACTERS_MAX = 64
SPACE_LEVELS: dict[SpaceOutcome, int] = {
    "fits": logging.INFO,
    "differs": logging.ERROR,
    "unchecked": logging.WARNING,
}
STANDING_LEVELS: dict[Standing, int] = {
    "serving": logging.INFO,
    "waiting": logging.INFO,
    "refused": logging.ERROR,
    "withdrawn": logging.ERROR,
}
# The standing of an upstream of a model in a sentence.
STANDINGS: dict[Standing, str] = {
    "serving": "serves it",
    "waiting": "does not serve it yet",
    "refused": "is refused",
    "withdrawn": "is withdrawn as its canary",
}
# The state of a replica in a sentence.
STATES = {
    "joining": "is joining",
    "up": "is up",
    "probation": "is on probation",
    "down": "is down",
    "drained": "is drained",
    "gone": "is gone",
}
STAGE_FIELDS: dict[Stage, str] = {stage: f"{stage}_ms" for stage in get_args(Stage)}


class EventLine:
    """Log line of an event, as text for people and as fields for programs; built only when it is written."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def __str__(self) -> str:
        if isinstance(self.event, CallFinished):
            return call_line(self.event)
        return FORMS[type(self.event)].line(self.event)

    def fields(self) -> dict[str, Any]:
        """Return flat fields with units in their names; unknown values are left out."""
        if isinstance(self.event, CallFinished):
            fields: dict[str, Any] = msgspec.to_builtins(call_fields(self.event))
            return fields
        form = FORMS[type(self.event)]
        values = {"fault" if name == "kind" else name: getattr(self.event, name) for name in form.fields}
        return {"event": form.name, "message": str(self), **values}


def log_event(event: Event) -> None:
    """Log an event."""
    if not isinstance(event, CallFinished):
        log_change(event)
    elif event.route not in QUIET_ROUTES or is_no_poll(event):
        _write(logging.INFO, event)


def is_no_poll(event: CallFinished) -> bool:
    """Return whether a request for a quiet route has a line: a refusal, or a call of a model at /."""
    return event.route in POLLED_ROUTES and (event.outcome != "ok" or event.method != "GET")


def log_change(event: Event) -> None:
    """Log an event unless it is a call."""
    if isinstance(event, ModelStateReported):
        _log_model_state(event)
    elif isinstance(event, BatchChanged):
        _log_batch(event)
    elif (form := FORMS.get(type(event))) is not None and (level := form.level(event)) is not None:
        _write(level, event)


def _write(level: int, event: Event) -> None:
    # As `logger.log`, without its search for the line of code that called it.
    if logger.isEnabledFor(level):
        logger.handle(logging.LogRecord(logger.name, level, "", 0, EventLine(event), None, None))


def _log_model_state(event: ModelStateReported) -> None:
    if event.loads:
        logger.info("upstream %s: its model was loaded", event.upstream)
    for reason in event.unloads:
        logger.info("upstream %s: its model was unloaded (%s)", event.upstream, reason)
    if event.out_of_memory:
        logger.warning("upstream %s: a batch did not fit into memory and was split", event.upstream)


def _log_batch(event: BatchChanged) -> None:
    logger.info(
        "batch %s of tenant %s is %s: %d lines completed, %d failed",
        event.batch,
        event.tenant,
        event.status,
        event.completed,
        event.failed,
    )


def _store_line(event: StoreChanged) -> str:
    if event.away:
        return f"the quota store is unreachable ({event.reason}): counting without it"
    return f"the quota store is reachable again ({event.reason})"


def _lost_line(event: StoreLost) -> str:
    lost = "Redis had lost, before this start, and still lacks" if event.is_repeated else "Redis has lost"
    return (
        f"{lost} {tenants_and_keys(event.tenants, event.keys)} ({event.reason}): they stay valid "
        f'here until {event.until}; restore them, see docs/production.md, "An emptied Redis"'
    )


def _fault_line(event: ConnectionFaulted) -> str:
    subject = f"upstream {event.upstream}: {event.replica}"
    return (
        f"{subject} sends data that no request asked for: no connection is reused for {event.pause_s:.0f} s"
    )


def _ready_line(event: GatewayReady) -> str:
    missing = [model.name for model in event.models if not model.operations]
    note = f", not reached yet: {', '.join(missing)}" if missing else ""
    names = ", ".join(model.name for model in event.models)
    return f"ready at {event.url}, console at {event.console}; models: {names}{note}; key: {event.key}"


def _budget_line(event: BudgetAlert) -> str:
    share = f"{event.spent / event.amount:.0%}"
    return f"tenant {event.tenant}: {share} of {event.budget} ({event.amount:g}) is spent or reserved"


def _audit_line(event: AuditRecorded) -> str:
    changes = ", ".join(f"{c.field}: {_value_text(c.was)} -> {_value_text(c.now)}" for c in event.changes)
    origin = f"from={_escaped(event.address[:ADDRESS_CHARACTERS_MAX])}  " if event.address else ""
    line = f"audit: {event.actor} ({event.actor_kind}) {event.action} {event.object}"
    # A name that an operator gives must not end the line, or look like another record.
    return _printable(f"{line}{': ' + changes if changes else ''}  {origin}record={event.record}")


def _space_line(event: SpaceChecked) -> str:
    match event.outcome:
        case "fits":
            return f"upstream {event.upstream}: {event.replica} is in vector space {event.reason}"
        case "differs":
            return f"upstream {event.upstream}: {event.replica} gives other vectors: {event.reason}"
        case "unchecked":
            subject = f"upstream {event.upstream}: the vectors of {event.replica}"
            return f"{subject} cannot be checked ({event.reason})"


def _standing_line(event: UpstreamJudged) -> str:
    reason = f": {event.reason}" if event.reason else ""
    return f"model {event.model}: upstream {event.upstream} {STANDINGS[event.standing]}{reason}"


class EventForm(NamedTuple):
    """Form of an event in the log. name: in the field `event`. level: of its line, None for no line.

    line: as text for people. fields: those of the event that programs get.
    """

    name: str
    level: Callable[[Any], int | None]
    line: Callable[[Any], str]
    fields: tuple[str, ...]


# Events other than calls that have a line of one form.
FORMS: dict[type, EventForm] = {
    ReplicaChanged: EventForm(
        "replica",
        lambda event: logging.WARNING if event.state == "down" else logging.INFO,
        lambda event: f"upstream {event.upstream}: {event.replica} {STATES[event.state]} ({event.reason})",
        ("upstream", "replica", "state", "reason"),
    ),
    ReplicaSlow: EventForm(
        "replica_slow",
        lambda _: logging.WARNING,
        lambda event: (
            f"upstream {event.upstream}: {event.replica} has been {event.slowness:.0f} times slower than the "
            f"fastest replica for {event.for_s:.0f} s"
        ),
        ReplicaSlow.__struct_fields__,
    ),
    ConnectionFaulted: EventForm(
        "connection",
        lambda event: logging.WARNING if event.pause_s else None,
        _fault_line,
        ("upstream", "replica", "kind", "pause_s"),
    ),
    DescriptionRejected: EventForm(
        "description",
        lambda event: logging.WARNING if event.changed else None,
        lambda event: (
            f"upstream {event.upstream}: the description of {event.replica} is not used: {event.reason}"
        ),
        ("upstream", "replica", "reason"),
    ),
    SpaceChecked: EventForm(
        "vector_space",
        lambda event: SPACE_LEVELS[event.outcome] if event.changed else None,
        _space_line,
        ("upstream", "replica", "outcome", "reason"),
    ),
    UpstreamJudged: EventForm(
        "standing",
        lambda event: STANDING_LEVELS[event.standing],
        _standing_line,
        ("model", "upstream", "standing", "reason"),
    ),
    StoreChanged: EventForm(
        "store",
        lambda event: logging.WARNING if event.away else logging.INFO,
        _store_line,
        ("away", "reason"),
    ),
    StoreLost: EventForm("store_lost", lambda _: logging.ERROR, _lost_line, StoreLost.__struct_fields__),
    AuditRecorded: EventForm("audit", lambda _: logging.INFO, _audit_line, AuditRecorded.__struct_fields__),
    GatewayReady: EventForm("ready", lambda _: logging.INFO, _ready_line, GatewayReady.__struct_fields__),
    BudgetAlert: EventForm("budget", lambda _: logging.WARNING, _budget_line, BudgetAlert.__struct_fields__),
}
# Types of events that may have a line.
LOGGED: tuple[type, ...] = (CallFinished, ModelStateReported, BatchChanged, *FORMS)


def call_line(event: CallFinished) -> str:
    """Return the line of a call as text for people."""
    outcome = "" if event.outcome == "ok" else f"  {event.outcome}"
    if event.reason is not None:
        # It may be a name that the caller has sent.
        outcome += f" ({quote(event.reason, safe='/:', errors='replace')})"
    trace = "" if event.trace_id is None else f"  trace={event.trace_id}"
    path = "" if event.path is None else f"  path={event.path}"
    key = "" if event.key_id is None else f"  key={event.key_id}"
    user = "" if event.end_user is None else f"  end_user={json_text(event.end_user)}"
    address = "" if event.address is None else f"  from={_escaped(event.address[:ADDRESS_CHARACTERS_MAX])}"
    return (
        f"{event.method} {event.route} {event.status}{outcome}  {event.duration_s * 1000:.1f} ms"
        f"{path}  tenant={event.tenant or '-'}{key}{user}  model={event.model or '-'}"
        f"  inputs={event.inputs}  tokens={event.tokens}{_attempts_text(event)}{address}"
        f"  id={event.request_id}{trace}"
    )


def _attempts_text(event: CallFinished) -> str:
    """Return the replicas of a call and the upstream's last answer that was no success, for its line."""
    if not event.attempts:
        return ""
    text = f"  replicas={','.join(event.replicas)}"
    if event.attempts > 1:
        text += f"  attempts={event.attempts}"
    if event.upstream_status is not None:
        text += f"  upstream_status={event.upstream_status}"
    if event.upstream_words is not None:
        text += f"  upstream_words={json_text(event.upstream_words)}"
    return text


def _value_text(value: Any) -> str:
    """Return the value of a changed field."""
    return "not set" if value is None else msgspec.json.encode(value).decode()


def _printable(text: str) -> str:
    """Return a text with the escapes of Python in place of characters that no terminal shows."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )


def json_text(words: str) -> str:
    """Return words as a JSON string, so that quotation marks in them do not end them."""
    return msgspec.json.encode(words).decode()


# Most requests come from a few addresses.
@lru_cache(maxsize=1024)
def _escaped(address: str) -> str:
    """Return an address in characters that are safe in a log line: a proxy may pass on anything as one."""
    return quote(address, safe=":", errors="replace")


class CallFields(msgspec.Struct, omit_defaults=True):
    """Fields of a call's line for programs, in their order; those without a value are left out."""

    time: str | None = None
    level: str | None = None
    event: str | None = None
    request_id: str | None = None
    trace_id: str | None = None
    method: str | None = None
    route: str | None = None
    path: str | None = None
    status: int | None = None
    outcome: str | None = None
    reason: str | None = None
    tenant: str | None = None
    key: str | None = None
    end_user: str | None = None
    address: str | None = None
    model: str | None = None
    operation: str | None = None
    inputs: int | None = None
    tokens: int | None = None
    replicas: tuple[str, ...] | None = None
    attempts: int | None = None
    upstream_status: str | None = None
    upstream_words: str | None = None
    duration_ms: float | None = None
    parse_ms: float | None = None
    fetch_ms: float | None = None
    auth_ms: float | None = None
    quota_ms: float | None = None
    queue_ms: float | None = None
    cache_ms: float | None = None
    upstream_ms: float | None = None
    encode_ms: float | None = None


def call_fields(event: CallFinished, time: str | None = None, level: str | None = None) -> CallFields:
    """Return the fields of a call's line for programs."""
    # By position: a struct of this size with named arguments costs twice as much.
    fields = CallFields(
        time,
        level,
        "call",
        event.request_id,
        event.trace_id,
        event.method,
        event.route,
        event.path,
        event.status,
        event.outcome,
        event.reason,
        event.tenant,
        event.key_id,
        event.end_user,
        None if event.address is None else _escaped(event.address[:ADDRESS_CHARACTERS_MAX]),
        event.model,
        event.operation,
        event.inputs,
        event.tokens,
        event.replicas or None,
        event.attempts or None,
        event.upstream_status,
        event.upstream_words,
        round(event.duration_s * 1000, 2),
    )
    for stage, seconds in event.stages.items():
        setattr(fields, STAGE_FIELDS[stage], round(seconds * 1000, 2))
    return fields
