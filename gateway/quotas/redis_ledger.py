"""Quotas of all gateways together, in Redis: the same results as the ledger in memory, on the clock of Redis.

All keys of a tenant have one hash tag, so that its scripts run on one node of a cluster.
"""

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import msgspec

from gateway.errors import QuotaExceeded, QuotaUnavailable
from gateway.events import Observe, StoreChanged
from gateway.quotas.account import STATE_TTL_S, Account, Availability
from gateway.quotas.end_users import USERS_KEPT_DAYS
from gateway.quotas.ledger import (
    LEASE_US,
    Ledger,
    QuotaRequest,
    Reservation,
    SpentLimits,
    budget_alert,
)
from gateway.quotas.limits import OTHER_USERS, SECOND_US, Cost, Limit, LimitStatus, end_user_scope
from gateway.quotas.local_share import LocalShare, OfflineUsage
from gateway.quotas.operations import (
    DAY_US,
    KEY_END,
    LimitState,
    day_name,
    decode_statuses,
    field_of,
    keys_of,
    limit_argument,
    usage_field_parts,
    usage_key,
    user_field_parts,
    user_limits_key,
    users_key,
)
from gateway.quotas.usage import TenantUsage, UsageBy, UsageRow, UsageSum, usage_rows
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import Script, load_script

logger = logging.getLogger("gateway")

SUMS = load_script("sums")
STATES = load_script("meters", "states")
# A call with so many hashes of usage, or limits, occupies Redis for about a millisecond.
HASHES_TOGETHER = 400
LIMITS_TOGETHER = 200
READ_ATTEMPTS = 5
RENEW = load_script("meters", "renew")
BEAT = load_script("meters", "beat")
FORGET = load_script("forget")
# Fields that one step of a scan looks at.
SCAN_COUNT = 1000
# Gateways with a heartbeat within this many seconds divide the limits while the store is down.
ALIVE_S = 10.0
GATEWAYS_KEY = "gw:gateways"
GATEWAYS_TTL_S = 3600


WhenUnavailable = Literal["local", "refuse", "allow"]

HEARTBEAT_S = 1.0
RENEW_EVERY_S = 5.0
# How long the exit of a process may wait for unsent settlements.
FLUSH_S = 2.0


class OutagePolicy(msgspec.Struct, frozen=True):
    """The settings of `quotas` for an outage. gateways: their number if the store never returned it."""

    when_unavailable: WhenUnavailable = "local"
    gateways: int = 1


