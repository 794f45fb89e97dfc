"""Stage four: may this tenant make this call, now? Reserves before anything is sent, settles after."""

import asyncio
import secrets
from collections.abc import Sequence
from itertools import count
from typing import Self

from backends import contract
from gateway.calls import Call, Deadline, inputs_of
from gateway.errors import DeadlineExceeded, GatewayError
from gateway.events import Decision, Observe, QuotaDecided
from gateway.quotas.ledger import LEASE_US, NOTHING, Ask, Ledger, Reservation
from gateway.quotas.limits import SECOND_US, Cost, Limit, LimitStatus
from gateway.routing.routes import Route
from gateway.tenants.keyring import Tenant
from gateway.upstreams.upstream import PreparedWork, Upstream


class Grant:
    """Leave to send one call: who pays, over which route and by which upstream, and what has been used of
    the reserve.

    A block that runs under it holds the reservation. Left well, by the caller's fault or because the caller
    has gone, that is settled at what was computed, and at what replicas were still computing; by a fault of
    the gateway or of an upstream, it is given back whole. sent: what replicas are asked for, as it was known
    then; input_tokens: of each input, where they were counted.
    """

    def __init__(
        self,
        tenant: Tenant,
        route: Route,
        upstream: Upstream,
        reservation: Reservation,
        ledger: Ledger,
        deadline: Deadline,
        sent: PreparedWork,
        input_tokens: Sequence[int] | None = None,
    ) -> None:
        self.tenant = tenant
        self.route = route
        self.upstream = upstream
        self.limit_statuses: tuple[LimitStatus, ...] = reservation.limit_statuses
        self.sent = sent
        self.input_tokens = input_tokens
        self._tokens = 0
        self._unanswered = 0
        self.degraded = reservation.degraded
        self._reservation = reservation
        self._ledger = ledger
        self._deadline = deadline

    def count(self, tokens: int) -> None:
        """Tokens that a replica has computed for this call."""
        self._tokens += tokens

    def count_unanswered(self, tokens: int) -> None:
        """Tokens, at most, that a replica was given to compute, and whose reply nobody waited for."""
        self._unanswered += tokens

    def __enter__(self) -> Self:
        """The call begins."""
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """The call is over: what it cost is known."""
        reserved = self._reservation.ask.cost
        unanswered = self._unanswered
        if reserved.tokens:
            # Where a limit counts tokens, the reserve may be exact, and the slices' bounds are not.
            unanswered = min(unanswered, max(0, reserved.tokens - self._tokens))
        used = Cost(reserved.requests, self._tokens + unanswered, reserved.inputs)
        if not _callers_doing(error, self._deadline):
            used = NOTHING
        self.limit_statuses = self._ledger.settle(self._reservation, used)


class Admission:
    """Turns a tenant, a route and a call into a grant, or into an error."""

    def __init__(self, ledger: Ledger, observe: Observe, *, shadow: bool = False) -> None:
        self._ledger = ledger
        self._observe = observe
        self._shadow = shadow
        self._process = secrets.token_hex(6)
        self._numbers = count()

    async def admit(
        self, tenant: Tenant, route: Route, upstream: Upstream, call: Call, deadline: Deadline
    ) -> Grant:
        """Reserve what the call costs, or will at most.

        Raises: QuotaExceeded, RequestExceedsLimit, QuotaUnavailable, DeadlineExceeded.
        """
        limits = tenant.limits + route.limits
        sent = upstream.prepare(call, route.prompts)
        limited = not _is_free(call) and "tokens" in [limit.unit for limit in limits]
        counted = None
        if (limited or upstream.counts_here) and upstream.may_count(sent):
            counted = await _counted(upstream, sent, deadline)
        tokens = sum(counted or sent.most_tokens()) if limited else 0
        cost = Cost(inputs=len(inputs_of(call.work)), tokens=tokens)
        reservation = await self._reserve(tenant, route, limits, cost, is_bound=counted is None)
        return Grant(tenant, route, upstream, reservation, self._ledger, deadline, sent, counted)

    async def _reserve(
        self, tenant: Tenant, route: Route, limits: tuple[Limit, ...], cost: Cost, *, is_bound: bool
    ) -> Reservation:
        decision: Decision = "refused"
        ask = Ask(
            # Unique among all gateways, and cheap: a random prefix a process, and a counter.
            id=f"{self._process}{next(self._numbers):x}",
            tenant=tenant.name,
            limits=limits,
            cost=cost,
            expires_us=round(route.deadline_s * SECOND_US) + LEASE_US,
            model=route.model,
            shadow=self._shadow,
            is_bound=is_bound,
        )
        try:
            reservation = await self._ledger.reserve(ask)
            decision = "admitted" if reservation.over is None else "shadow_refused"
        finally:
            self._observe(QuotaDecided(tenant.name, decision))
        return reservation


async def _counted(upstream: Upstream, sent: PreparedWork, deadline: Deadline) -> list[int] | None:
    """The tokens of each input, where the upstream's tokenizer can be opened. Raises: DeadlineExceeded."""
    try:
        async with asyncio.timeout_at(deadline.at_s):
            return await upstream.exact_tokens(sent)
    except TimeoutError as error:
        raise DeadlineExceeded("the call's time ran out") from error


def _is_free(call: Call) -> bool:
    """To count tokens costs none."""
    return isinstance(call.work, contract.Tokenize | contract.Detokenize)


def _callers_doing(error: BaseException | None, deadline: Deadline) -> bool:
    """Whether the caller pays for a call that ended so: well, by its own fault, or a deadline of its own."""
    if isinstance(error, DeadlineExceeded):
        # Otherwise a caller could have work done for nothing, by not waiting for it.
        return deadline.by_caller
    if isinstance(error, GatewayError):
        return error.facts.source == "caller"
    # Any other exception is a fault of ours. A caller that has gone is no Exception.
    return not isinstance(error, Exception)
