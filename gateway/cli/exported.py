"""Files of `gateway export`: JSON Lines, a header, one record a line in a fixed order, and an end. Pure.

Rule: no line has a secret. Keys are digests, and secrets of upstreams are references, as they were declared.
"""

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime
from typing import Any, Self, TypeAlias

import msgspec

from gateway import __version__
from gateway.cli.printable import plain
from gateway.config.certificate_entries import entries_problem
from gateway.config.schema import KEY_DIGEST, TenantConfig
from gateway.quotas.limits import AMOUNT_MAX
from gateway.quotas.stored_counts import Counter, DayUsageRow, limit_of
from gateway.tenants.create_key import id_problem, name_problem
from gateway.tenants.keyring import StoredKey
from gateway.tenants.snapshot import Stored
from gateway.tenants.store import check_limits

VERSION = 1
# Damaged lines that one message lists.
PROBLEMS_MAX = 10
# Of the reason why a line is damaged, which may quote it.
REASON_CHARACTERS_MAX = 300
DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


class Record(msgspec.Struct, frozen=True, tag_field="record", forbid_unknown_fields=True):
    """Base of one line."""


class Header(Record, frozen=True, tag="header"):
    """First line. version: of the format. created: RFC 3339. gateway: release that has written the file."""

    version: int
    created: str
    gateway: str = __version__


class TenantRecord(Record, frozen=True, tag="tenant"):
    """Stored tenant."""

    name: str
    settings: TenantConfig


class KeyRecord(Record, frozen=True, tag="key"):
    """Stored key, as its digest. last_used: the day."""

    key: StoredKey
    last_used: str | None = None


class UpstreamRecord(Record, frozen=True, tag="upstream"):
    """Upstream that operators added, as written."""

    name: str
    settings: dict[str, Any]


class ModelRecord(Record, frozen=True, tag="model"):
    """Model that operators added, as written."""

    name: str
    settings: dict[str, Any]


class DrainRecord(Record, frozen=True, tag="drain"):
    """Replica that gets no work."""

    upstream: str
    replica: str


class End(Record, frozen=True, tag="end"):
    """Last line. records: number of lines between the first and the last."""

    records: int


Content: TypeAlias = (
    TenantRecord | KeyRecord | UpstreamRecord | ModelRecord | DrainRecord | Counter | DayUsageRow
)


class Exported(msgspec.Struct, frozen=True):
    """Content of a file. created: when it was written."""

    created: str
    tenants: tuple[TenantRecord, ...] = ()
    keys: tuple[KeyRecord, ...] = ()
    upstreams: tuple[UpstreamRecord, ...] = ()
    models: tuple[ModelRecord, ...] = ()
    drains: tuple[DrainRecord, ...] = ()
    counters: tuple[Counter, ...] = ()
    usage: tuple[DayUsageRow, ...] = ()

    def records(self) -> Iterator[Content]:
        """Yield all records in the order of the file."""
        for part in (
            *(self.tenants, self.keys, self.upstreams, self.models),
            *(self.drains, self.counters, self.usage),
        ):
            yield from part

    def joined(self, lost: Stored) -> Self:
        """Return the content with tenants and keys that a store has lost since: they are newer."""
        tenants = {record.name: record for record in self.tenants}
        tenants |= {name: TenantRecord(name, settings) for name, settings in lost.tenants.items()}
        keys = {record.key.id: record for record in self.keys}
        for key in lost.keys:
            used = keys[key.id].last_used if key.id in keys else None
            keys[key.id] = KeyRecord(key, used)
        return msgspec.structs.replace(
            self,
            tenants=tuple(tenants[name] for name in sorted(tenants)),
            keys=tuple(keys[id_] for id_ in sorted(keys)),
        )

    def objects(self) -> set[str]:
        """Return the tenants and keys as records of the audit name them."""
        return {
            *(f"tenant/{record.name}" for record in self.tenants),
            *(f"key/{record.key.id}" for record in self.keys),
        }


class NotExported(Exception):
    """A file is none of `gateway export`, of another version, or damaged; the message names the lines."""


def encode_export(exported: Exported) -> bytes:
    """Return the content of the file."""
    records = list(exported.records())
    lines = (Header(VERSION, exported.created), *records, End(len(records)))
    return b"".join(msgspec.json.encode(line, order="deterministic") + b"\n" for line in lines)


def decode_export(content: bytes) -> Exported:
    """Return the content of a file. Raises: NotExported."""
    lines = content.split(b"\n")
    created = _header(lines[0]).created
    if lines[-1] == b"":
        lines.pop()
    reader = _Reader()
    for number, line in enumerate(lines[1:], start=2):
        reader.read(number, line)
    reader.finish()
    if problems := reader.problems:
        more = [f"and {len(problems) - PROBLEMS_MAX} more"] if len(problems) > PROBLEMS_MAX else []
        raise NotExported("\n".join((*problems[:PROBLEMS_MAX], *more)))

    def of(kind: type) -> tuple[Any, ...]:
        return tuple(record for record in reader.records if isinstance(record, kind))

    return Exported(
        created,
        *(of(kind) for kind in (TenantRecord, KeyRecord, UpstreamRecord, ModelRecord)),
        *(of(kind) for kind in (DrainRecord, Counter, DayUsageRow)),
    )


