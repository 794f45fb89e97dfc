"""Quotas of one process that outlive it: days, months, budgets and usage in a folder, without Redis.

Rule: files are written every WRITE_EVERY_S after a change, and at the end. A process that is killed loses
what it has counted since. Rates and requests in flight start from full: they would have refilled within an
hour.
"""

import asyncio
import fcntl
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from gateway.config.state_folder import lock_private, make_private_folder, replace_private
from gateway.events import Observe
from gateway.quotas.end_users import USERS_KEPT_DAYS, EndUserDay
from gateway.quotas.ledger import DAY_US, MemoryLedger, QuotaRequest, Reservation, day_of
from gateway.quotas.limits import CalendarMeter, Cost, Limit, LimitStatus
from gateway.quotas.usage import DAYS_MAX, NO_USAGE, TenantUsage, UsageBy, UsageRow, UsageSum, usage_rows

COUNTS_FILE = "quotas.json"
LOCK_FILE = "quotas.lock"
USAGE_FOLDER = "usage"
USERS_FOLDER = "end_users"
WRITE_EVERY_S = 5.0
# Some 100,000 limits, or rows of one day's usage.
FILE_BYTES_MAX = 32 * 1024 * 1024

Content = TypeVar("Content")

logger = logging.getLogger("gateway")


class CalendarCount(msgspec.Struct, frozen=True):
    """Used amount of a limit per day or month.

    start_us: of its period. alerted_us: start of the last period that had an alert.
    """

    tenant: str
    limit: Limit
    start_us: int
    used: int
    alerted_us: int


class UsageCount(msgspec.Struct, frozen=True, omit_defaults=True):
    """Usage of a model on the file's day, in each unit, by a key, or in the files of end users by one."""

    tenant: str
    model: str
    key: str = ""
    units: dict[str, int] = {}
    end_user: str = ""


# Usage of one day: by tenant, then by model and key, or by model and end user.
DayUsage = dict[str, dict[tuple[str, str], dict[str, int]]]


class DayFiles(msgspec.Struct, frozen=True):
    """Files of a folder to write. days: content by day. first_day: that is kept."""

    folder: str
    days: Mapping[str, bytes]
    first_day: str


