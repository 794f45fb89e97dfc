"""Quotas of all gateways together, in Redis: the same answers as the ledger in memory, on Redis' clock.

All keys of a tenant are under one hash tag, so that its scripts run on one node of a cluster.
"""

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Literal

import msgspec

from gateway.errors import QuotaExceeded, QuotaUnavailable
from gateway.events import Observe, StoreChanged
from gateway.quotas.account import (
    STATE_TTL_S,
    Account,
    LimitState,
    field_of,
    keys_of,
    limit_statuses,
    usage_key,
)
from gateway.quotas.availability import Availability
from gateway.quotas.ledger import (
    LEASE_US,
    NOTHING,
    MemoryLedger,
    QuotaRequest,
    Reservation,
    check_reachable,
    corrected,
    refusal,
)
from gateway.quotas.limits import SECOND_US, WINDOWS_US, Cost, Limit, LimitStatus, Unit
from gateway.quotas.usage import UsageRow
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script

WhenUnavailable = Literal["local", "refuse", "allow"]

RENEW = load_script("meters", "renew")
BEAT = load_script("meters", "beat")
HEARTBEAT_S = 1.0
RENEW_EVERY_S = 5.0
# Gateways heard of within this many seconds share what is left when the store is away.
ALIVE_S = 10.0
# How long the end of a process may wait for what has not been told yet.
FLUSH_S = 2.0
# Where so many slots in flight are left, and half of the limit, hardly anybody waits for one.
PLENTY = 64
GATEWAYS_KEY = "gw:gateways"
GATEWAYS_TTL_S = 3600

logger = logging.getLogger("gateway")


class OutagePolicy(msgspec.Struct, frozen=True):
    """What `quotas` in router.yaml says. gateways: how many share, where the store never told."""

    when_unavailable: WhenUnavailable = "local"
    gateways: int = 1


class Owed(msgspec.Struct, frozen=True):
    """What a tenant used while the store was away.

    Of a model on a day (YYYY-MM-DD, UTC); or of a rate, and then no day is told.
    """

    tenant: str
    limits: tuple[Limit, ...]
    cost: Cost
    model: str = ""
    day: str = ""

    def ask(self, today: str) -> QuotaRequest:
        """What to charge, whether it fits or not, since it has been used; but to no period that is over.

        Another id each time: where the store may have heard of one, that is closed at nothing.
        """
        over = {"day": today != self.day, "month": today[:7] != self.day[:7]}
        limits = tuple([one for one in self.limits if not over.get(one.period)])
        id_ = f"owed-{secrets.token_hex(8)}"
        return QuotaRequest(id_, self.tenant, limits, self.cost, LEASE_US, self.model, shadow=True)