class _Version(msgspec.Struct, tag="header", tag_field="record"):
    """The part of a header that every version has."""

    version: int


def _header(line: bytes) -> Header:
    try:
        version = msgspec.json.decode(line, type=_Version).version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotExported("line 1: no header of `gateway export`") from error
    if version != VERSION:
        raise NotExported(f"line 1: the format has version {version}, and this release reads {VERSION}")
    try:
        header = msgspec.json.decode(line, type=Header)
        datetime.fromisoformat(header.created)
    except (msgspec.DecodeError, ValueError) as error:
        raise NotExported(f"line 1: {_reason(error)}") from error
    return header


def _reason(error: Exception) -> str:
    """Return why a line is damaged, as a part of one line."""
    return plain(str(error)[:REASON_CHARACTERS_MAX])


class _Reader:
    """Reader of the lines after the header. problems: with the numbers of their lines."""

    def __init__(self) -> None:
        self.records: list[Content] = []
        self.problems: list[str] = []
        self._decoder = msgspec.json.Decoder(Content | End)
        self._lines: dict[Any, int] = {}
        self._end: End | None = None

    def read(self, number: int, line: bytes) -> None:
        """Read one line."""
        try:
            self._add(number, self._decoder.decode(line))
        except (ValueError, RecursionError) as error:
            self.problems.append(f"line {number}: {_reason(error)}")

    def _add(self, number: int, record: Content | End) -> None:
        """Add the record of a line. Raises: ValueError."""
        if self._end is not None:
            raise ValueError("there is a line after the end")
        if isinstance(record, End):
            self._end = record
            return
        _check(record)
        first = self._lines.setdefault(_identity(record), number)
        if first != number:
            raise ValueError(f"the same as line {first}")
        self.records.append(record)

    def finish(self) -> None:
        """Check that no line is missing."""
        if self._end is None:
            self.problems.append("there is no line of the end: the file was cut off")
        elif self._end.records != len(self.records) and not self.problems:
            number = len(self.records)
            self.problems.append(f"there are {number} records, and the last line says {self._end.records}")


def _identity(record: Content) -> Any:
    match record:
        case KeyRecord(key=key):
            own: Any = key.id
        case Counter():
            own = record.key
        case DayUsageRow():
            own = record.place
        case DrainRecord():
            own = record.upstream, record.replica
        case _:
            own = record.name
    return type(record), own


def _check(record: Content) -> None:
    """Check what types do not. Raises: ValueError."""
    match record:
        case TenantRecord(name=name, settings=settings):
            _raise_if(name_problem(name))
            _raise_if("keys have lines of their own" if settings.keys else None)
            _raise_if(entries_problem(settings.certificates))
            check_limits((), (settings,))
        case KeyRecord(key=key):
            _raise_if(id_problem(key.id) or name_problem(key.tenant))
            # The message leaves the value out: it may be a key in the clear.
            _raise_if(None if KEY_DIGEST.fullmatch(key.digest) else 'expected "sha256:" and 64 hex digits')
            check_limits((key,), ())
            _check_moment(key.expires_s or 0.0)
            _check_moment(key.created_s)
            _check_day(record.last_used or "1970-01-01")
        case UpstreamRecord(name=name) | ModelRecord(name=name) | DrainRecord(upstream=name):
            _check_name(name)
        case Counter():
            _check_name(record.tenant)
            date.fromisoformat(record.start)
            _raise_if(None if limit_of(record) else "no limit per day or month has this name")
            _raise_if(_amount_problem(record.amount) or _amount_problem(record.used))
        case DayUsageRow():
            _check_name(record.tenant)
            _check_day(record.day)
            for amount in record.units.values():
                _raise_if(_amount_problem(amount))


def _check_day(day: str) -> None:
    _raise_if(None if DAY.fullmatch(day) else "expected a day such as 2027-01-31")
    date.fromisoformat(day)


def _check_moment(at_s: float) -> None:
    try:
        datetime.fromtimestamp(at_s, UTC)
    except (OverflowError, OSError) as error:
        raise ValueError(f"{at_s} is no moment") from error


def _check_name(name: str) -> None:
    """Check the name of an object, or of the tenant of counts. Accounts of upstreams are no tenants."""
    has_controls = any(character < " " for character in name)
    _raise_if("a name has control characters" if has_controls else None)


def _amount_problem(amount: int) -> str | None:
    return None if 0 <= amount <= AMOUNT_MAX else f"{amount} is no amount"


def _raise_if(problem: str | None) -> None:
    if problem is not None:
        raise ValueError(problem)


NOUNS = {
    "tenants": "tenant",
    "keys": "key",
    "upstreams": "upstream",
    "models": "model",
    "drains": "drain",
    "counters": "counter",
    "usage": "row of usage",
}


def numbers_of(exported: Exported) -> dict[str, int]:
    """Return the number of records of each kind."""
    return {kind: len(getattr(exported, kind)) for kind in NOUNS}


def summary(exported: Exported) -> str:
    """Return the numbers of records as one line."""
    plurals = {**{kind: kind for kind in NOUNS}, "usage": "rows of usage"}
    numbers = numbers_of(exported).items()
    return ", ".join(f"{number} {NOUNS[kind] if number == 1 else plurals[kind]}" for kind, number in numbers)
