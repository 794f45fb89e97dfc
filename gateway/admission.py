"""Stage `admit`: reserve the maximum cost of a call before anything is sent, settle afterwards."""

import asyncio
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Self

from gateway.calls import Deadline
from gateway.errors import DeadlineExceeded, GatewayError, ReplicaTimedOut, UpstreamFailed
from gateway.events import CopyPurpose, Decision, Observe, QuotaDecided
from gateway.prepare import TOKENS_MAX, PreparedWork
from gateway.quotas.end_users import EndUser
from gateway.quotas.ledger import LEASE_US, NOTHING, Ledger, QuotaRequest, Reservation
from gateway.quotas.limit_text import rate_limit_headers
from gateway.quotas.limits import SECOND_US, Cost, Limit, LimitStatus, Price, bounded_amount
from gateway.routing.routes import Route
from gateway.tenants.keyring import Tenant

logger = logging.getLogger("gateway")

# Calls of a tenant that upstreams fail and that cost nothing, within so many seconds. Further ones cost the
# request.
UNPAID_MAX = 10
UNPAID_WITHIN_S = 60.0
UNPAID_TENANTS_MAX = 1024
# Of the event loop, until a call that waits for nothing has been written to its replica.
TURNS_TO_DISPATCH = 3


class Grant:
    """Permission to send one call, and the count of its usage.

    A provisional grant is given before the ledger has answered, where every limit is known to have ample
    room: the reply may reach the caller only after `confirm`.

    An `async with` block under it keeps the reservation. On success, on a fault of the caller, or when the
    caller disconnects, the reservation is settled at the tokens that were computed and at those that replicas
    were still computing. So is a call of which a replica that works for others did not answer a part in time.
    A call that outlasts the model's deadline is settled at the tokens that were computed. On a fault of the
    gateway or of an upstream it is refunded in full, but for the request itself if many calls of the tenant
    failed that way within a minute.
    """

    def __init__(
        self,
        tenant: Tenant,
        prepared: PreparedWork,
        deadline: Deadline,
        reservation: "Reservation | asyncio.Task[Reservation]",
        ledger: Ledger,
        unpaid: "UnpaidFailures | None" = None,
        copy: CopyPurpose | None = None,
    ) -> None:
        self.tenant = tenant
        self.prepared = prepared
        self.deadline = deadline
        self.limit_statuses: tuple[LimitStatus, ...] = ()
        self.degraded = False
        self.copy = copy
        self._tokens = 0
        self._unanswered_tokens = 0
        self._uncharged_inputs = 0
        self._has_outlasted = False
        self._unpaid = unpaid
        self._ledger = ledger
        # None while the grant is provisional.
        self._reservation: Reservation | None = None
        # None once the ledger's answer is known.
        self._pending: asyncio.Task[Reservation] | None = None
        if isinstance(reservation, Reservation):
            self._take(reservation)
        else:
            self._pending = reservation

    async def confirm(self) -> bool:
        """Wait for the ledger's answer to a provisional grant; return False if it was known.

        Raises: QuotaExceeded, QuotaUnavailable; nothing is then reserved.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        try:
            # A caller that disconnects must not leave a reservation that nothing settles.
            self._take(await asyncio.shield(pending))
        except asyncio.CancelledError:
            self._pending = pending
            raise
        return True

    def restart(self, prepared: PreparedWork) -> None:
        """Begin the call again at another upstream: only what computes its reply is charged.

        prepared: the call as that upstream receives it. The reservation stays.
        """
        self.prepared = prepared
        self._tokens = self._unanswered_tokens = self._uncharged_inputs = 0
        self._has_outlasted = False

    def count(self, tokens: int) -> None:
        """Add tokens that a replica has computed for this call."""
        self._tokens += bounded_amount(tokens, "tokens")

    def count_unanswered(self, tokens: int) -> None:
        """Add the most tokens that a replica was given to compute and whose reply no one awaited."""
        self._unanswered_tokens += bounded_amount(tokens, "tokens")

    def count_outlasted(self) -> None:
        """Record that a replica that works for others did not answer a part of the call in time."""
        self._has_outlasted = True

    def count_cached(self, inputs: int, tokens: int, *, is_charged: bool) -> None:
        """Add inputs of the work that were found in the cache, with their tokens.

        is_charged: they cost the same as if they had been computed.
        """
        if is_charged:
            self.count(tokens)
            return
        # Texts besides the inputs that the call pays for, such as the query of a rerank, may be among them.
        unpaid = self.prepared.work_inputs - self.prepared.cost.inputs
        self._uncharged_inputs = max(0, inputs - max(0, unpaid))

    async def __aenter__(self) -> Self:
        """Begin the call."""
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Settle the cost of the call, or refund it; nothing if the ledger has refused it."""
        if self._pending is not None:
            # The call failed before the ledger's answer came. It is bounded by the store's timeout.
            with suppress(GatewayError):
                await self.confirm()
        if self._reservation is None:
            return
        used = self._used(self._reservation.request.cost, error)
        self.limit_statuses = self._ledger.settle(self._reservation, used)
        if isinstance(error, GatewayError):
            error.settle(rate_limit_headers(self.limit_statuses) if used.requests else {})

    def _take(self, reservation: Reservation) -> None:
        self._reservation = reservation
        self.limit_statuses, self.degraded = reservation.limit_statuses, reservation.degraded

    def _used(self, reserved: Cost, error: BaseException | None) -> Cost:
        """Return what the call has cost, by the way it ended."""
        is_charged = self._has_outlasted and isinstance(error, DeadlineExceeded)
        if isinstance(error, DeadlineExceeded) and not (is_charged or self.deadline.by_caller):
            # The caller chose a size for which the model's time was too short. Nothing computed is a fault of
            # ours, and so is a replica that hangs.
            if self._tokens > 0 and not isinstance(error, ReplicaTimedOut):
                return self._cost_of(reserved, self._tokens, reserved.inputs)
            return self._unpaid_cost(error)
        if error is not None and not (is_charged or _is_charged(error)):
            return self._unpaid_cost(error)
        unanswered = self._unanswered_tokens
        if unanswered and reserved.tokens:
            # The reservation may be exact, where the bounds of slices are not: never charge above it.
            unanswered = min(unanswered, max(0, reserved.tokens - self._tokens))
        tokens = self._tokens + unanswered
        if 0 < reserved.tokens < tokens:
            # The limits had room for the reservation, and may have none for more.
            self._report_excess(tokens, reserved.tokens)
            tokens = reserved.tokens
        inputs = reserved.inputs - self._uncharged_inputs
        if tokens == reserved.tokens and inputs == reserved.inputs:
            return reserved
        return self._cost_of(reserved, tokens, inputs)

    def _unpaid_cost(self, error: BaseException) -> Cost:
        """Return the cost of a call that failed by no fault of its caller: nothing, or the request."""
        if self._unpaid is None or not isinstance(error, UpstreamFailed | ReplicaTimedOut):
            return NOTHING
        now_s = asyncio.get_running_loop().time()
        return Cost() if self._unpaid.is_spent(self.tenant.name, now_s) else NOTHING

    def _report_excess(self, tokens: int, reserved: int) -> None:
        route = self.prepared.route
        logger.warning(
            "model %s: its upstream counted more tokens than a call can have, %d in place of at most %d; the "
            "caller is charged the latter. Set `upstreams.<name>.tokenizer` for exact counts",
            route.model,
            tokens,
            reserved,
        )

    def _cost_of(self, reserved: Cost, tokens: int, inputs: int) -> Cost:
        """Return the cost with other tokens and inputs, at the price of the reservation."""
        return self.prepared.route.price.cost(tokens, inputs, reserved.images, reserved.requests)