class CountsFolder:
    """Files of one gateway. Only the process that holds the lock reads and writes them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._lock: IO[str] | None = None
        # A write whose task was cancelled goes on in its thread: the last one must come after it.
        self._writing = threading.Lock()
        self._logged = ""

    @property
    def is_held(self) -> bool:
        """True once this process holds the lock."""
        return self._lock is not None

    def acquire(self) -> bool:
        """Take the lock; return False if another process has it or the folder cannot be used."""
        problem = self.take_lock()
        if problem:
            self.log(problem)
        return not problem

    def take_lock(self) -> str:
        """Take the lock; return why that is not possible, or nothing."""
        try:
            self._lock = lock_private(self.path / LOCK_FILE, wait=False)
        except BlockingIOError:
            return f"another gateway keeps its quotas in {self.path}"
        except OSError as error:
            return f"{self.path} cannot be used: {error.strerror}"
        return ""

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def read_counts(self) -> list[CalendarCount]:
        """Return the limits as they were last written."""
        return self._read(self.path / COUNTS_FILE, list[CalendarCount]) or []

    def read_day(self, day: str, folder: str = USAGE_FOLDER) -> DayUsage:
        """Return the usage of a day."""
        usage: DayUsage = {}
        for count in self._read(self._day(day, folder), list[UsageCount]) or []:
            usage.setdefault(count.tenant, {})[count.model, count.key or count.end_user] = count.units
        return usage

    def read_sums(self, days: Sequence[str]) -> dict[str, UsageSum]:
        """Return the usage of some days by tenant, added up."""
        sums: dict[str, UsageSum] = {}
        for day in days:
            for tenant, counts in self.read_day(day).items():
                sums[tenant] = sums.get(tenant, NO_USAGE).plus(UsageSum.of(counts.values()))
        return sums

    def forget_end_user(self, tenant: str, names: Collection[str], except_days: Collection[str]) -> set[str]:
        """Count the usage of an end user as that of others; return the days with rows of it."""
        found = set()
        with self._writing:
            for path in (self.path / USERS_FOLDER).glob("*.json"):
                usage = {} if path.stem in except_days else self.read_day(path.stem, USERS_FOLDER)
                users = EndUserDay(usage.get(tenant))
                if users.forget(names):
                    usage[tenant] = users.counts
                    _replace(path, _encoded_users(usage))
                    found.add(path.stem)
        return found

    def write(self, counts: bytes, *folders: "DayFiles") -> bool:
        """Replace the files of limits and of some days, and remove days before the first that is kept."""
        try:
            with self._writing:
                make_private_folder(self.path)
                _replace(self.path / COUNTS_FILE, counts)
                for folder in folders:
                    self._write_days(folder)
        except OSError as error:
            self.log(f"{self.path} cannot be written: {error.strerror}")
            return False
        self._logged = ""
        return True

    def log(self, problem: str) -> None:
        """Log why nothing is kept, once until it changes."""
        if problem != self._logged:
            self._logged = problem
            logger.warning(
                "limits per day and month, budgets and usage are lost at the next start: %s; set `state_dir` "
                "to a folder of this gateway, or use Redis",
                problem,
            )

    def _write_days(self, files: "DayFiles") -> None:
        folder = self.path / files.folder
        if files.days:
            folder.mkdir(mode=0o700, exist_ok=True)
        for day, usage in files.days.items():
            _replace(self._day(day, files.folder), usage)
        for path in folder.glob("*.json"):
            if path.stem < files.first_day:
                path.unlink(missing_ok=True)

    def _day(self, day: str, folder: str) -> Path:
        return self.path / folder / f"{day}.json"

    def _read(self, path: Path, kind: type[list[Content]]) -> "list[Content] | None":
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            aside = path.with_suffix(".unreadable")
            logger.error(  # noqa: TRY400 - the operator needs the reason, and no traceback
                "%s cannot be read and counts as empty; it is kept as %s: %s", path, aside, error
            )
            with suppress(OSError):
                path.replace(aside)
            return None


def is_kept(folder: Path) -> bool:
    """Return whether a running gateway keeps its counts in a folder.

    A gateway that starts at this moment finds the lock taken, and tries again.
    """
    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


class KeptLedger(MemoryLedger):
    """Ledger in memory whose days, months and usage are kept in a folder."""

    def __init__(
        self,
        folder: Path,
        now_us: Callable[[], int] | None = None,
        observe: Observe = lambda _: None,
    ) -> None:
        super().__init__(now_us, observe=observe)
        self._folder = CountsFolder(folder)
        self._is_changed = False
        # Usage of days that get no more, added up by tenant: of the last days that were asked for.
        self._past: tuple[tuple[str, ...], Mapping[str, UsageSum]] = ((), {})
        self._restore()

    async def reserve(self, request: QuotaRequest) -> Reservation:
        """Take a cost from all limits, or from none. Raises: QuotaExceeded, RequestExceedsLimit."""
        self._is_changed = True
        return await super().reserve(request)

    def settle(self, reservation: Reservation, actual: Cost) -> tuple[LimitStatus, ...]:
        """Correct a reservation to its actual cost and return the limits afterwards."""
        self._is_changed = True
        return super().settle(reservation, actual)

    async def usage(self, tenant: str, days: Sequence[str], by: UsageBy = "model") -> list[UsageRow]:
        """Return the settled usage, also that of earlier processes."""
        rows = []
        known, folder = (self._users, USERS_FOLDER) if by == "end_user" else (self._usage, USAGE_FOLDER)
        for day in sorted(days):
            counts = self._counts(tenant, day, by)
            if (tenant, day) not in known and self._folder.is_held:
                counts = (await asyncio.to_thread(self._folder.read_day, day, folder)).get(tenant, {})
            rows += usage_rows(tenant, day, counts, by)
        return rows

    async def usage_sums(self, tenants: Sequence[str], days: Sequence[str]) -> dict[str, TenantUsage]:
        """Return the settled usage, also that of earlier processes. days: today first."""
        yesterday = day_of(self._now() - DAY_US)
        # Of today and yesterday everything is in memory once the folder was read.
        known = [day for day in days if day >= yesterday]
        past = tuple(day for day in days if day < yesterday)
        if past and self._folder.is_held and self._past[0] != past:
            self._past = past, await asyncio.to_thread(self._folder.read_sums, past)
        found = await super().usage_sums(tenants, known)
        if self._past[0] != past:
            return found
        return {
            tenant: TenantUsage(usage.latest, usage.total.plus(self._past[1].get(tenant, NO_USAGE)))
            for tenant, usage in found.items()
        }

    async def forget_end_user(self, tenant: str, names: Collection[str]) -> int:
        """Count the usage of an end user as that of others, also that of earlier processes."""
        days = self._forget_in_memory(tenant, names)
        await super().forget_end_user(tenant, names)
        if self._folder.is_held:
            known = {day for _, day in self._users}
            await asyncio.to_thread(self._folder.write, *self._content())
            days |= await asyncio.to_thread(self._folder.forget_end_user, tenant, names, known)
        return len(days)

    async def maintain(self) -> None:
        """Write the counts after changes until cancelled."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            if not self._folder.is_held:
                # The process before this one may still finish its calls.
                self._restore()
            if self._is_changed and self._folder.is_held:
                self._is_changed = False
                written = await asyncio.to_thread(self._folder.write, *self._content())
                self._is_changed |= not written
                if written:
                    self._forget_past_days()

    async def aclose(self) -> None:
        """Write the last counts."""
        if self._folder.is_held:
            self._folder.write(*self._content())
            self._folder.release()

    def _restore(self) -> None:
        """Add what an earlier process has counted, if the folder can be used."""
        if not self._folder.acquire():
            return
        for count in self._folder.read_counts():
            meter = self._meter(count.tenant, count.limit)
            if isinstance(meter, CalendarMeter):
                meter.restore(count.start_us, count.used, count.alerted_us)
                self._meters[count.tenant, count.limit] = meter
                self._user_limits.record(count.tenant, [meter.status(self._now())], 0, self._now())
        now_us = self._now()
        for day in {day_of(now_us), day_of(now_us - DAY_US), *(day for _, day in self._usage)}:
            for tenant, counts in self._folder.read_day(day).items():
                self._add_usage(tenant, day, counts)
        for day in {day_of(now_us), day_of(now_us - DAY_US), *(day for _, day in self._users)}:
            for tenant, counts in self._folder.read_day(day, USERS_FOLDER).items():
                self._users[tenant, day].join(counts)

    def _add_usage(self, tenant: str, day: str, counts: Mapping[tuple[str, str], Mapping[str, int]]) -> None:
        known = self._usage[tenant, day]
        for name, units in counts.items():
            own = known.setdefault(name, {})
            for unit, amount in units.items():
                own[unit] = own.get(unit, 0) + amount

    def _content(self) -> tuple[bytes, "DayFiles", "DayFiles"]:
        """Return the content of all files."""
        now_us = self._now()
        counts = []
        for tenant, meter in self._calendars():
            if meter.status(now_us).remaining < meter.limit.amount:
                start_us, used, alerted_us = meter.kept
                counts.append(CalendarCount(tenant, meter.limit, start_us, used, alerted_us))
        days: defaultdict[str, list[UsageCount]] = defaultdict(list)
        for (tenant, day), by_name in self._usage.items():
            days[day] += [UsageCount(tenant, model, key, units) for (model, key), units in by_name.items()]
        encoded = {day: msgspec.json.encode(usage) for day, usage in days.items()}
        users: defaultdict[str, DayUsage] = defaultdict(dict)
        for (tenant, day), found in self._users.items():
            users[day][tenant] = found.counts
        encoded_users = {day: _encoded_users(usage) for day, usage in users.items()}
        return (
            msgspec.json.encode(counts),
            DayFiles(USAGE_FOLDER, encoded, day_of(now_us - DAYS_MAX * DAY_US)),
            DayFiles(USERS_FOLDER, encoded_users, day_of(now_us - USERS_KEPT_DAYS * DAY_US)),
        )

    def _forget_past_days(self) -> None:
        """Drop the usage of days that have been written and get no more."""
        yesterday = day_of(self._now() - DAY_US)
        for tenant, day in [key for key in self._usage if key[1] < yesterday]:
            del self._usage[tenant, day]
        for tenant, day in [key for key in self._users if key[1] < yesterday]:
            del self._users[tenant, day]


def _encoded_users(usage: DayUsage) -> bytes:
    counts = [
        UsageCount(tenant, model, units=units, end_user=name)
        for tenant, found in usage.items()
        for (model, name), units in found.items()
    ]
    return msgspec.json.encode(counts)


def _replace(path: Path, content: bytes) -> None:
    """Replace a file in one step. Raises: OSError."""
    if len(content) > FILE_BYTES_MAX:
        raise OSError(0, f"{path.name} would exceed {FILE_BYTES_MAX} bytes")
    replace_private(path, content)
