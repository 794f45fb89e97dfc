"""Records of changes: who has changed what, when, from where, and what it was before. Pure.

Rule: no record contains a secret or the digest of one. A record is written once and never changed.
"""

import json
import os
import pwd
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from gateway.events import AuditRecorded

# key, certificate: the id of an API key or a client certificate. token: the subject of a token, after its
# issuer. local: a caller on this machine who needs no key. command: the system's user and host of a command.
# gateway: the gateway itself.
ActorKind = Literal["key", "certificate", "token", "local", "command", "gateway"]

# Bounds of one record; names of tenants and models, and lists of them, may be far longer.
RECORD_BYTES_MAX = 16 * 1024
TEXT_CHARACTERS_MAX = 200
FIELDS_MAX = 40
# Ends of a text that was cut, and the beginning of the field that stands for those left out.
CUT, MORE = "… (cut)", "and "
# Microseconds of the last id: records of one millisecond are ordered by their ids.
_last_us = 0


class Actor(msgspec.Struct, frozen=True):
    """Origin of a change.

    address: of the client. request_id: of the HTTP request. gateway: that carries out the change; empty for a
    command that needs none.
    """

    name: str
    kind: ActorKind
    address: str = ""
    request_id: str = ""
    gateway: str = ""


# Origin of a change without an operator.
GATEWAY = Actor("gateway", "gateway")


class ChangedField(msgspec.Struct, frozen=True):
    """A field that was changed. field: with the names of limits, as in `limits.tokens_per_day`.

    was, is: None for a field that is not set.
    """

    field: str
    was: Any = None
    now: Any = msgspec.field(default=None, name="is")


class AuditRecord(msgspec.Struct, frozen=True):
    """One change.

    id: hexadecimal; it grows, and a record that is copied keeps it. time: RFC 3339 in UTC, to the
    millisecond. actor: id of the key, subject of the token, or user@host. object: its kind and its name, as
    in `tenant/acme`.
    """

    id: str
    time: str
    actor: str
    actor_kind: ActorKind
    address: str
    action: str
    object: str
    changes: tuple[ChangedField, ...]
    request_id: str
    gateway: str

    @property
    def at_ms(self) -> int:
        """Time in milliseconds since 1970."""
        return round(datetime.fromisoformat(self.time).timestamp() * 1000)

    @property
    def order(self) -> tuple[str, str]:
        """Place among all records."""
        return self.time, self.id

    @property
    def text(self) -> str:
        """All that an operator may search for, one part a line."""
        parts = [self.actor, self.address, self.action, self.object, self.request_id, self.gateway]
        for change in self.changes:
            values = [json.dumps(value, ensure_ascii=False) for value in (change.was, change.now)]
            parts += [change.field, *values]
        return "\n".join(parts)

    def event(self) -> AuditRecorded:
        """Return the event that is logged."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("id", "time")}
        return AuditRecorded(record=self.id, at=self.time, **fields)


def new_record(by: Actor, action: str, object_: str, changes: Sequence[ChangedField] = ()) -> AuditRecord:
    """Return the record of a change that happens now, cut to its bounds."""
    record = AuditRecord(
        _new_id(),
        time_text(time.time()),
        by.name[:TEXT_CHARACTERS_MAX],
        by.kind,
        by.address[:TEXT_CHARACTERS_MAX],
        action,
        object_,
        tuple(changes),
        by.request_id,
        by.gateway,
    )
    number = FIELDS_MAX
    while len(msgspec.json.encode(record)) > RECORD_BYTES_MAX and number:
        cut = [
            ChangedField(_cut(change.field), _cut(change.was), _cut(change.now))
            for change in changes[:number]
        ]
        if len(changes) > number:
            cut.append(ChangedField(f"{MORE}{len(changes) - number} more"))
        record = msgspec.structs.replace(record, object=_cut(object_), changes=tuple(cut))
        # A character may take six bytes.
        number //= 2
    return record


def _new_id() -> str:
    """Return an id that is greater than those before it in this process, and no other process' id."""
    global _last_us  # noqa: PLW0603 - the one counter of the process
    _last_us = max(_last_us + 1, time.time_ns() // 1000)
    return f"{_last_us:014x}{secrets.token_hex(4)}"


def _cut(value: Any) -> Any:
    """Return a value whose text is short enough for a record."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[:TEXT_CHARACTERS_MAX] + CUT


def is_cut(value: Any) -> bool:
    """Return whether a record has only a part of a value."""
    return isinstance(value, str) and value.endswith(CUT)


def changed_fields(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[ChangedField]:
    """Return the fields that differ, in their order. One that is absent is not set."""
    names = dict.fromkeys((*was, *now))
    return [
        ChangedField(name, was.get(name), now.get(name)) for name in names if was.get(name) != now.get(name)
    ]


def time_text(at_s: float) -> str:
    """Return a moment as records have it: such texts are ordered as the moments are."""
    text = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"


def command_actor() -> Actor:
    """Return the system's user and host, as whom a command is run, whatever its environment says."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        # A container's user may have no name.
        user = str(os.getuid())
    return Actor(f"{user}@{socket.gethostname()}", "command")
