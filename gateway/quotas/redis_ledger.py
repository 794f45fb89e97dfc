"""Quotas of all gateways together, in Redis: the same answers as the ledger in memory, on Redis' clock.

All keys of a tenant are under one hash tag, so that its scripts run on one node of a cluster.
"""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Literal

import msgspec

from gateway.errors import QuotaUnavailable
from gateway.events import Observe, StoreChanged
from gateway.quotas.account import Account, Told, field_of, keys_of, standings, usage_key
from gateway.quotas.availability import Availability
from gateway.quotas.ledger import (
    LEASE_US,
    NOTHING,
    Ask,
    MemoryLedger,
    Reservation,
    check_reachable,
    corrected,
    refusal,
)
from gateway.quotas.limits import SECOND_US, WINDOWS_US, Cost, Limit, Standing
from gateway.quotas.redis_door import RedisDoor, StoreAway, script
from gateway.quotas.usage import UsageRow

WhenUnavailable = Literal["local", "refuse", "allow"]

RENEW = script("meters", "renew")
HEARTBEAT_S = 1.0
RENEW_EVERY_S = 5.0
# Gateways heard of within this many seconds share what is left when the store is away.
ALIVE_S = 10.0
# How long the end of a process may wait for what has not been told yet.
FLUSH_S = 2.0


class Rules(msgspec.Struct, frozen=True):
    """What `quotas` in router.yaml says. gateways: how many share, where the store never told."""

    when_unavailable: WhenUnavailable = "local"
    gateways: int = 1


