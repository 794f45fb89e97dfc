"""One tenant's calls of `operate.lua` in Redis: reserves, settlements, and the lifetime of its keys there.

Everything that is ready travels as one call of one script, settlements first. While a call is on its way the
next one waits. Therefore a settlement never overtakes its own reserve, and a place that was given back before
a reserve was created is free when that reserve is decided.
Invariant: a settlement stays here until the store has confirmed it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import msgspec

from gateway.quotas.end_users import USERS_KEPT_DAYS
from gateway.quotas.ledger import LEASE_US, NOTHING, QuotaRequest
from gateway.quotas.limits import Cost, Limit, LimitStatus
from gateway.quotas.operations import (
    DAY_US,
    IndexOf,
    LimitState,
    Settlement,
    day_name,
    decode_statuses,
    keys_of,
    limit_argument,
    reserve_argument,
    user_limits_key,
)
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script

FAILURES_MAX = 3


class Availability:
    """Failure counter that decides between the shared store and the local share.

    is_down: True while the gateway does not use the store.
    """

    def __init__(self) -> None:
        self._failures = 0
        # An attribute, because each request reads it several times.
        self.is_down = False

    @property
    def is_failing(self) -> bool:
        """True after a failure, until the next success."""
        return self._failures > 0

    def record_failure(self) -> bool:
        """Count a failure and return True if this one took the store down."""
        self._failures += 1
        self.is_down = self._failures >= FAILURES_MAX
        return self._failures == FAILURES_MAX

    def record_success(self) -> bool:
        """Reset the count and return True if the store was down."""
        was_down = self.is_down
        self._failures = 0
        self.is_down = False
        return was_down


OPERATE = load_script("meters", "operate")
# A call with this many of each occupies the store for about a millisecond.
RESERVES_MAX = 64
SETTLES_MAX = 64
# Settlements beyond this are dropped; their reservations count as spent when they expire.
UNSETTLED_MAX = 10_000
# Longer than the longest period: the state of an unused limit is deleted.
STATE_TTL_S = 40 * 24 * 3600
DAY_S = 24 * 3600
USAGE_TTL_S = 400 * DAY_S
# How long a settlement that frees no awaited place may wait for company. Meanwhile other gateways see less of
# a limit, never more.
SETTLE_WITHIN_S = 0.02

ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder()

# Called after each script call with the tenant, the states of its limits, and the error if it failed.
OnResult = Callable[[str, Sequence[tuple[Limit, LimitState]], StoreUnavailable | None], None]


class PendingReserve(msgspec.Struct, eq=False):
    """A reserve and its waiting request. was_sent: the store may have received it."""

    request: QuotaRequest
    reply: asyncio.Future[Any]
    was_sent: bool = False

    def pack(self, limit_index: IndexOf[Limit]) -> tuple[Any, ...]:
        """Return the argument of the script, which is sent now."""
        self.was_sent = True
        return reserve_argument(self.request, limit_index)


class ReserveReply(msgspec.Struct, frozen=True):
    """The store's reply to a reserve. blocking: index of the limit without room, from one; or zero."""

    ok: bool
    blocking: int
    wait_us: int
    limit_statuses: tuple[LimitStatus, ...]
    at_us: int


class SentBatch(msgspec.Struct, frozen=True):
    """Content of the script call that is on its way."""

    limits: Sequence[Limit] = ()
    settlements: Sequence[Settlement] = ()
    reserves: Sequence[PendingReserve] = ()


