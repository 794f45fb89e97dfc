"""Counts of limits per day and month, and usage, as commands read and raise them: in Redis, or in files.

Rule: a count is only raised. Of the stored and the given one the higher stays, so that no restored budget
can be spent twice, and the same file can be restored again. End users are left out: they are personal data.
"""

import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Protocol, TypeVar, get_args

import msgspec

from gateway.quotas.account import STATE_TTL_S, USAGE_TTL_S
from gateway.quotas.kept_ledger import USAGE_FOLDER, CalendarCount, CountsFolder, DayFiles, UsageCount
from gateway.quotas.ledger import day_of
from gateway.quotas.limits import SECOND_US, Limit, Unit, period_start_us
from gateway.quotas.operations import (
    DAY_US,
    KEY_END,
    day_name,
    field_of,
    keys_of,
    usage_field_parts,
    usage_key,
)
from gateway.quotas.usage import DAYS_MAX
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script

PRESENT, RAISE = load_script("present"), load_script("raise_counts")
# Fields that one step of a scan, or one call of the script, looks at.
FIELDS_TOGETHER = 500
LIMIT_NAME = re.compile(
    rf"(?P<scope>.* |)(?P<batch>batch_|)(?P<unit>{'|'.join(get_args(Unit))})_per_(?P<period>day|month)",
    re.DOTALL,
)
END_USER = "end user "
Item = TypeVar("Item")


class Counter(msgspec.Struct, frozen=True, tag="counter", tag_field="record", forbid_unknown_fields=True):
    """Used amount of a limit per day or month.

    limit: its name, after "key <id> " or "model <name> " if it is not the whole tenant's. amount: a changed
    limit is counted from zero. Budgets are in nano-units of the currency. start: first day of its period.
    """

    tenant: str
    limit: str
    amount: int
    start: str
    used: int
    has_alerted: bool = False

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Identity of the counter."""
        return self.tenant, self.limit, self.amount, self.start


class DayUsageRow(msgspec.Struct, frozen=True, tag="usage", tag_field="record", forbid_unknown_fields=True):
    """Usage of a model by a key of a tenant on one day, in each unit. key: empty if none was recorded."""

    tenant: str
    day: str
    model: str
    key: str
    units: dict[Unit, int]

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Identity of the row."""
        return self.tenant, self.day, self.model, self.key


class StoredCounts(Protocol):
    """Counts of one store. Its operations raise StoreUnavailable."""

    async def counters(self, tenants: Collection[str]) -> list[Counter]:
        """Return the counters of periods that are not over, in order."""

    async def usage(self, tenants: Collection[str], days: Collection[str]) -> list[DayUsageRow]:
        """Return the usage of these days, in order."""

    def acquire(self) -> None:
        """Make sure that the counts can be changed now."""

    async def raise_to(self, counters: Sequence[Counter], rows: Sequence[DayUsageRow]) -> None:
        """Raise counters and usage to these."""


def is_current(counter: Counter) -> bool:
    """Return whether the period of a counter is the present one."""
    limit = limit_of(counter)
    return limit is not None and counter.start == day_of(period_start_us(limit.period, _now_us()))


def limit_of(counter: Counter) -> Limit | None:
    """Return the limit of a counter, None if there is none of such a name per day or month."""
    match = LIMIT_NAME.fullmatch(counter.limit)
    if match is None:
        return None
    fields = {"unit": match["unit"], "period": match["period"], "amount": counter.amount}
    return msgspec.convert({**fields, "scope": match["scope"] + match["batch"]}, Limit)


def usage_days(now_us: int | None = None) -> list[str]:
    """Return all days of which usage is kept, and tomorrow, which another clock may have reached."""
    today = (_now_us() if now_us is None else now_us) // DAY_US
    return [day_name(today + 1 - number) for number in range(DAYS_MAX + 1)]