class RedisLedger:
    """now_us: 0 is Redis' own clock; a test brings its own."""

    def __init__(
        self,
        door: RedisClient,
        rules: OutagePolicy,
        gateway_id: str,
        observe: Observe,
        now_us: Callable[[], int] | None = None,
    ) -> None:
        self._door = door
        self._rules = rules
        self._gateway_id = gateway_id
        self._observe = observe
        self._now_us = now_us
        self._availability = Availability()
        self._gateways = rules.gateways
        self._local = LocalShare()
        self._accounts: dict[str, Account] = {}
        self._open: dict[str, Reservation] = {}
        self._owing: list[Owed] = []
        self._missed_trip = 0
        # Tenants whose state in the store no script can read.
        self._unreadable: set[str] = set()

    @property
    def away(self) -> bool:
        """Whether the store has been given up for now."""
        return self._availability.away

    async def reserve(self, ask: QuotaRequest) -> Reservation:
        """Raises: QuotaExceeded, RequestExceedsLimit, QuotaUnavailable."""
        if not ask.shadow:
            check_reachable(ask)
        if self._availability.away:
            return await self._reserve_without(ask)
        try:
            answer = await self._account(ask.tenant).reserve(ask)
        except StoreUnavailable:
            return await self._reserve_without(ask)
        over = ask.limits[answer.blocking - 1] if answer.blocking else None
        if not answer.ok:
            assert over is not None
            raise refusal(ask, over, answer.wait_us, answer.limit_statuses, answer.at_us)
        taken = Reservation(ask, answer.limit_statuses, over=over, at_us=answer.at_us)
        if any(limit.period == "in_flight" for limit in ask.limits):
            self._open[ask.id] = taken
        return taken

    def settle(self, reservation: Reservation, actual: Cost) -> tuple[LimitStatus, ...]:
        """What cannot be told soon is told when the store is back, or counts as spent."""
        ask = reservation.request
        awaited = self._open.pop(ask.id, None) is not None and self._slots_are_short(ask)
        if reservation.degraded:
            return self._local.settle(reservation, actual, self._account(ask.tenant).today())
        self._account(ask.tenant).settle(ask, actual, urgent=awaited)
        return corrected(reservation, actual)

    async def flush(self) -> None:
        """Raises: QuotaUnavailable."""
        telling = [account.flush() for account in self._accounts.values()]
        for told in await asyncio.gather(*telling, return_exceptions=True):
            if isinstance(told, StoreUnavailable):
                raise QuotaUnavailable("the quotas' store is away") from told
            if told is not None:
                raise told

    async def usage(self, tenant: str, days: Sequence[str]) -> list[UsageRow]:
        """What this gateway has settled is told first. Raises: QuotaUnavailable."""
        rows: list[UsageRow] = []
        try:
            await self._account(tenant).flush()
            for day in sorted(days):
                told = await self._door.execute("HGETALL", usage_key(tenant, day))
                rows += _usage_rows(tenant, day, told)
        except StoreUnavailable as error:
            raise QuotaUnavailable("the quotas' store is away") from error
        return rows

    async def maintain(self) -> None:
        """Beat, count the other gateways, renew leases, and notice when the store is back."""
        renewed_s = time.monotonic()
        while True:
            try:
                await self._beat()
            except StoreUnavailable as error:
                self._missed(error)
            else:
                if self._availability.answered():
                    self._observe(StoreChanged(away=False, reason="it answers"))
                await self._catch_up()
                if time.monotonic() - renewed_s >= RENEW_EVERY_S:
                    renewed_s = time.monotonic()
                    await self._renew()
            await asyncio.sleep(HEARTBEAT_S)

    async def aclose(self) -> None:
        """What cannot be told within two seconds counts as spent; what was used without the store is lost."""
        with suppress(QuotaUnavailable, TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._catch_up()
                await self.flush()
        await self._door.aclose()

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = Account(tenant, self._door, self._availability, self._heard, self._now_us)
            self._accounts[tenant] = account
        return account

    def _slots_are_short(self, ask: QuotaRequest) -> bool:
        """Whether somebody may wait for a slot in flight, by what the store told last."""
        slots = [one for one in ask.limits if one.period == "in_flight"]
        return any(self._local.left(ask.tenant, one) < max(PLENTY, one.amount // 2) for one in slots)

    def _heard(
        self, tenant: str, told: Sequence[tuple[Limit, LimitState]], error: StoreUnavailable | None
    ) -> None:
        if error is not None:
            self._could_not_run(tenant, error)
            return
        self._unreadable.discard(tenant)
        self._local.saw(tenant, told, away=self._availability.away)
        if not self._availability.away:
            # Only the heartbeat ends an absence: a late answer to one call does not.
            self._availability.answered()

    def _could_not_run(self, tenant: str, error: StoreUnavailable) -> None:
        """One tenant's broken state is no absence of the store, and concerns nobody else."""
        if not error.is_script_error:
            self._missed(error)
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

    async def _reserve_without(self, ask: QuotaRequest) -> Reservation:
        match self._rules.when_unavailable:
            case "refuse":
                raise QuotaUnavailable("the quotas' store is away", retry_after_s=1)
            case "allow":
                return Reservation(ask, (), degraded=True)
            case "local":
                try:
                    return await self._local.reserve(ask, self._gateways, away=self._availability.away)
                except QuotaExceeded as error:
                    error.headers["x-quota-mode"] = "degraded"
                    error.message += " (this gateway's share, while the quotas' store is away)"
                    raise

    def _missed(self, error: StoreUnavailable) -> None:
        """Count a miss, once for all who travelled together."""
        if error.batch_number and error.batch_number == self._missed_trip:
            return
        self._missed_trip = error.batch_number
        if self._availability.missed():
            self._observe(StoreChanged(away=True, reason=str(error)))
            self._local.begin()

    async def _catch_up(self) -> None:
        """Tell the store what it has missed; each thing is forgotten once it has been told."""
        for account in self._accounts.values():
            account.enqueue()
        self._owing += self._local.owed()
        while self._owing:
            owed = self._owing[0]
            account = self._account(owed.tenant)
            ask = owed.ask(account.today())
            try:
                await account.reserve(ask)
            except StoreUnavailable as error:
                if not error.is_script_error:
                    return
            else:
                # What a rate owes is nobody's usage: it is never settled, which is to say, spent.
                if owed.day:
                    account.settle(ask, ask.cost, urgent=False, day=owed.day)
            # A tenant's broken state cannot be charged: it starts anew once it is removed.
            self._owing.pop(0)

    async def _beat(self) -> None:
        argument = {
            "now": self._now_us() if self._now_us else 0,
            "id": self._gateway_id,
            "alive": round(ALIVE_S * SECOND_US),
            "ttl": GATEWAYS_TTL_S,
        }
        # A script: a server that takes commands and refuses scripts is of no use.
        told = await self._door.run_script(BEAT, [GATEWAYS_KEY], msgspec.msgpack.encode(argument))
        self._gateways = msgspec.msgpack.decode(told, type=int)

    async def _renew(self) -> None:
        tenants: dict[str, list[Reservation]] = defaultdict(list)
        for taken in self._open.values():
            tenants[taken.request.tenant].append(taken)
        for tenant, calls in tenants.items():
            argument = {
                "now": self._now_us() if self._now_us else 0,
                "lease": LEASE_US,
                "ttl": STATE_TTL_S,
                "calls": [_renewal(one) for one in calls],
            }
            try:
                await self._door.run_script(RENEW, keys_of(tenant), msgspec.msgpack.encode(argument))
            except StoreUnavailable as error:
                self._could_not_run(tenant, error)
                if not error.is_script_error:
                    return


class LocalShare:
    """One gateway's part of every limit while the store is away: 1/N, and rates refill without burst.

    What is used meanwhile is owed to the store. Overshoot is bounded by what each gateway last saw to
    remain of a day or month, ÷ N, and by amount ÷ N a window of the others.
    """

    def __init__(self) -> None:
        self._ledger = MemoryLedger()
        # What was last told of each limit, and when.
        self._seen: dict[str, dict[Limit, tuple[LimitState, int]]] = defaultdict(dict)
        self._shares: dict[tuple[str, Limit], Limit] = {}
        self._asked: dict[str, QuotaRequest] = {}
        self._owed: dict[tuple[str, tuple[Limit, ...], str, str], Cost] = {}
        self._owed_to_rates: dict[tuple[str, Limit], int] = defaultdict(int)
        self._numbers = count()

    def saw(self, tenant: str, told: Sequence[tuple[Limit, LimitState]], *, away: bool) -> None:
        """Note what the store told of a tenant's limits. Unless it is away, it is what counts again, and no
        share that was made for a call that missed it.
        """
        now_us = time.time_ns() // 1000
        seen = self._seen[tenant]
        for limit, one in told:
            seen[limit] = (one, now_us)
            if not away and (share := self._shares.pop((tenant, limit), None)):
                self._ledger.forget(tenant, share)

    def left(self, tenant: str, limit: Limit) -> int:
        """How many slots of a limit in flight the store told of last; none where it never did."""
        (used, *_), _ = self._seen[tenant].get(limit, ((limit.amount,), 0))
        return limit.amount - used

    def begin(self) -> None:
        """The store has just gone: nothing of an earlier absence counts any more."""
        self._ledger = MemoryLedger()
        self._shares.clear()

    async def reserve(self, ask: QuotaRequest, gateways: int, *, away: bool) -> Reservation:
        """away: the store is given up, and not only late with this answer. Raises: QuotaExceeded."""
        shares = tuple([await self._share(ask.tenant, limit, gateways, away) for limit in ask.limits])
        for share in shares:
            if ask.cost.of(share.unit) > share.amount and not ask.shadow:
                # It fits the whole limit, but not this part of it: later, when the store is back.
                raise refusal(ask, share, SECOND_US, ())
        taken = await self._ledger.reserve(msgspec.structs.replace(ask, limits=shares))
        self._asked[ask.id] = ask
        return msgspec.structs.replace(taken, degraded=True)

    def settle(self, reservation: Reservation, actual: Cost, day: str) -> tuple[LimitStatus, ...]:
        """Count what was used, here and as owed for that day."""
        ask = self._asked.pop(reservation.request.id, None)
        if ask is not None:
            calendars = tuple([one for one in ask.limits if one.period in ("day", "month")])
            key = (ask.tenant, calendars, ask.model, day)
            owed = self._owed.get(key, NOTHING)
            self._owed[key] = Cost(
                owed.requests + actual.requests, owed.tokens + actual.tokens, owed.inputs + actual.inputs
            )
            for limit in ask.limits:
                if limit.period in WINDOWS_US:
                    self._owed_to_rates[ask.tenant, limit] += actual.of(limit.unit)
        return self._ledger.settle(reservation, actual)

    def owed(self) -> list[Owed]:
        """What to charge now that the store is back."""
        used, self._owed = self._owed, {}
        rates, self._owed_to_rates = self._owed_to_rates, defaultdict(int)
        owed = [Owed(tenant, limits, cost, *rest) for (tenant, limits, *rest), cost in used.items()]
        # Of a rate, what was used longer ago than its window is back by now.
        owed += [
            Owed(tenant, (limit,), _only(limit.unit, min(amount, limit.amount)))
            for (tenant, limit), amount in rates.items()
            if amount
        ]
        return owed

    async def _share(self, tenant: str, limit: Limit, gateways: int, away: bool) -> Limit:  # noqa: FBT001
        key = (tenant, limit)
        if key not in self._shares:
            remaining = self._remaining(tenant, limit)
            self._shares[key] = share = _share_of(limit, remaining, gateways)
            if limit.period in WINDOWS_US:
                # It starts empty: what the store's bucket holds may be somebody else's by now. While the
                # store is only late it does not: what is used here is told within a second.
                left = 0 if away else (limit.amount if remaining is None else remaining) // gateways
                gone = _only(share.unit, max(0, share.amount - left))
                start = QuotaRequest(f"start-{next(self._numbers)}", tenant, (share,), gone, LEASE_US)
                self._ledger.settle(await self._ledger.reserve(start), gone)
        return self._shares[key]

    def _remaining(self, tenant: str, limit: Limit) -> int | None:
        """What was left of a limit when it was last told, unless its period has ended since."""
        if limit not in self._seen[tenant]:
            return None
        told, at_us = self._seen[tenant][limit]
        [standing] = limit_statuses([limit], [told])
        return standing.remaining if time.time_ns() // 1000 < at_us + standing.reset_us else None


def _renewal(taken: Reservation) -> tuple[str, int, int, list[str]]:
    """A call in flight, as renew.lua reads it."""
    ask = taken.request
    return (
        ask.id,
        taken.at_us,
        ask.expires_us,
        [field_of(one) for one in ask.limits if one.period == "in_flight"],
    )


def _only(unit: Unit, amount: int) -> Cost:
    """A cost of one unit and nothing else."""
    return Cost(**({"requests": 0} | {unit: amount}))


def _share_of(limit: Limit, remaining: int | None, gateways: int) -> Limit:
    if limit.period in ("day", "month"):
        remaining = limit.amount if remaining is None else remaining
        return msgspec.structs.replace(limit, amount=remaining // gateways)
    return msgspec.structs.replace(limit, amount=max(1, limit.amount // gateways))


def _usage_rows(tenant: str, day: str, told: Mapping[bytes, bytes]) -> list[UsageRow]:
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for name, amount in told.items():
        model, _, unit = name.decode().rpartition("|")
        counts[model][unit] = int(amount)
    return [UsageRow(tenant, day, model, **units) for model, units in sorted(counts.items())]
