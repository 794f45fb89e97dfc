"""What one tenant asks of the shared store: reserves that a caller waits for, settlements that nobody does.

All that is ready travels as one run of one script, settlements first. While a run is on its way the next
one waits for it: so a settlement can never overtake its own reserve, and a slot that was given back before
a reserve was asked for is free when that is decided.
Invariant: what was handed over to be settled stays here until the store has answered.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Generic, TypeVar

import msgspec

from gateway.quotas.availability import Availability
from gateway.quotas.ledger import LEASE_US, NOTHING, UNITS, QuotaRequest, day_of
from gateway.quotas.limits import SECOND_US, WINDOWS_US, Cost, Limit, LimitStatus, Unit
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script

OPERATE = load_script("meters", "operate")
# A run of so many of each holds the store for about a millisecond.
RESERVES_MAX = 64
SETTLES_MAX = 64
# Settlements beyond this are dropped; their reservations count as spent at their end.
UNSETTLED_MAX = 10_000
# Longer than the longest period: what nobody asks about is forgotten.
STATE_TTL_S = 40 * 24 * 3600
USAGE_TTL_S = 400 * 24 * 3600
# How long what nobody waits for waits for company; other gateways see less of a limit meanwhile, never more.
SETTLE_WITHIN_S = 0.02
DAY_US = 24 * 3600 * SECOND_US
# A cost in time beyond this, 142 years, is written as this: it is a whole number in the scripts then.
COST_MAX_US = 2**52

ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder()
Key = TypeVar("Key")

# What the store tells of a limit: what is used, when it is back, and a rate's rest.
LimitState = Sequence[int]


class Settlement(msgspec.Struct, frozen=True):
    """What a reservation did cost. day: whose usage it is. mark_us: what to leave where nothing is open."""

    ask: QuotaRequest
    actual: Cost
    day: str
    mark_us: int


class PendingReserve(msgspec.Struct, eq=False):
    """A reserve and who waits for it. departed: the store may have heard of it."""

    ask: QuotaRequest
    answer: asyncio.Future[Any]
    departed: bool = False


class ReserveReply(msgspec.Struct, frozen=True):
    """What the store said to a reserve. blocking: the place of the limit without room, from one; or zero."""

    ok: bool
    blocking: int
    wait_us: int
    limit_statuses: tuple[LimitStatus, ...]
    at_us: int


class SentBatch(msgspec.Struct, frozen=True):
    """What one run carries."""

    limits: Sequence[Limit]
    settlements: Sequence[Settlement]
    wishes: Sequence[PendingReserve]


class Account:
    """One tenant. heard: told after each run where limits stand, or why it failed. now_us: a test's clock."""

    script = OPERATE

    def __init__(
        self,
        tenant: str,
        door: RedisClient,
        availability: Availability,
        heard: Callable[[str, Sequence[tuple[Limit, LimitState]], StoreUnavailable | None], None],
        now_us: Callable[[], int] | None = None,
    ) -> None:
        self._tenant = tenant
        self._door = door
        self._availability = availability
        self._heard = heard
        self._now_us = now_us
        self._wishes: list[PendingReserve] = []
        self._settlements: dict[str, Settlement] = {}
        self._boarded = False
        self._flight: SentBatch | None = None
        self._next_waits = False
        # How far the store's clock is ahead of this gateway's.
        self._ahead_us = 0
        self._landing: asyncio.Future[StoreUnavailable | None] | None = None

    async def reserve(self, ask: QuotaRequest) -> ReserveReply:
        """Raises: StoreUnavailable; what the store may have heard of it is closed at nothing then."""
        wish = PendingReserve(ask, asyncio.get_running_loop().create_future())
        self._wishes.append(wish)
        self.enqueue()
        try:
            reply, at_us = await wish.answer
        except (StoreUnavailable, asyncio.CancelledError):
            self._take_back(wish)
            raise
        ok, blocking, wait_us, *told = reply
        return ReserveReply(ok, blocking, wait_us, limit_statuses(ask.limits, told), at_us)

    def settle(self, ask: QuotaRequest, actual: Cost, *, urgent: bool, day: str | None = None) -> None:
        """Hand over what a reservation cost. urgent: somebody may wait for its slot. day: None is today."""
        self._hand_over(ask, actual, mark_us=0, day=day)
        if self._availability.away:
            return
        if urgent:
            self.enqueue()
        else:
            self._door.enqueue_within(self, SETTLE_WITHIN_S)

    def today(self) -> str:
        """The day (YYYY-MM-DD, UTC) by the store's clock, as far as it was told."""
        return _day((self._clock_us() + self._ahead_us) // DAY_US)

    async def flush(self) -> None:
        """Wait until all that was handed over so far has been told. Raises: StoreUnavailable."""
        last = next(reversed(self._settlements.values()), None)
        while last is not None and self._settlements.get(last.ask.id) is last:
            self.enqueue()
            self._landing = self._landing or asyncio.get_running_loop().create_future()
            error = await asyncio.shield(self._landing)
            if error is not None:
                raise error

    def enqueue(self) -> None:
        """Travel with the turn's trip, or after the run that is on its way, if there is anything to tell."""
        if self._flight is not None:
            self._next_waits = True
        elif not self._boarded and (self._wishes or self._settlements):
            self._boarded = True
            self._door.enqueue(self)

    def pack(self) -> tuple[list[str], bytes]:
        """The keys and the argument of the run that departs now."""
        settlements = list(islice(self._settlements.values(), SETTLES_MAX))
        wishes, self._wishes = self._wishes[:RESERVES_MAX], self._wishes[RESERVES_MAX:]
        for wish in wishes:
            wish.departed = True
        places, days = IndexOf[Limit](1), IndexOf[str](len(keys_of(self._tenant)) + 1)
        argument = {
            "now": self._now_us() if self._now_us else 0,
            "lease": LEASE_US,
            "ttl": STATE_TTL_S,
            "usage_ttl": USAGE_TTL_S,
            "settles": [_settle_asked(one, places, days) for one in settlements],
            "reserves": [_reserve_asked(one.ask, places) for one in wishes],
            "limits": [_described(limit) for limit in places],
        }
        self._boarded, self._flight = False, SentBatch(tuple(places), settlements, wishes)
        self._next_waits = bool(self._wishes) or len(settlements) == SETTLES_MAX
        return keys_of(self._tenant) + [usage_key(self._tenant, day) for day in days], ENCODER.encode(
            argument
        )

    def on_reply(self, reply: bytes | StoreUnavailable) -> None:
        """Hand out what the store said to the run that is back."""
        flight, self._flight, self._boarded = self._flight or SentBatch((), (), ()), None, False
        landing, self._landing = self._landing, None
        if isinstance(reply, StoreUnavailable):
            self._failed(flight, reply)
        else:
            self._succeeded(flight, reply)
        if landing is not None:
            landing.set_result(reply if isinstance(reply, StoreUnavailable) else None)

    def _succeeded(self, flight: SentBatch, reply: bytes) -> None:
        now_us, told, answers = DECODER.decode(reply)
        self._ahead_us = now_us - self._clock_us()
        for one in flight.settlements:
            del self._settlements[one.ask.id]
        self._heard(self._tenant, tuple(zip(flight.limits, told, strict=True)), None)
        for wish, answer in zip(flight.wishes, answers, strict=True):
            if not wish.answer.done():
                wish.answer.set_result((answer, now_us))
        if self._next_waits:
            self.enqueue()

    def _failed(self, flight: SentBatch, error: StoreUnavailable) -> None:
        """Who waited behind it hears the same; settlements stay for the next run."""
        wishes, self._wishes = [*flight.wishes, *self._wishes], []
        self._heard(self._tenant, (), error)
        for wish in wishes:
            if not wish.answer.done():
                wish.answer.set_exception(error)

    def _take_back(self, wish: PendingReserve) -> None:
        """Nobody waits for it any more. What has departed may be heard late, or even after this."""
        if wish.departed:
            self._hand_over(wish.ask, NOTHING, mark_us=wish.ask.expires_us)
        elif wish in self._wishes:
            self._wishes.remove(wish)

    def _hand_over(self, ask: QuotaRequest, actual: Cost, mark_us: int, day: str | None = None) -> None:
        # The first word counts: what was refunded is not charged after.
        if len(self._settlements) < UNSETTLED_MAX and ask.id not in self._settlements:
            self._settlements[ask.id] = Settlement(ask, actual, day or self.today(), mark_us)

    def _clock_us(self) -> int:
        """Of this gateway."""
        return self._now_us() if self._now_us else time.time_ns() // 1000


class IndexOf(dict[Key, int], Generic[Key]):
    """Gives each key a number, in the order in which they are first asked for."""

    def __init__(self, first: int) -> None:
        self._first = first

    def __missing__(self, key: Key) -> int:
        self[key] = place = self._first + len(self)
        return place


def keys_of(tenant: str) -> list[str]:
    """The tenant's limits, its open reservations, and when those end."""
    return [f"gw:{{{tenant}}}:limits", f"gw:{{{tenant}}}:open", f"gw:{{{tenant}}}:ends"]


def usage_key(tenant: str, day: str) -> str:
    """What the tenant used on a day."""
    return f"gw:{{{tenant}}}:usage:{day}"


def field_of(limit: Limit) -> str:
    """A limit's place in the hash; a limit that is changed starts anew."""
    return f"{limit.name}={limit.amount}"


def limit_statuses(limits: Sequence[Limit], told: Sequence[LimitState]) -> tuple[LimitStatus, ...]:
    """What the store told, in the limits' own units."""
    return tuple([_standing(limit, *one) for limit, one in zip(limits, told, strict=True)])


def _standing(limit: Limit, used: int, reset_us: int, rest: int = 0) -> LimitStatus:
    """used: for a rate the debt in whole microseconds, and rest its fraction, in parts of the amount."""
    window_us = WINDOWS_US.get(limit.period)
    if window_us is None:
        return LimitStatus(limit, max(0, limit.amount - used), reset_us)
    debt = used * limit.amount + rest
    remaining = max(0, window_us * limit.amount - debt) // window_us
    return LimitStatus(limit, remaining, -(-debt // limit.amount))


def _reserve_asked(ask: QuotaRequest, places: IndexOf[Limit]) -> tuple[Any, ...]:
    amounts: list[int] = []
    for limit in ask.limits:
        amounts += (places[limit], *_parts(limit, ask.cost.of(limit.unit)))
    return ask.id, ask.expires_us, ask.shadow, amounts


def _settle_asked(settlement: Settlement, places: IndexOf[Limit], days: IndexOf[str]) -> tuple[Any, ...]:
    ask, actual = settlement.ask, settlement.actual
    amounts: list[int] = []
    for limit in ask.limits:
        reserved, used_up = _parts(limit, ask.cost.of(limit.unit)), _parts(limit, actual.of(limit.unit))
        amounts += (places[limit], *reserved, *used_up)
    used: list[str | int] = []
    for unit, name in _usage_names(ask.model):
        if amount := actual.of(unit):
            used += (name, amount)
    return ask.id, settlement.mark_us, days[settlement.day], amounts, used


@lru_cache(maxsize=8192)
def _parts(limit: Limit, amount: int) -> tuple[int, int, int]:
    """A cost in the limit's unit, and in a rate's time: whole microseconds and the rest."""
    window_us = WINDOWS_US.get(limit.period)
    if window_us is None:
        return amount, 0, 0
    whole, rest = divmod(amount * window_us, limit.amount)
    return amount, min(whole, COST_MAX_US), rest


@lru_cache(maxsize=4096)
def _described(limit: Limit) -> msgspec.Raw:
    """A limit as operate.lua reads it."""
    told: dict[str, Any] = {"f": field_of(limit), "a": limit.amount, "k": "flight"}
    if limit.period in WINDOWS_US:
        told |= {"k": "rate", "w": WINDOWS_US[limit.period]}
    elif limit.period != "in_flight":
        told |= {"k": "calendar", "p": limit.period}
    return msgspec.Raw(ENCODER.encode(told))


@lru_cache(maxsize=4096)
def _usage_names(model: str) -> tuple[tuple[Unit, str], ...]:
    """Where a model's use of each unit is counted."""
    return tuple((unit, f"{model}|{unit}") for unit in UNITS)


@lru_cache(maxsize=4)
def _day(day_number: int) -> str:
    return day_of(day_number * DAY_US)