class UnpaidFailures:
    """Calls of each tenant that an upstream failed and that were refunded, within the last minute.

    An input may break a server. Without this bound a tenant with such inputs would have no limit at all.
    """

    def __init__(self) -> None:
        # By tenant: the moments of its last ones; tenants with the oldest first.
        self._moments_s: OrderedDict[str, deque[float]] = OrderedDict()

    def is_spent(self, tenant: str, now_s: float) -> bool:
        """Count a failure that would be refunded; return True if the tenant has had `UNPAID_MAX` already."""
        moments_s = self._moments_s.setdefault(tenant, deque())
        self._moments_s.move_to_end(tenant)
        while len(self._moments_s) > UNPAID_TENANTS_MAX:
            self._moments_s.popitem(last=False)
        while moments_s and now_s - moments_s[0] >= UNPAID_WITHIN_S:
            moments_s.popleft()
        if len(moments_s) >= UNPAID_MAX:
            return True
        moments_s.append(now_s)
        return False


class Admission:
    """Grants calls for which all limits of the tenant and the model have room."""

    def __init__(self, ledger: Ledger, observe: Observe, *, shadow: bool = False) -> None:
        self.ledger = ledger
        self.observe = observe
        self.shadow = shadow
        self._process = secrets.token_hex(6)
        self._numbers = count()
        # Tenants with a provisional grant: one each, so that little is computed for nothing if it is refused.
        self._provisional: set[str] = set()
        self._unpaid = UnpaidFailures()

    async def admit(
        self,
        tenant: Tenant,
        prepared: PreparedWork,
        deadline: Deadline,
        id_: str | None = None,
        end_user: EndUser | None = None,
    ) -> Grant:
        """Reserve the cost of a call in all of its limits, or in none.

        The grant is provisional if the limits have ample room. id_: of the reservation, None for a new one;
        one that is open is taken over. end_user: for whom it is sent, whose limits count too.

        Raises: QuotaExceeded, RequestExceedsLimit, QuotaUnavailable.
        """
        route = prepared.route
        limits = tenant.limits + route.limits + _end_user_limits(tenant, end_user)
        ask = QuotaRequest(
            id=self.new_id() if id_ is None else id_,
            tenant=tenant.name,
            limits=limits,
            cost=prepared.cost,
            expires_us=round(route.deadline_s * SECOND_US) + LEASE_US,
            model=route.model,
            shadow=self.shadow,
            is_bound=prepared.input_tokens is None,
            key=tenant.key_id,
            end_user=end_user,
        )
        # The trip to the store takes a third of the gateway's time for a lone call: the replica starts
        # meanwhile.
        if id_ is None and tenant.name not in self._provisional and self.ledger.has_ample_room(ask):
            self._provisional.add(tenant.name)
            reserving = asyncio.create_task(self._reserve_after_dispatch(ask))
            return Grant(tenant, prepared, deadline, reserving, self.ledger, self._unpaid)
        reservation = await self.reserve(ask, "admitted")
        return Grant(tenant, prepared, deadline, reservation, self.ledger, self._unpaid)

    def grant_copy(
        self, tenant: Tenant, prepared: PreparedWork, deadline: Deadline, purpose: CopyPurpose
    ) -> Grant:
        """Return the grant of a copy of a call, which charges no tenant."""
        request = QuotaRequest(self.new_id(), tenant.name, (), prepared.cost, LEASE_US)
        return Grant(tenant, prepared, deadline, Reservation(request, ()), self.ledger, copy=purpose)

    async def ask(self, tenant: Tenant, route: Route, least: Cost) -> int:
        """Refuse a call of at least this cost if it does not fit now; return how many tokens fit.

        It takes nothing from the limits.

        Raises: QuotaExceeded, RequestExceedsLimit, QuotaUnavailable.
        """
        limits = _without_slots(tenant.limits + route.limits)
        if self.shadow or not limits:
            return TOKENS_MAX
        request = QuotaRequest(
            self.new_id(), tenant.name, limits, least, LEASE_US, route.model, is_lower_bound=True
        )
        statuses = (await self._try(request)).limit_statuses
        room = route.price.tokens_within((status.limit, status.remaining) for status in statuses)
        return TOKENS_MAX if room is None else room + least.tokens

    async def check_sum(
        self, tenant: Tenant, calls: Sequence[PreparedWork], end_user: EndUser | None = None
    ) -> None:
        """Refuse the calls of one request if they do not fit now together. It takes nothing from the limits.

        Each is admitted by itself later, and one may be refused yet: others take from the limits, too.

        Raises: QuotaExceeded, RequestExceedsLimit, QuotaUnavailable.
        """
        if self.shadow:
            return
        by_route: dict[str, list[PreparedWork]] = {}
        for call in calls:
            by_route.setdefault(call.route.model, []).append(call)
        asks = [(tenant.limits + _end_user_limits(tenant, end_user), list(calls), end_user)]
        asks += [(of_model[0].route.limits, of_model, None) for of_model in by_route.values()]
        for limits, counted, user in asks:
            if charged := _without_slots(limits):
                await self._try(
                    QuotaRequest(
                        self.new_id(),
                        tenant.name,
                        charged,
                        sum((call.cost for call in counted), NOTHING),
                        LEASE_US,
                        is_bound=any(call.input_tokens is None for call in counted),
                        end_user=user,
                        calls=len(counted),
                    )
                )

    async def _try(self, request: QuotaRequest) -> Reservation:
        """Reserve a cost and give it back. Raises: QuotaExceeded, RequestExceedsLimit, QuotaUnavailable."""
        try:
            reservation = await self.ledger.reserve(request)
        except GatewayError:
            self.observe(QuotaDecided(request.tenant, "refused"))
            raise
        self.ledger.settle(reservation, NOTHING)
        return reservation

    def new_id(self) -> str:
        """Return an id that is unique among all gateways, and cheap: a random prefix and a counter."""
        return f"{self._process}{next(self._numbers):x}"

    async def _reserve_after_dispatch(self, ask: QuotaRequest) -> Reservation:
        """Reserve once the request to the replica has been written: packing a reserve takes time, too."""
        try:
            for _ in range(TURNS_TO_DISPATCH):
                await asyncio.sleep(0)
            return await self.reserve(ask, "admitted")
        finally:
            self._provisional.discard(ask.tenant)

    async def reserve(self, ask: QuotaRequest, on_success: Decision) -> Reservation:
        """Reserve the cost of a request, and report the decision. Raises: QuotaExceeded, QuotaUnavailable."""
        decision: Decision = "refused"
        try:
            reservation = await self.ledger.reserve(ask)
            decision = on_success if reservation.over is None else "shadow_refused"
        finally:
            self.observe(QuotaDecided(ask.tenant, decision))
        return reservation


