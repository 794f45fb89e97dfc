"""Events as log lines: one per call, one per change of state. No event contains inputs or keys."""

import logging
from functools import lru_cache
from typing import Any, TypeAlias, get_args
from urllib.parse import quote

from gateway.events import (
    LINE_ROUTES,
    BatchChanged,
    CallFinished,
    ConnectionFaulted,
    DescriptionRejected,
    Event,
    ModelStateReported,
    ReplicaChanged,
    SpaceChecked,
    SpaceOutcome,
    Stage,
    StoreChanged,
)

logger = logging.getLogger("gateway")

# Monitoring requests these every few seconds; their lines would bury all others.
PROBED_ROUTES = frozenset({"/livez", "/readyz", "/health", "/ping", "/models/{model}/health", "/metrics"})
# An open /ui and `gateway status` request the status every second, and load balancers get / for their health
# check. A refusal has a line: it may be an attack.
POLLED_ROUTES = frozenset({"/admin/status", "/admin/traffic", "/admin/calls", "/"})
QUIET_ROUTES = PROBED_ROUTES | POLLED_ROUTES | frozenset(LINE_ROUTES.values())

# The longest IPv6 address with a zone is shorter.
ADDRESS_CHARACTERS_MAX = 64
SPACE_LEVELS: dict[SpaceOutcome, int] = {
    "fits": logging.INFO,
    "differs": logging.ERROR,
    "unchecked": logging.WARNING,
}
# The state of a replica in a sentence.
STATES = {
    "joining": "is joining",
    "up": "is up",
    "probation": "is on probation",
    "down": "is down",
    "gone": "is gone",
}
STAGE_FIELDS: dict[Stage, str] = {stage: f"{stage}_ms" for stage in get_args(Stage)}
Logged: TypeAlias = (
    CallFinished | ConnectionFaulted | DescriptionRejected | ReplicaChanged | SpaceChecked | StoreChanged
)


class EventLine:
    """Log line of an event, as text for people and as fields for programs; built only when it is written."""

    def __init__(self, event: Logged) -> None:
        self.event = event

    def __str__(self) -> str:
        match self.event:
            case CallFinished():
                return call_line(self.event)
            case ReplicaChanged():
                change = self.event
                return (
                    f"upstream {change.upstream}: {change.replica} {STATES[change.state]} ({change.reason})"
                )
            case ConnectionFaulted():
                return _fault_line(self.event)
            case DescriptionRejected():
                odd = self.event
                return f"upstream {odd.upstream}: the description of {odd.replica} is not used: {odd.reason}"
            case SpaceChecked():
                return _space_line(self.event)
            case StoreChanged(away=True):
                return f"the quota store is unreachable ({self.event.reason}): counting without it"
        return f"the quota store is reachable again ({self.event.reason})"

    def fields(self) -> dict[str, Any]:
        """Return flat fields with units in their names; unknown values are left out."""
        match self.event:
            case CallFinished():
                return call_fields(self.event)
            case ReplicaChanged():
                change = self.event
                facts = {"upstream": change.upstream, "replica": change.replica, "state": change.state}
                return {"event": "replica", "message": str(self), **facts, "reason": change.reason}
            case ConnectionFaulted():
                fault = self.event
                facts = {"upstream": fault.upstream, "replica": fault.replica, "fault": fault.kind}
                return {"event": "connection", "message": str(self), **facts, "pause_s": fault.pause_s}
            case DescriptionRejected():
                odd = self.event
                facts = {"upstream": odd.upstream, "replica": odd.replica}
                return {"event": "description", "message": str(self), **facts, "reason": odd.reason}
            case SpaceChecked():
                space = self.event
                facts = {"upstream": space.upstream, "replica": space.replica, "outcome": space.outcome}
                return {"event": "vector_space", "message": str(self), **facts, "reason": space.reason}
        away = {"away": self.event.away, "reason": self.event.reason}
        return {"event": "store", "message": str(self), **away}


