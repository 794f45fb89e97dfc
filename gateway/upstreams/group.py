"""Upstreams of one model that has several, a canary or a mirror: who gets a call, and who gets it next.

`routing.split` decides the order, and `judging` which upstreams may serve the model at all.
"""

import asyncio
from collections.abc import Sequence
from random import Random

import msgspec

from backends.contract import Capabilities, Residence
from gateway.calls import Call, Deadline
from gateway.config import schema
from gateway.errors import (
    LOADING_RETRY_S,
    DeadlineExceeded,
    GatewayError,
    ModelLoading,
    NoReplica,
    ReplicaTimedOut,
)
from gateway.events import LaneBacklog, Observe, UpstreamTried
from gateway.lane.retries import RetryBudget
from gateway.lane.slices import Bounds
from gateway.routing.pool import PROBED_WITHIN_S
from gateway.routing.routes import Route
from gateway.routing.split import (
    SECOND_STEP,
    Breaker,
    Health,
    Member,
    Split,
    by_health,
    next_point,
    preference,
)
from gateway.upstreams.judging import Judge
from gateway.upstreams.member import JudgedUpstream, UpstreamState, known_dimensions
from gateway.vector_spaces.model_space import ModelSpace

# A waiting call looks again at least this often; most changes wake it.
LOOK_AGAIN_S = 0.5
# Errors after which another upstream may have the call at no cost: nothing was computed for it.
FREE_TO_MOVE = frozenset({"no_replica", "overloaded", "model_loading", "operation_unsupported"})