class Charges:
    """Refusals and charges of requests that are not served. least_price: of a token of any model now."""

    def __init__(self, admission: Admission, least_price: Callable[[], Price]) -> None:
        self._admission = admission
        self._least_price = least_price

    def refuse_if_spent(self, tenant: Tenant, least: Cost) -> None:
        """Refuse a request of at least this cost before its body is read, if a limit is known to be spent.

        Raises: QuotaExceeded, QuotaUnavailable.
        """
        if self._admission.shadow:
            return
        try:
            self._admission.ledger.refuse_if_spent(tenant.name, tenant.limits, self._priced(least))
        except GatewayError:
            self._admission.observe(QuotaDecided(tenant.name, "refused"))
            raise

    async def charge_bad_request(self, tenant: Tenant) -> tuple[LimitStatus, ...]:
        """Charge a request that was refused for its content, so that its decoding is not free.

        Return the limits that were charged. Raises: QuotaExceeded, QuotaUnavailable.
        """
        return await self._charge(tenant, _of_requests(tenant), Cost(), Cost(), "bad_request")

    async def charge_request(self, tenant: Tenant) -> tuple[LimitStatus, ...]:
        """Charge a request that reaches no model, such as an upload; return the limits that were charged.

        Raises: QuotaExceeded, QuotaUnavailable.
        """
        return await self._charge(tenant, _of_requests(tenant), Cost(), Cost(), "admitted")

    async def charge_unfinished(self, tenant: Tenant, least: Cost, *, is_callers_fault: bool) -> None:
        """Charge one request for a body that was not read to its end; ask only, if no caller is at fault.

        Either way a caller whose limits are spent is recorded as such: the next body is refused unread.
        least: the least that the request costs. Raises: QuotaExceeded, QuotaUnavailable.
        """
        used = Cost() if is_callers_fault else NOTHING
        await self._charge(tenant, tenant.limits, self._priced(least), used, "bad_request")

    async def flush(self) -> None:
        """Wait until the quota store has what all calls so far have cost. Raises: QuotaUnavailable."""
        await self._admission.ledger.flush()

    async def _charge(
        self, tenant: Tenant, limits: Sequence[Limit], least: Cost, used: Cost, on_success: Decision
    ) -> tuple[LimitStatus, ...]:
        """Reserve the least cost of a request that reaches no model, settle it, and return the limits."""
        admission, charged = self._admission, _without_slots(limits)
        if not charged:
            return ()
        id_ = admission.new_id()
        ask = QuotaRequest(id_, tenant.name, charged, least, LEASE_US, shadow=admission.shadow)
        return admission.ledger.settle(await admission.reserve(ask, on_success), used)

    def _priced(self, least: Cost) -> Cost:
        """Return the least cost of a request with the least money that its tokens may cost."""
        return self._least_price().cost(least.tokens, least.inputs, least.images, least.requests)


def _end_user_limits(tenant: Tenant, end_user: EndUser | None) -> tuple[Limit, ...]:
    if end_user is None:
        return ()
    return tuple([limit.for_end_user(end_user.name) for limit in tenant.end_user_limits])


def _of_requests(tenant: Tenant) -> list[Limit]:
    return [limit for limit in tenant.limits if limit.unit == "requests"]


def _without_slots(limits: Sequence[Limit]) -> tuple[Limit, ...]:
    """Return the limits without those in flight.

    Even for a moment, a slot in flight may be the one that another request of the tenant needs.
    """
    return tuple([limit for limit in limits if limit.period != "in_flight"])


def _is_charged(error: BaseException) -> bool:
    """Return whether the caller pays for a call that failed: by its own fault, or its own deadline."""
    if isinstance(error, DeadlineExceeded):
        # A short deadline of the caller's own would otherwise buy work for free.
        return True
    if isinstance(error, GatewayError):
        return error.facts.source == "caller"
    # Any other Exception is a fault of the gateway. A disconnected caller raises CancelledError, which is
    # no Exception.
    return not isinstance(error, Exception)