class Account:
    """Queue of one tenant's reserves and settlements. now_us: a test's clock."""

    script = OPERATE

    def __init__(
        self,
        tenant: str,
        client: RedisClient,
        availability: Availability,
        on_result: OnResult,
        now_us: Callable[[], int] | None = None,
    ) -> None:
        self._tenant = tenant
        self._client = client
        self._availability = availability
        self._on_result = on_result
        self._now_us = now_us
        self._reserves: list[PendingReserve] = []
        self._settlements: dict[str, Settlement] = {}
        self._is_enqueued = False
        self._sent: SentBatch | None = None
        self._has_more = False
        # True once a request had an end user.
        self._has_end_users = False
        # How far the store's clock is ahead of this gateway's.
        self._clock_offset_us = 0
        # Completed by the next reply, with its error or None.
        self._next_reply: asyncio.Future[StoreUnavailable | None] | None = None

    @property
    def is_settling(self) -> bool:
        """True while the store's last state may lack a settlement."""
        return bool(self._settlements)

    @property
    def is_reserving(self) -> bool:
        """True while a reserve waits for the store."""
        return bool(self._reserves) or (self._sent is not None and bool(self._sent.reserves))

    async def reserve(self, request: QuotaRequest) -> ReserveReply:
        """Reserve a cost in the store.

        Raises: StoreUnavailable; a reserve that the store may have received is then refunded.
        """
        self._has_end_users |= request.end_user is not None
        pending = PendingReserve(request, asyncio.get_running_loop().create_future())
        self._reserves.append(pending)
        self.enqueue()
        try:
            reply, at_us = await pending.reply
        except (StoreUnavailable, asyncio.CancelledError):
            self._withdraw(pending)
            raise
        ok, blocking, wait_us, *states = reply
        return ReserveReply(ok, blocking, wait_us, decode_statuses(request.limits, states), at_us)

    def settle(self, request: QuotaRequest, actual: Cost, *, urgent: bool, day: str | None = None) -> None:
        """Queue the actual cost of a reservation.

        urgent: a request may be waiting for its place. day: YYYY-MM-DD, today if None.
        """
        self._add_settlement(request, actual, mark_us=0, day=day)
        if self._availability.is_down:
            return
        if urgent:
            self.enqueue()
        else:
            self._client.enqueue_within(self, SETTLE_WITHIN_S)

    def today(self) -> str:
        """Return the day (YYYY-MM-DD, UTC) by the store's clock, as of its last reply."""
        return day_name((self._clock_us() + self._clock_offset_us) // DAY_US)

    async def flush(self) -> None:
        """Wait until the store has every settlement queued so far. Raises: StoreUnavailable."""
        last = next(reversed(self._settlements.values()), None)
        while last is not None and self._settlements.get(last.request.id) is last:
            self.enqueue()
            self._next_reply = self._next_reply or asyncio.get_running_loop().create_future()
            error = await asyncio.shield(self._next_reply)
            if error is not None:
                raise error

    def enqueue(self) -> None:
        """Join the next batch, or the one after the call on its way, if there is anything to send."""
        if self._sent is not None:
            self._has_more = True
        elif not self._is_enqueued and (self._reserves or self._settlements):
            self._is_enqueued = True
            self._client.enqueue(self)

    def pack(self) -> tuple[list[str], bytes]:
        """Return the keys and the argument of the call that is sent now."""
        settlements = list(islice(self._settlements.values(), SETTLES_MAX))
        reserves, self._reserves = self._reserves[:RESERVES_MAX], self._reserves[RESERVES_MAX:]
        keys = keys_of(self._tenant)
        limits, usage_keys = IndexOf[Limit](1), IndexOf[str](len(keys) + 1)
        argument: dict[str, Any] = {
            "now": self._now_us() if self._now_us else 0,
            "lease": LEASE_US,
            "ttl": STATE_TTL_S,
            "usage_ttl": USAGE_TTL_S,
            "settles": [settlement.pack(limits, usage_keys) for settlement in settlements],
            "reserves": [pending.pack(limits) for pending in reserves],
            "limits": [limit_argument(limit) for limit in limits],
        }
        if self._has_end_users:
            requests = [each.request for each in settlements] + [each.request for each in reserves]
            argument["users_ttl"] = USERS_KEPT_DAYS * DAY_S
            if places := _places_of(requests):
                argument |= {"user_limits": usage_keys[user_limits_key(self._tenant)], "places": places}
        self._is_enqueued, self._sent = False, SentBatch(tuple(limits), settlements, reserves)
        self._has_more = bool(self._reserves) or len(settlements) == SETTLES_MAX
        return [*keys, *usage_keys], ENCODER.encode(argument)

    def on_reply(self, reply: bytes | StoreUnavailable) -> None:
        """Distribute the store's reply to the call that was on its way."""
        sent, self._sent, self._is_enqueued = self._sent or SentBatch(), None, False
        next_reply, self._next_reply = self._next_reply, None
        if isinstance(reply, StoreUnavailable):
            self._on_failure(sent, reply)
        else:
            self._on_success(sent, reply)
        if next_reply is not None:
            next_reply.set_result(reply if isinstance(reply, StoreUnavailable) else None)

    def _on_success(self, sent: SentBatch, reply: bytes) -> None:
        now_us, states, replies = DECODER.decode(reply)
        self._clock_offset_us = now_us - self._clock_us()
        for settlement in sent.settlements:
            del self._settlements[settlement.request.id]
        self._on_result(self._tenant, tuple(zip(sent.limits, states, strict=True)), None)
        for pending, reserve_reply in zip(sent.reserves, replies, strict=True):
            if not pending.reply.done():
                pending.reply.set_result((reserve_reply, now_us))
        if self._has_more:
            self.enqueue()

    def _on_failure(self, sent: SentBatch, error: StoreUnavailable) -> None:
        """Fail all reserves, also those that waited for this call; settlements stay for the next one."""
        reserves, self._reserves = [*sent.reserves, *self._reserves], []
        self._on_result(self._tenant, (), error)
        for pending in reserves:
            if not pending.reply.done():
                pending.reply.set_exception(error)

    def _withdraw(self, pending: PendingReserve) -> None:
        """Refund a reserve that was sent, or remove it; the store may receive a sent one after its refund."""
        if pending.was_sent:
            self._add_settlement(pending.request, NOTHING, mark_us=pending.request.expires_us)
        elif pending in self._reserves:
            self._reserves.remove(pending)

    def _add_settlement(
        self, request: QuotaRequest, actual: Cost, mark_us: int, day: str | None = None
    ) -> None:
        # The first settlement counts: a refunded reservation is not charged afterwards.
        if len(self._settlements) < UNSETTLED_MAX and request.id not in self._settlements:
            self._settlements[request.id] = Settlement(request, actual, day or self.today(), mark_us)

    def _clock_us(self) -> int:
        """Return this gateway's clock."""
        return self._now_us() if self._now_us else time.time_ns() // 1000


def _places_of(requests: Sequence[QuotaRequest]) -> int:
    """Return the number of limits of end users that are counted one by one; 0 if the requests have none."""
    return max(
        (
            request.end_user.most * sum(limit.is_end_users for limit in request.limits)
            for request in requests
            if request.end_user is not None
        ),
        default=0,
    )