class RedisLedger:
    """now_us: 0 is Redis' own clock; a test brings its own."""

    def __init__(
        self,
        door: RedisDoor,
        rules: Rules,
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
        self._open: dict[str, Ask] = {}
        self._owing: list[Ask] = []
        self._missed_trip = 0

    @property
    def away(self) -> bool:
        """Whether the store has been given up for now."""
        return self._availability.away

    async def reserve(self, ask: Ask) -> Reservation:
        """Raises: QuotaExceeded, RequestExceedsLimit, QuotaUnavailable."""
        if not ask.shadow:
            check_reachable(ask)
        if self._availability.away:
            return await self._reserve_without(ask)
        try:
            answer = await self._account(ask.tenant).reserve(ask)
        except StoreAway:
            return await self._reserve_without(ask)
        over = ask.limits[answer.blocking - 1] if answer.blocking else None
        if not answer.ok:
            assert over is not None
            raise refusal(over, answer.wait_us, answer.standings)
        if any(limit.period == "in_flight" for limit in ask.limits):
            self._open[ask.id] = ask
        return Reservation(ask, answer.standings, over=over, at_us=answer.at_us)

    def settle(self, reservation: Reservation, actual: Cost) -> tuple[Standing, ...]:
        """What cannot be told soon is told when the store is back, or counts as spent."""
        ask = reservation.ask
        holds_slot = self._open.pop(ask.id, None) is not None
        if reservation.degraded:
            return self._local.settle(reservation, actual)
        self._account(ask.tenant).settle(ask, actual, urgent=holds_slot)
        return corrected(reservation, actual)

    async def settled(self) -> None:
        """Raises: QuotaUnavailable."""
        try:
            await asyncio.gather(*(account.settled() for account in self._accounts.values()))
        except StoreAway as error:
            raise QuotaUnavailable("the quotas' store is away") from error

    async def usage(self, tenant: str, days: Sequence[str]) -> list[UsageRow]:
        """What this gateway has settled is told first. Raises: QuotaUnavailable."""
        rows: list[UsageRow] = []
        try:
            await self._account(tenant).settled()
            for day in sorted(days):
                told = await self._door.ask("HGETALL", usage_key(tenant, day))
                rows += _usage_rows(tenant, day, told)
        except StoreAway as error:
            raise QuotaUnavailable("the quotas' store is away") from error
        return rows

    async def keep(self) -> None:
        """Beat, count the other gateways, renew leases, and notice when the store is back."""
        renewed_s = time.monotonic()
        while True:
            try:
                await self._beat()
            except StoreAway as error:
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
        """What cannot be told within two seconds counts as spent."""
        with suppress(QuotaUnavailable, TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self.settled()
        await self._door.aclose()

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = Account(tenant, self._door, self._availability, self._heard, self._now_us)
            self._accounts[tenant] = account
        return account

    def _heard(self, tenant: str, told: Sequence[tuple[Limit, Told]], error: StoreAway | None) -> None:
        if error is not None:
            self._missed(error)
            return
        self._local.saw(tenant, told)
        if not self._availability.away:
            # Only the heartbeat ends an absence: a late answer to one call does not.
            self._availability.answered()

    async def _reserve_without(self, ask: Ask) -> Reservation:
        match self._rules.when_unavailable:
            case "refuse":
                raise QuotaUnavailable("the quotas' store is away", retry_after_s=1)
            case "allow":
                return Reservation(ask, (), degraded=True)
            case "local":
                return await self._local.reserve(ask, self._gateways)

    def _missed(self, error: StoreAway) -> None:
        """Count a miss, once for all who travelled together."""
        if error.trip and error.trip == self._missed_trip:
            return
        self._missed_trip = error.trip
        if self._availability.missed():
            self._observe(StoreChanged(away=True, reason=str(error)))
            self._local.begin()

    async def _catch_up(self) -> None:
        """Tell the store what it has missed; each thing is forgotten once it has been told."""
        for account in self._accounts.values():
            account.board()
        self._owing += self._local.owed()
        while self._owing:
            # Charged whether it fits or not: it has been used. The id makes a repetition the same.
            ask = self._owing[0]
            account = self._account(ask.tenant)
            try:
                await account.reserve(ask)
            except StoreAway:
                return
            account.settle(ask, ask.cost, urgent=False)
            self._owing.pop(0)

    async def _beat(self) -> None:
        now_s = time.time()
        await self._door.ask("ZADD", GATEWAYS_KEY, now_s, self._gateway_id)
        await self._door.ask("ZREMRANGEBYSCORE", GATEWAYS_KEY, "-inf", now_s - ALIVE_S)
        self._gateways = max(1, int(await self._door.ask("ZCARD", GATEWAYS_KEY)))
        # A server that takes commands and refuses scripts is of no use.
        nothing = {"now": 0, "ids": [], "expires": 0, "lease": 0, "names": []}
        await self._door.run(RENEW, keys_of("-"), msgspec.msgpack.encode(nothing))

    async def _renew(self) -> None:
        tenants: dict[str, list[Ask]] = defaultdict(list)
        for ask in self._open.values():
            tenants[ask.tenant].append(ask)
        for tenant, asks in tenants.items():
            names = {field_of(one) for ask in asks for one in ask.limits if one.period == "in_flight"}
            argument = {
                "now": self._now_us() if self._now_us else 0,
                "ids": [ask.id for ask in asks],
                "expires": max(ask.expires_us for ask in asks),
                "lease": LEASE_US,
                "names": sorted(names),
            }
            try:
                await self._door.run(RENEW, keys_of(tenant), msgspec.msgpack.encode(argument))
            except StoreAway as error:
                self._missed(error)
                return


class LocalShare:
    """One gateway's part of every limit while the store is away: 1/N, and rates refill without burst.

    What is used meanwhile is owed to the store. Overshoot is bounded by what each gateway last saw to
    remain of a day or month, ÷ N, and by amount ÷ N a window of the others.
    """

    def __init__(self) -> None:
        self._ledger = MemoryLedger()
        # What was last told of each limit, and when.
        self._seen: dict[str, dict[Limit, tuple[Told, int]]] = defaultdict(dict)
        self._shares: dict[tuple[str, Limit], Limit] = {}
        self._asked: dict[str, Ask] = {}
        self._owed: dict[tuple[str, tuple[Limit, ...], str], Cost] = {}
        self._numbers = count()

    def saw(self, tenant: str, told: Sequence[tuple[Limit, Told]]) -> None:
        """Note what the store told of a tenant's limits."""
        now_us = time.time_ns() // 1000
        seen = self._seen[tenant]
        for limit, one in told:
            seen[limit] = (one, now_us)

    def begin(self) -> None:
        """The store has just gone: nothing of an earlier absence counts any more."""
        self._ledger = MemoryLedger()
        self._shares.clear()

    async def reserve(self, ask: Ask, gateways: int) -> Reservation:
        """Raises: QuotaExceeded."""
        shares = tuple([await self._share(ask.tenant, limit, gateways) for limit in ask.limits])
        for share in shares:
            if ask.cost.of(share.unit) > share.amount and not ask.shadow:
                # It fits the whole limit, but not this part of it: later, when the store is back.
                raise refusal(share, SECOND_US, ())
        taken = await self._ledger.reserve(msgspec.structs.replace(ask, limits=shares))
        self._asked[ask.id] = ask
        return msgspec.structs.replace(taken, degraded=True)

    def settle(self, reservation: Reservation, actual: Cost) -> tuple[Standing, ...]:
        """Count what was used, here and as owed."""
        ask = self._asked.pop(reservation.ask.id, None)
        if ask is not None:
            key = (ask.tenant, ask.limits, ask.model)
            owed = self._owed.get(key, NOTHING)
            self._owed[key] = Cost(
                owed.requests + actual.requests, owed.tokens + actual.tokens, owed.inputs + actual.inputs
            )
        return self._ledger.settle(reservation, actual)

    def owed(self) -> list[Ask]:
        """What to charge now that the store is back, whether it fits or not: it has been used."""
        owed, self._owed = self._owed, {}
        return [
            Ask(f"owed-{secrets.token_hex(8)}", tenant, limits, cost, LEASE_US, model, shadow=True)
            for (tenant, limits, model), cost in owed.items()
        ]

    async def _share(self, tenant: str, limit: Limit, gateways: int) -> Limit:
        key = (tenant, limit)
        if key not in self._shares:
            self._shares[key] = share = _share_of(limit, self._remaining(tenant, limit), gateways)
            if limit.period in WINDOWS_US:
                # Its bucket starts empty: what is in the store's may be somebody else's by now.
                unit = {share.unit: share.amount}
                all_of_it = Cost(**({"requests": 0} | unit))
                start = Ask(f"start-{next(self._numbers)}", tenant, (share,), all_of_it, LEASE_US)
                self._ledger.settle(await self._ledger.reserve(start), all_of_it)
        return self._shares[key]

    def _remaining(self, tenant: str, limit: Limit) -> int | None:
        """What was left of a limit when it was last told, unless its period has ended since."""
        if limit not in self._seen[tenant]:
            return None
        told, at_us = self._seen[tenant][limit]
        [standing] = standings([limit], [told])
        return standing.remaining if time.time_ns() // 1000 < at_us + standing.reset_us else None


def _share_of(limit: Limit, remaining: int | None, gateways: int) -> Limit:
    if limit.period in ("day", "month"):
        remaining = limit.amount if remaining is None else remaining
        return msgspec.structs.replace(limit, amount=remaining // gateways)
    return msgspec.structs.replace(limit, amount=max(1, limit.amount // gateways))


GATEWAYS_KEY = "gw:gateways"


def _usage_rows(tenant: str, day: str, told: Mapping[bytes, bytes]) -> list[UsageRow]:
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for name, amount in told.items():
        model, _, unit = name.decode().rpartition("|")
        counts[model][unit] = int(amount)
    return [UsageRow(tenant, day, model, **units) for model, units in sorted(counts.items())]