def log_event(event: Event) -> None:
    """Log an event."""
    if not isinstance(event, CallFinished):
        log_change(event)
    elif (event.route not in QUIET_ROUTES or is_no_poll(event)) and logger.isEnabledFor(logging.INFO):
        _write(logging.INFO, event)


def is_no_poll(event: CallFinished) -> bool:
    """Return whether a request for a quiet route has a line: a refusal, or a call of a model at /."""
    return event.route in POLLED_ROUTES and (event.outcome != "ok" or event.method != "GET")


def log_change(event: Event) -> None:
    """Log an event unless it is a call."""
    match event:
        case ModelStateReported():
            _log_model_state(event)
        case ReplicaChanged():
            _write(logging.WARNING if event.state == "down" else logging.INFO, event)
        case ConnectionFaulted() if event.pause_s:
            _write(logging.WARNING, event)
        case DescriptionRejected(changed=True):
            _write(logging.WARNING, event)
        case StoreChanged():
            _write(logging.WARNING if event.away else logging.INFO, event)
        case BatchChanged():
            logger.info(
                "batch %s of tenant %s is %s: %d lines completed, %d failed",
                event.batch,
                event.tenant,
                event.status,
                event.completed,
                event.failed,
            )
        case SpaceChecked(changed=True):
            _write(SPACE_LEVELS[event.outcome], event)


def _write(level: int, event: Logged) -> None:
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


def _fault_line(event: ConnectionFaulted) -> str:
    subject = f"upstream {event.upstream}: {event.replica}"
    return (
        f"{subject} sends data that no request asked for: no connection is reused for {event.pause_s:.0f} s"
    )


def _space_line(event: SpaceChecked) -> str:
    match event.outcome:
        case "fits":
            return f"upstream {event.upstream}: {event.replica} is in vector space {event.reason}"
        case "differs":
            return f"upstream {event.upstream}: {event.replica} gives other vectors: {event.reason}"
        case "unchecked":
            subject = f"upstream {event.upstream}: the vectors of {event.replica}"
            return f"{subject} cannot be checked ({event.reason})"


def call_line(event: CallFinished) -> str:
    """Return the line of a call as text for people."""
    outcome = "" if event.outcome == "ok" else f"  {event.outcome}"
    trace = "" if event.trace_id is None else f"  trace={event.trace_id}"
    path = "" if event.path is None else f"  path={event.path}"
    key = "" if event.key_id is None else f"  key={event.key_id}"
    address = "" if event.address is None else f"  from={_escaped(event.address[:ADDRESS_CHARACTERS_MAX])}"
    return (
        f"{event.method} {event.route} {event.status}{outcome}  {event.duration_s * 1000:.1f} ms"
        f"{path}  tenant={event.tenant or '-'}{key}  model={event.model or '-'}"
        f"  inputs={event.inputs}  tokens={event.tokens}{address}  id={event.request_id}{trace}"
    )


# Most requests come from a few addresses.
@lru_cache(maxsize=1024)
def _escaped(address: str) -> str:
    """Return an address in characters that are safe in a log line: a proxy may pass on anything as one."""
    return quote(address, safe=":", errors="replace")


def call_fields(event: CallFinished) -> dict[str, Any]:
    """Return the fields of a call's line for programs."""
    fields = {
        "event": "call",
        "request_id": event.request_id,
        "trace_id": event.trace_id,
        "method": event.method,
        "route": event.route,
        "path": event.path,
        "status": event.status,
        "outcome": event.outcome,
        "tenant": event.tenant,
        "key": event.key_id,
        "address": None if event.address is None else _escaped(event.address[:ADDRESS_CHARACTERS_MAX]),
        "model": event.model,
        "operation": event.operation,
        "inputs": event.inputs,
        "tokens": event.tokens,
        "duration_ms": round(event.duration_s * 1000, 2),
    }
    for stage, seconds in event.stages.items():
        fields[STAGE_FIELDS[stage]] = round(seconds * 1000, 2)
    return {name: value for name, value in fields.items() if value is not None}
