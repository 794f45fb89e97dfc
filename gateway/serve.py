"""The request path: the stages of a call between decoding and encoding. Read this file first.

Every model is a group of at least one upstream: a lone `Upstream` is one, and an `UpstreamGroup` chooses
between several. A copy of a call, for a mirror or a comparison, passes the same stages with a grant that is
free.

Each stage takes the result of the stage before it, so that the types allow one order only: no route without a
tenant, no work without a route, no grant without prepared work, nothing reaches a replica without a grant,
and no reply leaves before the ledger has confirmed it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from backends.contract import Operation, Reply
from gateway.admission import Admission, Charges, Grant
from gateway.cache.call_cache import (
    NO_IDENTITY,
    NO_SCORES_IDENTITY,
    SINGLE_TEXTS,
    CacheUse,
    CallCache,
    CallOrigin,
    ItemCache,
)
from gateway.calls import CacheMode, Call, Deadline
from gateway.config.schema import Config
from gateway.dispatch import Dispatcher
from gateway.errors import GatewayError, NoReplica
from gateway.events import CopyPurpose
from gateway.prepare import PreparedWork, Preparer
from gateway.quotas.end_users import EndUser
from gateway.quotas.limits import LimitStatus, Price
from gateway.routing.pool import PROBED_WITHIN_S
from gateway.routing.routes import Route, Routes
from gateway.telemetry.timeline import Timeline
from gateway.tenants.keyring import Keyring, Tenant
from gateway.upstreams.copies import Copies
from gateway.upstreams.group import UpstreamGroup
from gateway.upstreams.upstream import Upstream, identity_of, scores_identity, vectors_identity

if TYPE_CHECKING:
    # The tokenizers package is loaded only where tokens are read.
    from backends.tokens.tokenizer import TextCounter

# Callers' error where every upstream that replied turned out to give other vectors.
OTHER_VECTORS = "the last upstream of this model returned vectors of a different space, which are not used"


class Caller(msgspec.Struct, frozen=True):
    """Authenticated sender of a call.

    timeout_s: its `x-timeout-s` header, None without one. cache: its `cache-control` header. reservation: id
    of its reservation of quota, which a repeated call takes over; None for a new one. end_user: for whom it
    is sent, None if unknown.
    """

    tenant: Tenant
    timeout_s: float | None = None
    cache: CacheMode = "use"
    reservation: str | None = None
    end_user: EndUser | None = None


class Served(msgspec.Struct, frozen=True):
    """Reply to a call, with the facts that its headers report.

    limit_statuses: the remaining amounts. degraded: they were counted without the shared store.
    fingerprint: id of the vector space of the reply's vectors; None for a reply without vectors.
    is_cut: whether texts have no more tokens than the call allows; False if they could not be cut.
    cache: what the cache had, None if the model has none or it was bypassed. has_cache: the model has one.
    shares_tokens: as in `AttemptRecord`. show_unlimited: its headers show limits even if it has none.
    """

    reply: Reply
    tenant: Tenant
    route: Route
    limit_statuses: tuple[LimitStatus, ...]
    degraded: bool = False
    fingerprint: str | None = None
    is_cut: bool = True
    cache: CacheUse | None = None
    has_cache: bool = False
    shares_tokens: bool = False
    show_unlimited: bool = False


@dataclass(frozen=True, slots=True)
class Serving:
    """Everything that one config serves; a reload replaces it as a whole, between two calls.

    groups: of the models that have several upstreams, a canary or a mirror.
    """

    config: Config
    routes: Routes
    upstreams: Mapping[str, Upstream]
    groups: Mapping[str, UpstreamGroup]


class Gateway:
    """Collaborators of the request path, built once, and the one reference to the current `Serving`."""

    def __init__(
        self,
        keyring: Keyring,
        serving: Serving,
        preparer: Preparer,
        admission: Admission,
        dispatcher: Dispatcher,
    ) -> None:
        self.keyring = keyring
        self.serving = serving
        self._preparer = preparer
        self._admission = admission
        self._dispatcher = dispatcher
        self.copies = Copies(admission.observe)
        self.charges = Charges(admission, self._least_price)

    def _least_price(self) -> Price:
        return Price(self.routes.least_price, self.routes.currency)

    @property
    def routes(self) -> Routes:
        """Routes of the config that is served now."""
        return self.serving.routes

    @property
    def upstreams(self) -> Mapping[str, Upstream]:
        """Upstreams by name, of the config that is served now."""
        return self.serving.upstreams

    @property
    def cache(self) -> ItemCache | None:
        """Cache of vectors, None without one."""
        return self._dispatcher.cache

    def cache_state(self, model: str) -> str | None:
        """Return `on`, which may have a limit, or why nothing is cached; None if nothing is meant to be."""
        if not self.routes.is_cached(model):
            return None
        if self.cache is None:
            return "needs a restart"
        upstreams = [self.upstreams[each.name] for each in self.serving.config.models[model].members]
        known = [upstream.capabilities for upstream in upstreams if upstream.capabilities is not None]
        if any(Operation.RERANK in capabilities.operations for capabilities in known):
            return "on" if any(map(scores_identity, upstreams)) else NO_SCORES_IDENTITY
        if not any(map(vectors_identity, upstreams)):
            return NO_IDENTITY
        return "on" if all(upstream.settings.knows_each_input for upstream in upstreams) else SINGLE_TEXTS

    def view_of(self, name: str) -> Upstream | UpstreamGroup:
        """Return what serves a public name. Raises: ModelNotFound."""
        serving = self.serving
        model = serving.routes.known_name(name)
        return serving.groups.get(model) or serving.upstreams[serving.routes.upstream_of(model)]

    async def prepare(self, call: Call, caller: Caller) -> PreparedWork:
        """Prepare one call of several before they are served, so that their sum is known.

        Raises: the errors of `Routes.resolve` and `Preparer.prepare`.
        """
        serving, operation = self.serving, call.work.operation
        caller.tenant.require_operation(operation)
        route = serving.routes.resolve(caller.tenant, call.model, operation)
        inputs = serving.upstreams[route.upstream].model_inputs
        return await self._preparer.prepare(inputs, caller.tenant, route, call, _deadline(route, caller))

    async def check_sum(self, caller: Caller, calls: Sequence[PreparedWork]) -> None:
        """Refuse calls whose limits have no room for all of them. Raises: as `Admission.check_sum`."""
        await self._admission.check_sum(caller.tenant, calls, caller.end_user)

    async def serve(
        self, call: Call, caller: Caller, timeline: Timeline, early: PreparedWork | None = None
    ) -> Served:
        """Resolve, prepare, admit and dispatch one call. early: the call as `prepare` returned it.

        Raises: GatewayError.
        """
        tenant, operation = caller.tenant, call.work.operation
        timeline.operation = operation.value
        tenant.require_operation(operation)
        # Taken once: a reload in the middle of the call changes nothing for it.
        serving = self.serving
        route = serving.routes.resolve(tenant, call.model, operation)
        timeline.model = route.model
        timeline.lap("auth")
        group = serving.groups.get(route.model) or serving.upstreams[route.upstream]
        return await self._pass(serving, group, route, call, caller, timeline, early=early)

    async def _pass(
        self,
        serving: Serving,
        group: Upstream | UpstreamGroup,
        route: Route,
        call: Call,
        caller: Caller,
        timeline: Timeline,
        copy: CopyPurpose | None = None,
        early: PreparedWork | None = None,
    ) -> Served:
        """Take a call through all stages after its route. Raises: GatewayError.

        copy: why it is a copy, whose grant is free and of which no copies are made; None for a call. early:
        as prepared before, which is used if the upstream is still the same.
        """
        tenant, deadline = caller.tenant, _deadline(route, caller)
        # A reload closes no upstream of the model while the call waits or moves.
        group.enter()
        try:
            route, names = await group.candidates(route, tenant.name, call, deadline)
            inputs = serving.upstreams[names[0]].model_inputs
            if early is not None and early.route == route and early.capabilities is inputs.capabilities():
                prepared = early
            else:
                prepared = await self._preparer.prepare(inputs, tenant, route, call, deadline)
            if copy is None:
                grant = await self._admission.admit(
                    tenant, prepared, deadline, caller.reservation, caller.end_user
                )
            else:
                grant = self._admission.grant_copy(tenant, prepared, deadline, copy)
            async with grant:
                timeline.lap("quota")
                upstream, reply, cache = await self._send(serving, group, names, grant, caller, timeline)
                if await grant.confirm():
                    timeline.lap("quota")
            fingerprint = None if reply.dense_vectors is None else group.fingerprint
        finally:
            group.leave()
        if copy is None and isinstance(group, UpstreamGroup):
            self.copies.offer(group, call, upstream.name, reply, partial(self._copy, route, tenant))
            route = msgspec.structs.replace(route, upstream=upstream.name)
        cut = grant.prepared.cut
        return Served(
            _with_cut(reply, cut.indices) if cut.indices else reply,
            tenant,
            route,
            grant.limit_statuses,
            grant.degraded,
            fingerprint,
            is_cut=cut.is_complete,
            cache=None if cache is None else cache.use,
            has_cache=route.cache and self._dispatcher.cache is not None,
            shares_tokens=timeline.attempts.shares_tokens,
            show_unlimited=serving.config.quotas.unlimited_headers,
        )

    async def _send(
        self,
        serving: Serving,
        group: Upstream | UpstreamGroup,
        names: Sequence[str],
        grant: Grant,
        caller: Caller,
        timeline: Timeline,
    ) -> tuple[Upstream, Reply, CallCache | None]:
        """Return the reply of the first upstream that gives one, with that upstream and its cache.

        names: in the order of preference. The call moves within its deadline and the reserved quota.
        Raises: GatewayError, of the last one tried.
        """
        prepared, deadline = grant.prepared, grant.deadline
        for name in names:
            upstream, is_last = serving.upstreams[name], name == names[-1]
            cache = self._cache_of(caller, prepared.route, upstream) if prepared.route.cache else None
            try:
                if name != names[0]:
                    grant.restart(
                        await self._preparer.prepare_again(
                            upstream.model_inputs, prepared, grant.tenant, deadline
                        )
                    )
                reply = await self._dispatcher.dispatch(
                    grant,
                    upstream.lane_of(grant.prepared.work),
                    upstream.model_inputs,
                    timeline,
                    cache,
                    may_move=not is_last,
                )
            except GatewayError as error:
                group.record_failure(name, error)
                if is_last or not group.may_move(error, deadline):
                    raise
                continue
            # Its vectors may have turned out to be others while it computed them.
            if group.accepts(name):
                return upstream, reply, cache
        raise NoReplica(OTHER_VECTORS, retry_after_s=PROBED_WITHIN_S)

    async def _copy(
        self, route: Route, tenant: Tenant, call: Call, purpose: CopyPurpose, upstream: str
    ) -> Reply | None:
        """Send a copy of a call, which no tenant pays for; return None if its upstream was removed.

        Raises: GatewayError.
        """
        serving = self.serving
        target = serving.upstreams.get(upstream)
        if target is None:
            return None
        route = msgspec.structs.replace(route, upstream=upstream, limits=())
        caller = Caller(msgspec.structs.replace(tenant, limits=()), cache="bypass")
        call = msgspec.structs.replace(call, bulk=True)
        return (await self._pass(serving, target, route, call, caller, Timeline(), purpose)).reply

    def _cache_of(self, caller: Caller, route: Route, upstream: Upstream) -> CallCache | None:
        """Return the cache of a call, None if its model has none, or the caller bypasses it."""
        cache = self._dispatcher.cache
        if cache is None or caller.cache == "bypass":
            return None
        origin = CallOrigin(caller.tenant.name, route.model, upstream.name)
        is_refreshed = caller.cache == "refresh"
        return CallCache(cache, origin, partial(identity_of, upstream), is_refreshed=is_refreshed)

    async def decode_ids(
        self, tenant: Tenant, model: str | None, operation: Operation, ids: Sequence[Sequence[int]]
    ) -> list[str]:
        """Decode token ids with the vocabulary in the model's config.

        Raises: the errors of `Routes.resolve` and `IdDecoder.decode`.
        """
        route = self.routes.resolve(tenant, model, operation)
        decoder = self.upstreams[route.upstream].ids
        deadline = _deadline(route, Caller(tenant))
        return await self._preparer.decode_ids(decoder, tenant, route, ids, deadline)

    async def open_vocabulary(
        self, tenant: Tenant, model: str | None, operation: Operation
    ) -> "TextCounter | None":
        """Return the tokens of a model, None if its tokenizer is not known here.

        Raises: NoReplica, and the errors of `Routes.resolve`.
        """
        inputs = self.upstreams[self.routes.resolve(tenant, model, operation).upstream].model_inputs
        if inputs.capabilities() is None:
            raise NoReplica("the vocabulary of the model is unknown until a replica has joined")
        return await inputs.open_counter()


def _with_cut(reply: Reply, indices: tuple[int, ...]) -> Reply:
    """Return a reply that reports these inputs as cut, too."""
    if reply.is_free or reply.truncated is None:
        return reply
    truncated = tuple(sorted({*reply.truncated, *indices}))
    return msgspec.structs.replace(reply, truncated=truncated)


def _deadline(route: Route, caller: Caller) -> Deadline:
    """Return the model's deadline, or the caller's own if that is sooner."""
    by_caller = caller.timeout_s is not None and caller.timeout_s < route.deadline_s
    timeout_s = caller.timeout_s if by_caller and caller.timeout_s else route.deadline_s
    return Deadline(asyncio.get_running_loop().time() + timeout_s, timeout_s, by_caller)