class RedisLedger(Ledger):
    """Quotas shared by all gateways on one store. now_us: a test's clock; None is the clock of Redis."""

    def __init__(
        self,
        client: RedisClient,
        policy: OutagePolicy,
        gateway_id: str,
        observe: Observe,
        now_us: Callable[[], int] | None = None,
    ) -> None:
        self._client = client
        self._policy = policy
        self._observe = observe
        self._availability = Availability()
        self._gateway_id = gateway_id
        self._now_us = now_us
        self._gateways = policy.gateways
        self._local = LocalShare()
        self._spent = SpentLimits(now_us or (lambda: time.monotonic_ns() // 1000))
        self._accounts: dict[str, Account] = {}
        # Open reservations that occupy a place in flight.
        self._open: dict[str, Reservation] = {}
        self._charges: list[OfflineUsage] = []
        self._failed_batch = 0
        # Why the store has refused this gateway ever since its start; nothing if it has not.
        self.refusal = ""
        self.has_answered = False
        # Tenants whose state in the store causes every script to fail.
        self._unreadable: set[str] = set()

    def refuse_if_spent(self, tenant: str, limits: tuple[Limit, ...], least: Cost) -> None:
        """Refuse a request that cannot pass, by the last refusal.

        Raises: QuotaExceeded; QuotaUnavailable if the store is down and requests are then refused.
        """
        if not self._availability.is_down:
            self._spent.refuse(tenant, limits, least)
        elif self._policy.when_unavailable == "refuse":
            raise QuotaUnavailable("the quota store is unavailable", retry_after_s=1)
        elif self._policy.when_unavailable == "local":
            with _degraded():
                self._local.refuse_if_spent(tenant, limits, least)

    def has_ample_room(self, request: QuotaRequest) -> bool:
        """Return whether a request need not wait for its reserve, by the last known states of its limits."""
        if self._availability.is_down or self._account(request.tenant).is_reserving:
            return False
        return self._local.has_ample_room(request)

    async def reserve(self, request: QuotaRequest) -> Reservation:
        """Take a cost from all limits, or from none.

        Raises: QuotaExceeded, RequestExceedsLimit, QuotaUnavailable.
        """
        if not request.shadow:
            request.check_reachable()
        if self._availability.is_down:
            return await self._reserve_offline(request)
        try:
            reply = await self._account(request.tenant).reserve(request)
        except StoreUnavailable:
            return await self._reserve_offline(request)
        over = request.limits[reply.blocking - 1] if reply.blocking else None
        if not reply.ok:
            assert over is not None
            if not self._account(request.tenant).is_settling:
                self._spent.record(request.tenant, reply.limit_statuses, reply.at_us)
            raise request.refusal(over, reply.wait_us, reply.limit_statuses, reply.at_us)
        self._spent.forget(request.tenant)
        reservation = Reservation(request, reply.limit_statuses, over=over, at_us=reply.at_us)
        if any(limit.period == "in_flight" for limit in request.limits):
            self._open[request.id] = reservation
        return reservation

    def settle(self, reservation: Reservation, actual: Cost) -> tuple[LimitStatus, ...]:
        """Queue a settlement and return the limits afterwards, as far as this gateway knows them.

        If it cannot be sent soon it is sent when the store is up again, or the reservation counts as spent.
        """
        request = reservation.request
        urgent = self._open.pop(request.id, None) is not None and self._local.in_flight_is_scarce(request)
        if reservation.degraded:
            return self._local.settle(reservation, actual, self._account(request.tenant).today())
        self._account(request.tenant).settle(request, actual, urgent=urgent)
        if actual != request.cost:
            self._spent.forget(request.tenant)
        return reservation.settled_statuses(actual)

    async def flush(self) -> None:
        """Wait until the store has every settlement that was queued so far. Raises: QuotaUnavailable."""
        flushes = [account.flush() for account in self._accounts.values()]
        for error in await asyncio.gather(*flushes, return_exceptions=True):
            if isinstance(error, StoreUnavailable):
                raise QuotaUnavailable("the quota store is unavailable") from error
            if error is not None:
                raise error

    async def usage(self, tenant: str, days: Sequence[str], by: UsageBy = "model") -> list[UsageRow]:
        """Return a tenant's usage, including all that this gateway has settled. Raises: QuotaUnavailable."""
        rows: list[UsageRow] = []
        try:
            await self._account(tenant).flush()
            for day in sorted(days):
                if by == "end_user":
                    # As many as a reply of one command would block Redis for.
                    fields = await self._scan(users_key(tenant, day), "*")
                    counts = _counts_of(fields, user_field_parts)
                else:
                    fields = await self._client.execute("HGETALL", usage_key(tenant, day))
                    counts = _counts_of(fields, usage_field_parts)
                rows += usage_rows(tenant, day, counts, by)
        except StoreUnavailable as error:
            raise QuotaUnavailable("the quota store is unavailable") from error
        return rows

    async def usage_sums(self, tenants: Sequence[str], days: Sequence[str]) -> dict[str, TenantUsage]:
        """Return the usage of several tenants, added up. days: today first. Raises: QuotaUnavailable."""
        if not days:
            return {}
        together = 1 if self._client.is_cluster else max(1, HASHES_TOGETHER // len(days))
        found: dict[str, TenantUsage] = {}
        try:
            await self._flush(tenants)
            for start in range(0, len(tenants), together):
                part = tenants[start : start + together]
                keys = [usage_key(tenant, day) for tenant in part for day in days]
                reply = await self._read(SUMS, keys, msgspec.msgpack.encode(len(days)))
                counts = msgspec.msgpack.decode(reply, type=list[int])
                for tenant, at in zip(part, range(0, len(counts), 6), strict=True):
                    latest, total = UsageSum(*counts[at : at + 3]), UsageSum(*counts[at + 3 : at + 6])
                    found[tenant] = TenantUsage(latest, total)
        except StoreUnavailable as error:
            raise QuotaUnavailable("the quota store is unavailable") from error
        return found

    async def limit_states(self, limits: Mapping[str, Sequence[Limit]]) -> dict[str, tuple[LimitStatus, ...]]:
        """Return the present states of limits, by tenant. Raises: QuotaUnavailable."""
        found: dict[str, tuple[LimitStatus, ...]] = {}
        try:
            await self._flush(limits)
            for part in self._parts(limits):
                keys = [keys_of(tenant)[0] for tenant in part]
                arguments = [[limit_argument(limit) for limit in limits[tenant]] for tenant in part]
                now_us = self._now_us() if self._now_us else 0
                argument = msgspec.msgpack.encode({"now": now_us, "limits": arguments})
                reply = await self._read(STATES, keys, argument)
                states = msgspec.msgpack.decode(reply, type=list[list[list[int]] | bool])
                for tenant, own in zip(part, states, strict=True):
                    # The state of a tenant that breaks every script is logged when it is used.
                    if not isinstance(own, bool):
                        found[tenant] = decode_statuses(limits[tenant], own)
        except StoreUnavailable as error:
            raise QuotaUnavailable("the quota store is unavailable") from error
        return found

    async def _read(self, script: Script, keys: Sequence[str], argument: bytes) -> bytes:
        """Run a script that changes nothing, again after a timeout. Raises: StoreUnavailable.

        The timeout is that of callers, which a busy machine exceeds now and then. Operators can wait longer.
        """
        for _ in range(READ_ATTEMPTS - 1):
            with suppress(StoreUnavailable):
                return await self._client.run_script(script, keys, argument)
        return await self._client.run_script(script, keys, argument)

    def _parts(self, limits: Mapping[str, Sequence[Limit]]) -> Iterator[list[str]]:
        """Yield the tenants that have limits, as many at a time as one call of a script looks at."""
        part: list[str] = []
        number = 0
        for tenant, own in limits.items():
            if not own:
                continue
            if part and (self._client.is_cluster or number + len(own) > LIMITS_TOGETHER):
                yield part
                part, number = [], 0
            part.append(tenant)
            number += len(own)
        if part:
            yield part

    async def _flush(self, tenants: Iterable[str]) -> None:
        """Wait until the store has what this gateway has settled for these tenants.

        Raises: StoreUnavailable.
        """
        for tenant in tenants:
            if (account := self._accounts.get(tenant)) is not None and account.is_settling:
                await account.flush()

    async def forget_end_user(self, tenant: str, names: Collection[str]) -> int:
        """Count the usage of an end user as that of others, and drop the state of its limits.

        Raises: QuotaUnavailable.
        """
        days = [day_name(self._today() - number) for number in range(USERS_KEPT_DAYS + 1)]
        found = set()
        try:
            await self._account(tenant).flush()
            for name in names:
                scope = end_user_scope(name)
                fields = await self._scan(keys_of(tenant)[0], f"{_literal(scope)}*")
                # The scope of "ann" is also the start of that of "ann lee".
                fields = {
                    each: state for each, state in fields.items() if b" " not in each[len(scope.encode()) :]
                }
                await self._forget([keys_of(tenant)[0], user_limits_key(tenant)], name, fields)
                for day in days:
                    key = users_key(tenant, day)
                    fields = await self._scan(key, f"{_literal(name + KEY_END)}*")
                    if fields and await self._forget([key], name, fields):
                        found.add(day)
        except StoreUnavailable as error:
            raise QuotaUnavailable("the quota store is unavailable") from error
        return len(found)

    async def _forget(self, keys: Sequence[str], name: str, fields: Iterable[bytes]) -> int:
        argument = msgspec.msgpack.encode((name, OTHER_USERS, [field.decode() for field in fields]))
        return msgspec.msgpack.decode(await self._client.run_script(FORGET, keys, argument), type=int)

    async def _scan(self, key: str, pattern: str) -> dict[bytes, bytes]:
        """Return the fields of a hash that match, in steps that each are short. Raises: StoreUnavailable."""
        found: dict[bytes, bytes] = {}
        cursor = 0
        while True:
            cursor, fields = await self._client.execute(
                "HSCAN", key, cursor, "MATCH", pattern, "COUNT", SCAN_COUNT
            )
            found |= fields
            if not int(cursor):
                return found

    def _today(self) -> int:
        """Return the day since 1970, of this gateway's clock or of a test's."""
        return (self._now_us() if self._now_us else time.time_ns() // 1000) // DAY_US

    async def beat(self) -> int:
        """Record this gateway as alive and return the number of live gateways. Raises: StoreUnavailable."""
        argument = {
            "now": self._now_us() if self._now_us else 0,
            "id": self._gateway_id,
            "alive": round(ALIVE_S * SECOND_US),
            "ttl": GATEWAYS_TTL_S,
        }
        # A script, not plain commands: a server that takes commands and refuses scripts is of no use.
        reply = await self._client.run_script(BEAT, [GATEWAYS_KEY], msgspec.msgpack.encode(argument))
        return msgspec.msgpack.decode(reply, type=int)

    def spent_share(self, tenant: str, limit: Limit) -> float | None:
        """Return the used share of a limit, as the store last reported it to this process."""
        return self._local.spent_share(tenant, limit)

    async def maintain(self) -> None:
        """Send heartbeats, renew leases, and return to the store after an outage, until cancelled."""
        renewed_s = time.monotonic()
        while True:
            try:
                self._gateways = await self.beat()
            except StoreUnavailable as error:
                self._record_failure(error)
                self.refusal = str(error) if error.is_refusal and not self.has_answered else ""
            else:
                self.has_answered, self.refusal = True, ""
                if self._record_success():
                    self._observe(StoreChanged(away=False, reason="it answers"))
                await self._catch_up()
                if time.monotonic() - renewed_s >= RENEW_EVERY_S:
                    renewed_s = time.monotonic()
                    await self._renew()
            await asyncio.sleep(HEARTBEAT_S)

    async def aclose(self) -> None:
        """Send unsent settlements for up to two seconds, then close.

        A reservation that is unsettled then counts as spent; usage counted without the store is lost.
        """
        with suppress(QuotaUnavailable, TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._catch_up()
                await self.flush()
        await self._client.aclose()

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(
                tenant, self._client, self._availability, self._on_result, self._now_us
            )
        return account

    def _on_result(
        self, tenant: str, states: Sequence[tuple[Limit, LimitState]], error: StoreUnavailable | None
    ) -> None:
        if error is not None:
            self._on_error(tenant, error)
            return
        self._unreadable.discard(tenant)
        for limit, (used, _, *alerts) in states:
            # A settlement has made the alert due.
            if alerts and limit.alert_at is not None:
                self._observe(budget_alert(tenant, limit, used))
        self._local.record(tenant, states, is_down=self._availability.is_down)
        if not self._availability.is_down:
            # Only the heartbeat marks an outage as over; a late reply to one request does not.
            self._record_success()

    def _record_success(self) -> bool:
        """End a series of failures and return True if the store was down: local counts start from scratch."""
        if self._availability.is_failing:
            self._local.reset()
        return self._availability.record_success()

    def _on_error(self, tenant: str, error: StoreUnavailable) -> None:
        """Count a failure of the store, or log that one tenant's state is broken, which affects no other."""
        if not error.is_script_error:
            self._record_failure(error)
        elif tenant not in self._unreadable:
            self._unreadable.add(tenant)
            [limits, *_] = keys_of(tenant)
            logger.error(
                "the state of tenant %r in Redis cannot be used (%s); its limits are not counted there until "
                "the key %s is removed",
                tenant,
                error,
                limits,
            )

    async def _reserve_offline(self, request: QuotaRequest) -> Reservation:
        """Reserve without the store, according to the policy."""
        match self._policy.when_unavailable:
            case "refuse":
                raise QuotaUnavailable("the quota store is unavailable", retry_after_s=1)
            case "allow":
                return Reservation(request, (), degraded=True)
            case "local":
                with _degraded():
                    return await self._local.reserve(request, self._gateways)

    def _record_failure(self, error: StoreUnavailable) -> None:
        """Count a failure, once per batch."""
        if error.batch_number and error.batch_number == self._failed_batch:
            return
        self._failed_batch = error.batch_number
        if self._availability.record_failure():
            self._observe(StoreChanged(away=True, reason=str(error)))

    async def _catch_up(self) -> None:
        """Send settlements, and charge usage that was counted without the store; stop when it fails."""
        for account in self._accounts.values():
            account.enqueue()
        self._charges += self._local.take_usage()
        while self._charges:
            usage = self._charges[0]
            account = self._account(usage.tenant)
            request = usage.charge(account.today())
            try:
                await account.reserve(request)
            except StoreUnavailable as error:
                if not error.is_script_error:
                    return
            else:
                # A charge to a rate is not recorded as usage: it is never settled, and so counts as spent.
                if usage.day:
                    account.settle(request, request.cost, urgent=False, day=usage.day)
            # Usage of a tenant whose state is broken cannot be charged: the state starts from scratch when
            # it is removed.
            self._charges.pop(0)

    async def _renew(self) -> None:
        """Extend the leases of all requests in flight."""
        tenants: dict[str, list[Reservation]] = defaultdict(list)
        for reservation in self._open.values():
            tenants[reservation.request.tenant].append(reservation)
        for tenant, reservations in tenants.items():
            argument = {
                "now": self._now_us() if self._now_us else 0,
                "lease": LEASE_US,
                "ttl": STATE_TTL_S,
                "calls": [_renewal(reservation) for reservation in reservations],
            }
            try:
                await self._client.run_script(RENEW, keys_of(tenant), msgspec.msgpack.encode(argument))
            except StoreUnavailable as error:
                self._on_error(tenant, error)
                if not error.is_script_error:
                    return


def _counts_of(
    fields: Mapping[bytes, bytes], parts_of: Callable[[str], tuple[str, str, str] | None]
) -> dict[tuple[str, str], dict[str, int]]:
    """Return the counts of a day's fields by model and key, or model and end user, then by unit."""
    counts: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for field, amount in fields.items():
        if (parts := parts_of(field.decode())) is not None:
            model, name, unit = parts
            counts[model, name][unit] = int(amount)
    return counts


def _literal(text: str) -> str:
    """Return a pattern of Redis that matches a text only."""
    return re.sub(r"([*?\[\]^\\-])", r"\\\1", text)


@contextmanager
def _degraded() -> Iterator[None]:
    """Mark a refusal as this gateway's own."""
    try:
        yield
    except QuotaExceeded as error:
        error.mark_degraded()
        raise


def _renewal(reservation: Reservation) -> tuple[str, int, int, list[str]]:
    """Encode a request in flight as renew.lua reads it."""
    request = reservation.request
    fields = [field_of(limit) for limit in request.limits if limit.period == "in_flight"]
    return request.id, reservation.at_us, request.expires_us, fields
