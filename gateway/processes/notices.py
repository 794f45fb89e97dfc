"""Events that a webhook can be called on, as the workers report them to the parent. Pure."""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.config.schema import NotifyKind
from gateway.events import BudgetAlert, Event, ReplicaSlow, StoreLost
from gateway.processes.messages import Notice
from gateway.telemetry.access_log import EventLine

KINDS: Mapping[type, NotifyKind] = {
    BudgetAlert: "budget",
    StoreLost: "store_loss",
    ReplicaSlow: "replica_slow",
}
# A notice is written to a pipe at once, which has room for 4,096 bytes.
TEXT_CHARACTERS_MAX = 300
NAME_CHARACTERS_MAX = 120


def notice_of(event: Event) -> Notice | None:
    """Return the notice of an event, None if it has none, or had it before this start."""
    kind = KINDS.get(type(event))
    if kind is None or (isinstance(event, StoreLost) and event.is_repeated):
        return None
    data = {name: _bounded(value) for name, value in msgspec.structs.asdict(event).items()}
    data.pop("is_repeated", None)
    key = hashlib.sha256(_key(event).encode()).hexdigest()
    return Notice(kind, key, str(EventLine(event))[:TEXT_CHARACTERS_MAX], data)


def _key(event: Event) -> str:
    match event:
        case BudgetAlert():
            return f"{event.tenant} {event.budget}"
        case ReplicaSlow():
            return f"{event.upstream} {event.replica}"
        case StoreLost():
            return f"{event.tenants} {event.keys}"
    return ""


def _bounded(value: Any) -> Any:
    return value[:NAME_CHARACTERS_MAX] if isinstance(value, str) else value
