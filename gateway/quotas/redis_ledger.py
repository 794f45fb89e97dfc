"""Quotas of all gateways together, in Redis: the same answers as the ledger in memory, on Redis' clock.

All keys of a tenant are under one hash tag, so that its scripts run on one node of a cluster.
"""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Literal

import msgspec

from gateway.errors import QuotaUnavailable
from gateway.events import Observe, StoreChanged
from gateway.quotas.availability import Availability
from gateway.quotas.ledger import (
    LEASE_US,
    NOTHING,
    UNITS,
    Ask,
    MemoryLedger,
    Reservation,
    check_reachable,
    day_of,
    refusal,
)
from gateway.quotas.limits import (
    SECOND_US,
    WINDOWS_US,
    Cost,
    Limit,
    Standing,
    period_end_us,
    period_start_us,
)
from gateway.quotas.redis_door import RedisDoor, Script, StoreAway, script
from gateway.quotas.usage import UsageRow

WhenUnavailable = Literal["local", "refuse", "allow"]

RESERVE, SETTLE, RENEW = script("meters", "reserve"), script("meters", "settle"), script("meters", "renew")
# Longer than the longest period: what nobody asks about is forgotten.
STATE_TTL_S = 40 * 24 * 3600
USAGE_TTL_S = 400 * 24 * 3600
HEARTBEAT_S = 1.0
RENEW_EVERY_S = 5.0
# Gateways heard of within this many seconds share what is left when the store is away.
ALIVE_S = 10.0
UNSETTLED_MAX = 10_000


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
        self._open: dict[str, Ask] = {}
        self._unsettled: dict[str, tuple[Ask, Cost]] = {}
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
            reply = await self._run(RESERVE, _keys(ask.tenant), self._asked(ask, ask.cost))
        except StoreAway as error:
            self._missed(error)
            # The script may still run when the store wakes: it is closed then, at nothing.
            self._settle_later(Reservation(ask, ()), NOTHING)
            return await self._reserve_without(ask)
        except asyncio.CancelledError:
            # The caller has gone while its reserve is on the way.
            self._settle_later(Reservation(ask, ()), NOTHING)
            raise
        standings = _standings(ask.limits, reply["s"])
        self._local.saw(ask.tenant, standings)
        over = ask.limits[reply["i"] - 1] if reply.get("w") else None
        if not reply["ok"]:
            assert over is not None
            raise refusal(over, reply["w"], standings)
        if any(limit.period == "in_flight" for limit in ask.limits):
            self._open[ask.id] = ask
        return Reservation(ask, standings, over=over, at_us=reply.get("at", 0))

    async def settle(self, reservation: Reservation, actual: Cost) -> tuple[Standing, ...]:
        """Never raises; what cannot be told now is told when the store is back, or counts as spent."""
        ask = reservation.ask
        self._open.pop(ask.id, None)
        if reservation.degraded:
            return await self._local.settle(reservation, actual)
        # Shielded, because the call that it closes may be cancelled, and must be closed all the same.
        return await asyncio.shield(self._settle_or_later(reservation, actual))

    async def _settle_or_later(self, reservation: Reservation, actual: Cost) -> tuple[Standing, ...]:
        if not self._availability.away and reservation.ask.id not in self._unsettled:
            try:
                return await self._settle(reservation.ask, actual)
            except StoreAway as error:
                self._missed(error)
        self._settle_later(reservation, actual)
        return reservation.standings

    def _settle_later(self, reservation: Reservation, actual: Cost) -> None:
        # The first word counts: what was refunded is not charged after.
        if len(self._unsettled) < UNSETTLED_MAX:
            self._unsettled.setdefault(reservation.ask.id, (reservation.ask, actual))

    async def usage(self, tenant: str, days: Sequence[str]) -> list[UsageRow]:
        """Raises: QuotaUnavailable."""
        rows: list[UsageRow] = []
        try:
            for day in sorted(days):
                told = await self._door.ask("HGETALL", _usage_key(tenant, day))
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
        """Close the connections."""
        await self._door.aclose()

    async def _run(self, program: Script, keys: Sequence[str], argument: dict[str, Any]) -> dict[str, Any]:
        packed = await self._door.run(program, keys, msgspec.msgpack.encode(argument))
        reply: dict[str, Any] = msgspec.msgpack.decode(packed)
        if not self._availability.away:
            # Only the heartbeat ends an absence: a late answer to one call does not.
            self._availability.answered()
        return reply

    def _asked(self, ask: Ask, cost: Cost) -> dict[str, Any]:
        now_us = self._now_us() if self._now_us else time.time_ns() // 1000
        return {
            "now": now_us if self._now_us else 0,
            "id": ask.id,
            "expires": ask.expires_us,
            "lease": LEASE_US,
            "shadow": ask.shadow,
            "ttl": STATE_TTL_S,
            "limits": [_limit_asked(limit, cost.of(limit.unit), now_us) for limit in ask.limits],
        }

    async def _settle(self, ask: Ask, actual: Cost) -> tuple[Standing, ...]:
        argument = self._asked(ask, actual)
        # The day of this gateway's clock: at midnight it may be a moment off from Redis'.
        day = day_of(self._now_us() if self._now_us else time.time_ns() // 1000)
        argument["usage"] = {f"{ask.model}|{unit}": actual.of(unit) for unit in UNITS if actual.of(unit)}
        argument["usage_ttl"] = USAGE_TTL_S
        keys = [*_keys(ask.tenant), _usage_key(ask.tenant, day)]
        reply = await self._run(SETTLE, keys, argument)
        standings = _standings(ask.limits, reply["s"])
        self._local.saw(ask.tenant, standings)
        return standings

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
        self._owing += self._local.owed()
        try:
            for id_, (ask, actual) in list(self._unsettled.items()):
                await self._settle(ask, actual)
                del self._unsettled[id_]
            while self._owing:
                # Charged whether it fits or not: it has been used. The id makes a repetition the same.
                ask = self._owing[0]
                await self._run(RESERVE, _keys(ask.tenant), self._asked(ask, ask.cost))
                await self._settle(ask, ask.cost)
                self._owing.pop(0)
        except StoreAway as error:
            self._missed(error)

    async def _beat(self) -> None:
        now_s = time.time()
        await self._door.ask("ZADD", GATEWAYS_KEY, now_s, self._gateway_id)
        await self._door.ask("ZREMRANGEBYSCORE", GATEWAYS_KEY, "-inf", now_s - ALIVE_S)
        self._gateways = max(1, int(await self._door.ask("ZCARD", GATEWAYS_KEY)))
        # A server that takes commands and refuses scripts is of no use.
        nothing = {"now": 0, "ids": [], "expires": 0, "lease": 0, "names": []}
        await self._door.run(RENEW, _keys("-"), msgspec.msgpack.encode(nothing))

    async def _renew(self) -> None:
        tenants: dict[str, list[Ask]] = defaultdict(list)
        for ask in self._open.values():
            tenants[ask.tenant].append(ask)
        for tenant, asks in tenants.items():
            names = {_field(one) for ask in asks for one in ask.limits if one.period == "in_flight"}
            argument = {
                "now": self._now_us() if self._now_us else 0,
                "ids": [ask.id for ask in asks],
                "expires": max(ask.expires_us for ask in asks),
                "lease": LEASE_US,
                "names": sorted(names),
            }
            try:
                await self._door.run(RENEW, _keys(tenant), msgspec.msgpack.encode(argument))
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
        # What was last told of each limit, and until when that can be so.
        self._seen: dict[tuple[str, Limit], tuple[Standing, int]] = {}
        self._shares: dict[tuple[str, Limit], Limit] = {}
        self._asked: dict[str, Ask] = {}
        self._owed: dict[tuple[str, tuple[Limit, ...], str], Cost] = {}
        self._numbers = count()

    def saw(self, tenant: str, standings: Sequence[Standing]) -> None:
        """Note what the store told of a tenant's limits."""
        now_us = time.time_ns() // 1000
        for one in standings:
            self._seen[tenant, one.limit] = (one, now_us + one.reset_us)

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

    async def settle(self, reservation: Reservation, actual: Cost) -> tuple[Standing, ...]:
        """Count what was used, here and as owed."""
        ask = self._asked.pop(reservation.ask.id, None)
        if ask is not None:
            key = (ask.tenant, ask.limits, ask.model)
            owed = self._owed.get(key, NOTHING)
            self._owed[key] = Cost(
                owed.requests + actual.requests, owed.tokens + actual.tokens, owed.inputs + actual.inputs
            )
        return await self._ledger.settle(reservation, actual)

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
            self._shares[key] = share = _share_of(limit, self._remaining(key), gateways)
            if limit.period in WINDOWS_US:
                # Its bucket starts empty: what is in the store's may be somebody else's by now.
                unit = {share.unit: share.amount}
                all_of_it = Cost(**({"requests": 0} | unit))
                start = Ask(f"start-{next(self._numbers)}", tenant, (share,), all_of_it, LEASE_US)
                await self._ledger.settle(await self._ledger.reserve(start), all_of_it)
        return self._shares[key]

    def _remaining(self, key: tuple[str, Limit]) -> int | None:
        """What was left of a limit when it was last told, unless its period has ended since."""
        standing, ends_us = self._seen.get(key, (None, 0))
        return standing.remaining if standing and time.time_ns() // 1000 < ends_us else None


def _share_of(limit: Limit, remaining: int | None, gateways: int) -> Limit:
    if limit.period in ("day", "month"):
        remaining = limit.amount if remaining is None else remaining
        return msgspec.structs.replace(limit, amount=remaining // gateways)
    return msgspec.structs.replace(limit, amount=max(1, limit.amount // gateways))


GATEWAYS_KEY = "gw:gateways"


def _keys(tenant: str) -> list[str]:
    """The tenant's limits, its open reservations, and when those end."""
    return [f"gw:{{{tenant}}}:limits", f"gw:{{{tenant}}}:open", f"gw:{{{tenant}}}:ends"]


def _usage_key(tenant: str, day: str) -> str:
    return f"gw:{{{tenant}}}:usage:{day}"


def _field(limit: Limit) -> str:
    """A limit's place in the hash; a limit that is changed starts anew."""
    return f"{limit.name}={limit.amount}"


def _limit_asked(limit: Limit, cost: int, now_us: int) -> dict[str, Any]:
    """A limit as the scripts read it: f field, k kind, a amount, c cost; w window and b boundaries."""
    asked: dict[str, Any] = {"f": _field(limit), "a": limit.amount, "c": cost}
    if limit.period in WINDOWS_US:
        window_us = WINDOWS_US[limit.period]
        whole, rest = divmod(cost * window_us, limit.amount)
        return asked | {"k": "rate", "w": window_us, "q": whole, "r": rest}
    if limit.period == "in_flight":
        return asked | {"k": "flight"}
    start_us = period_start_us(limit.period, now_us)
    end_us = period_end_us(limit.period, now_us)
    # Redis' clock may be in the next period already, or still in the last.
    before_us = period_start_us(limit.period, start_us - SECOND_US)
    return asked | {
        "k": "calendar",
        "b": [before_us, start_us, end_us, period_end_us(limit.period, end_us)],
    }


def _standings(limits: Sequence[Limit], told: Sequence[Sequence[int]]) -> tuple[Standing, ...]:
    return tuple(_standing(limit, *one) for limit, one in zip(limits, told, strict=True))


def _standing(limit: Limit, used: int, reset_us: int, rest: int = 0) -> Standing:
    """used: for a rate the debt in whole microseconds, and rest its fraction, in parts of the amount."""
    if limit.period not in WINDOWS_US:
        return Standing(limit, max(0, limit.amount - used), reset_us)
    window_us = WINDOWS_US[limit.period]
    debt, window = used * limit.amount + rest, window_us * limit.amount
    return Standing(limit, max(0, window - debt) // window_us, -(-debt // limit.amount))


def _usage_rows(tenant: str, day: str, told: Mapping[bytes, bytes]) -> list[UsageRow]:
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for name, amount in told.items():
        model, _, unit = name.decode().rpartition("|")
        counts[model][unit] = int(amount)
    return [UsageRow(tenant, day, model, **units) for model, units in sorted(counts.items())]