class CountsInRedis:
    """Counts that gateways share."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def counters(self, tenants: Collection[str]) -> list[Counter]:
        """Return the counters of periods that are not over, in order."""
        found = []
        for tenant in sorted(tenants):
            for field, state in (await self._fields(keys_of(tenant)[0])).items():
                counter = _counter(tenant, field, state)
                if counter is not None and is_current(counter):
                    found.append(counter)
        return sorted(found, key=lambda counter: counter.key)

    async def usage(self, tenants: Collection[str], days: Collection[str]) -> list[DayUsageRow]:
        """Return the usage of these days, in order."""
        rows = []
        for tenant in sorted(tenants):
            for day in await self._days_of(tenant, sorted(days)):
                counts: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
                for field, amount in (await self._fields(usage_key(tenant, day))).items():
                    model, key, unit = usage_field_parts(field)
                    counts[model, key][unit] = int(amount)
                rows += [
                    DayUsageRow(tenant, day, *name, _sorted_units(units))
                    for name, units in sorted(counts.items())
                ]
        return rows

    def acquire(self) -> None:
        """Do nothing: the script changes them under running gateways."""

    async def raise_to(self, counters: Sequence[Counter], rows: Sequence[DayUsageRow]) -> None:
        """Raise counters and usage to these."""
        counted: dict[tuple[str, str], list[object]] = defaultdict(list)
        for counter in counters:
            if (limit := limit_of(counter)) is not None:
                argument = (field_of(limit), _microseconds(counter.start), counter.used, counter.has_alerted)
                counted[counter.tenant, counter.start] += argument
        for place, fields in counted.items():
            for part in _parts(fields, 4):
                await self._raise(*place, part, ())
        await self._raise_usage(rows)

    async def _days_of(self, tenant: str, days: Sequence[str]) -> list[str]:
        """Return those of the days that have usage: of most there is none."""
        keys = [usage_key(tenant, day) for day in days]
        if not keys:
            return []
        numbers = msgspec.msgpack.decode(await self._client.run_script(PRESENT, keys, b""))
        # An empty list of Lua is an empty map.
        return [days[number - 1] for number in numbers]

    async def _raise_usage(self, rows: Sequence[DayUsageRow]) -> None:
        used: dict[tuple[str, str], list[object]] = defaultdict(list)
        for row in rows:
            name = f"{row.key}{KEY_END}{row.model}" if row.key else row.model
            for unit, amount in row.units.items():
                used[row.tenant, row.day] += (f"{name}|{unit}", amount)
        for place, fields in used.items():
            for part in _parts(fields, 2):
                await self._raise(*place, (), part)

    async def _raise(
        self, tenant: str, day: str, counters: Sequence[object], usage: Sequence[object]
    ) -> None:
        argument = {"counters": counters, "ttl": STATE_TTL_S, "usage": usage, "usage_ttl": USAGE_TTL_S}
        keys = (keys_of(tenant)[0], usage_key(tenant, day))
        await self._client.run_script(RAISE, keys, msgspec.msgpack.encode(argument))

    async def _fields(self, key: str) -> dict[str, bytes]:
        """Return the fields of a hash, read in steps that each are short."""
        found: dict[str, bytes] = {}
        cursor = 0
        while True:
            cursor, fields = await self._client.execute("HSCAN", key, cursor, "COUNT", FIELDS_TOGETHER)
            found |= {field.decode(errors="replace"): value for field, value in fields.items()}
            if not int(cursor):
                return found


class CountsInFiles:
    """Counts of a gateway without Redis, in its state folder.

    A running gateway writes them every few seconds, and reads them only at its start.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = CountsFolder(folder)

    async def counters(self, tenants: Collection[str]) -> list[Counter]:
        """Return the counters of periods that are not over, in order. tenants: all are returned."""
        del tenants
        found = [
            Counter(
                count.tenant,
                count.limit.name,
                count.limit.amount,
                day_of(count.start_us),
                count.used,
                count.alerted_us == count.start_us,
            )
            for count in self._folder.read_counts()
            if not count.limit.is_end_users
        ]
        return sorted(filter(is_current, found), key=lambda counter: counter.key)

    async def usage(self, tenants: Collection[str], days: Collection[str]) -> list[DayUsageRow]:
        """Return the usage of these days, in order. tenants: all are returned."""
        del tenants
        rows = [
            DayUsageRow(tenant, day, *name, _sorted_units(units))
            for day in days
            for tenant, counts in self._folder.read_day(day).items()
            for name, units in counts.items()
        ]
        return sorted(rows, key=lambda row: row.place)

    def acquire(self) -> None:
        """Take the lock of the folder. Raises: StoreUnavailable if a gateway has it."""
        if not self._folder.is_held and (problem := self._folder.take_lock()):
            raise StoreUnavailable(f"{problem}, and reads them only when it starts: stop it first")

    async def raise_to(self, counters: Sequence[Counter], rows: Sequence[DayUsageRow]) -> None:
        """Raise counters and usage to these."""
        self.acquire()
        counts = {(count.tenant, count.limit, count.start_us): count for count in self._folder.read_counts()}
        for counter in counters:
            if (limit := limit_of(counter)) is None:
                continue
            place = counter.tenant, limit, _microseconds(counter.start)
            known = counts.get(place, CalendarCount(*place, 0, -1))
            if counter.used > known.used:
                alerted_us = place[2] if counter.has_alerted else known.alerted_us
                counts[place] = CalendarCount(*place, counter.used, alerted_us)
        days = {}
        for day in sorted({row.day for row in rows}):
            usage = self._folder.read_day(day)
            for row in (row for row in rows if row.day == day):
                units = usage.setdefault(row.tenant, {}).setdefault((row.model, row.key), {})
                for unit, amount in row.units.items():
                    units[unit] = max(amount, units.get(unit, 0))
            stored = [
                UsageCount(tenant, model, key, units)
                for tenant, found in usage.items()
                for (model, key), units in found.items()
            ]
            days[day] = msgspec.json.encode(stored)
        first_day = day_of(_now_us() - DAYS_MAX * DAY_US)
        encoded = msgspec.json.encode(list(counts.values()))
        written = self._folder.write(encoded, DayFiles(USAGE_FOLDER, days, first_day))
        self._folder.release()
        if not written:
            raise StoreUnavailable(f"{self._folder.path} cannot be written")


def _sorted_units(units: Mapping[str, int]) -> dict[Unit, int]:
    return {msgspec.convert(unit, Unit): units[unit] for unit in sorted(units) if units[unit]}


def _counter(tenant: str, field: str, packed: bytes) -> Counter | None:
    """Return the counter of a limit's state, None if it is another limit, or cannot be read."""
    name, _, amount = field.rpartition("=")
    match = LIMIT_NAME.fullmatch(name)
    if match is None or not amount.isdecimal() or name.startswith(END_USER):
        return None
    try:
        state = msgspec.msgpack.decode(packed, type=_Calendar, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return Counter(tenant, name, int(amount), day_of(state.p), state.u, state.x == state.p)


class _Calendar(msgspec.Struct):
    """State of a limit per day or month, as `meters.lua` writes it."""

    p: int
    u: int
    x: int = -1


def _parts(items: Sequence[Item], width: int) -> Iterable[Sequence[Item]]:
    size = FIELDS_TOGETHER * width
    return (items[start : start + size] for start in range(0, len(items), size))


def _microseconds(day: str) -> int:
    """Return the beginning of a day in UTC."""
    return (date.fromisoformat(day) - date(1970, 1, 1)).days * DAY_US


def _now_us() -> int:
    return time.time_ns() * SECOND_US // 10**9