class UpstreamGroup:
    """Upstreams of one model. To operators and callers it has the properties of one upstream.

    model_settings: of the configuration. judge: of those that may serve it. mirror: receives copies, None
    without one. point: of the last call in the split. budget: of moves after an attempt. breakers: by
    upstream.
    """

    def __init__(
        self,
        settings: schema.ModelSettings,
        space: ModelSpace,
        judge: Judge,
        mirror: JudgedUpstream | None,
        observe: Observe,
    ) -> None:
        self.model = space.model
        self.model_settings = settings
        self.space = space
        self.judge = judge
        self.mirror = mirror
        members = tuple(Member(each.name, each.weight, each.priority) for each in settings.members)
        self._split = Split(members, by_tenant=settings.split_by == "tenant")
        random = Random()  # noqa: S311 - it spreads load and protects no secret
        self.point, self._mirror_point = random.random(), random.random()
        self._observe = observe
        self.budget = RetryBudget(self.main.settings.retry_share, asyncio.get_running_loop().time())
        self.breakers = {name: Breaker() for name in judge.judged}
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def main(self) -> JudgedUpstream:
        """The first choice of all upstreams."""
        return next(iter(self.judge.members.values()))

    def enter(self) -> None:
        """Count one call in progress, of each upstream that may get it."""
        for upstream in self.judge.judged.values():
            upstream.enter()

    def leave(self) -> None:
        """Stop counting a call, whatever its outcome."""
        for upstream in self.judge.judged.values():
            upstream.leave()

    async def candidates(
        self, route: Route, tenant: str, call: Call, deadline: Deadline
    ) -> tuple[Route, Sequence[str]]:
        """Return the upstreams that may serve a call, in order; waits while one is expected.

        The route is the one through the first of them, with the length that all of them have.
        Raises: ModelLoading, NoReplica.
        """
        self.budget.add_first_attempt(asyncio.get_running_loop().time())
        point = self.point = next_point(self.point)
        while not (names := self._serving(tenant, call, point)):
            if not self._is_expected():
                raise _no_upstream(self.judge)
            await self._wait_for_change(deadline)
        common = self.judge.common_capabilities
        input_tokens = None if common is None else common.max_input_tokens
        return msgspec.structs.replace(route, upstream=names[0], input_tokens=input_tokens), names

    def may_move(self, error: GatewayError, deadline: Deadline) -> bool:
        """Return whether a call that failed at one upstream goes to the next; counts the move."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= deadline.at_s:
            return False
        if error.kind in FREE_TO_MOVE:
            return True
        if isinstance(error, DeadlineExceeded) and not isinstance(error, ReplicaTimedOut):
            return False
        return error.facts.retryable and self.budget.try_spend(now_s)

    def record_failure(self, upstream: str, error: GatewayError) -> None:
        """Record that a call to an upstream failed; its breaker counts what is the fault of the upstream."""
        self._observe(UpstreamTried(self.model, upstream, error.kind))
        if error.kind == "upstream_failed" or isinstance(error, ReplicaTimedOut):
            self.breakers[upstream].record_failure(asyncio.get_running_loop().time())

    def accepts(self, upstream: str) -> bool:
        """Record that an upstream has computed a call; return whether its reply is used.

        The vectors of an upstream that are known not to be the model's are not.
        """
        self.breakers[upstream].record_success()
        is_used = self.judge.judgements[upstream].standing not in {"refused", "withdrawn"}
        self._observe(UpstreamTried(self.model, upstream, "ok" if is_used else "other_vectors"))
        return is_used

    def wants_copy(self) -> bool:
        """Return whether the mirror gets a copy of this call."""
        if self.model_settings.mirror is None:
            return False
        self._mirror_point = next_point(self._mirror_point, SECOND_STEP)
        return self._mirror_point < self.model_settings.mirror.share

    def witness(self) -> JudgedUpstream | None:
        """Return the upstream whose vectors the canary's are compared with, None while none is ready."""
        members = self.judge.members
        return next((members[name] for name in self.judge.usable() if name in members), None)

    def can_do_without(self, upstream: str) -> bool:
        """Return whether another upstream serves the model now; a canary takes its share only."""
        members = self.judge.members
        others = [name for name in self.judge.usable() if name in members and name != upstream]
        return upstream not in members or bool(others)

    def wake(self) -> None:
        """Look at the upstreams again, and wake the calls that wait for one."""
        self.judge.update()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def inherit(self, before: "UpstreamGroup") -> None:
        """Take over the place in the split, and the budget for moves, from the group of an earlier config."""
        self.point, self.budget = before.point, before.budget
        self.breakers |= {name: each for name, each in before.breakers.items() if name in self.breakers}
        self.judge.inherit(before.judge)

    @property
    def name(self) -> str:
        """Name of the first choice."""
        return self.main.name

    @property
    def settings(self) -> schema.UpstreamSettings:
        """Settings of the first choice."""
        return self.main.settings

    @property
    def capabilities(self) -> Capabilities | None:
        """Capabilities that all its upstreams have; None while none serves."""
        return self.judge.common_capabilities

    @property
    def fingerprint(self) -> str | None:
        """Id of the vector space of the model."""
        return self.space.id

    @property
    def dimensions(self) -> int | None:
        """Length of the model's vectors, None while it is not known."""
        return known_dimensions(self.capabilities, self.space.reference)

    @property
    def state(self) -> UpstreamState:
        """State of the model: `ready` if it can serve calls, else the reason."""
        judgements, members, usable = self.judge.judgements, self.judge.members, self.judge.usable()
        if not members.keys().isdisjoint(usable):
            return "ready"
        if any(not upstream.startup_done for upstream in members.values()):
            return "loading"
        if usable:
            return "canary_only"
        is_refused = any(judgements[name].standing == "refused" for name in members)
        return "refused" if is_refused else "unavailable"

    @property
    def health(self) -> Health:
        """Health of the healthiest of its upstreams."""
        found = {upstream.health for upstream in self._serving_now}
        return "ready" if "ready" in found else "expected" if "expected" in found else "out"

    @property
    def residence(self) -> Residence | None:
        """Residence of the model in memory, of the first upstream that reports it."""
        reports = [upstream.residence for upstream in (*self._serving_now, self.main)]
        return next((report for report in reports if report is not None), None)

    @property
    def bounds(self) -> Bounds:
        """Maximum size of one request to the first upstream."""
        return self.main.bounds

    def backlog(self) -> LaneBacklog:
        """Return the size and age of what waits for all its upstreams."""
        parts = [upstream.backlog() for upstream in self.judge.judged.values()]
        return LaneBacklog(
            sum(part.tokens for part in parts),
            sum(part.inputs for part in parts),
            max(part.oldest_s for part in parts),
        )

    @property
    def _serving_now(self) -> list[JudgedUpstream]:
        judged = self.judge.judged
        return [judged[name] for name, each in self.judge.judgements.items() if each.standing == "serving"]

    def _serving(self, tenant: str, call: Call, point: float) -> list[str]:
        judgements, judged = self.judge.judgements, self.judge.judged
        trial = self.judge.trial(call)
        now_s = asyncio.get_running_loop().time()

        def health(name: str) -> Health:
            if judgements[name].standing != "serving":
                return "out"
            own = judged[name].health
            return "failing" if own == "ready" and not self.breakers[name].admits(now_s) else own

        return by_health(preference(self._split, trial, tenant, point), health)

    def _is_expected(self) -> bool:
        """Return whether an upstream may serve the model soon: its vectors are about to be known."""
        judgements = self.judge.judgements
        return any(
            judgements[name].standing == "waiting"
            and (self.space.wanted is not None or upstream.health == "expected")
            for name, upstream in self.judge.members.items()
        )

    async def _wait_for_change(self, deadline: Deadline) -> None:
        """Wait until something may have changed. Raises: ModelLoading at the deadline."""
        loop = asyncio.get_running_loop()
        if loop.time() >= deadline.at_s:
            raise ModelLoading("the model is still loading", retry_after_s=LOADING_RETRY_S)
        waiter = loop.create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait((waiter,), timeout=min(LOOK_AGAIN_S, deadline.at_s - loop.time()))
        finally:
            self._waiters.discard(waiter)


def _no_upstream(judge: Judge) -> NoReplica:
    """Return the error of a call that no upstream can serve."""
    if any(each.standing == "refused" for each in judge.judgements.values()):
        reason = "the upstreams of this model that can be reached do not fit it and are not used"
    else:
        reason = "no upstream of this model can be reached"
    if judge.usable():
        reason = f"{reason}; its canary takes its share only"
    return NoReplica(reason, retry_after_s=PROBED_WITHIN_S)
