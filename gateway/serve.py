"""The request path: the stages of a call between decoding and encoding. Read this file first.

Each stage takes the result of the stage before it, so that the types allow one order only: no route without a
tenant, no work without a route, no grant without prepared work, nothing reaches a replica without a grant,
and no reply leaves before the ledger has confirmed it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import msgspec

from backends.contract import DetokenizeReply, EmbedReply, EncodeReply, Operation, Reply, TokenizeReply
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
from gateway.calls import CacheMode, Call, Deadline, operation_of
from gateway.config.schema import Config
from gateway.dispatch import Dispatcher
from gateway.prepare import Preparer
from gateway.quotas.limits import LimitStatus, Price
from gateway.routing.routes import Route, Routes
from gateway.telemetry.timeline import Timeline
from gateway.tenants.keyring import Keyring, Tenant
from gateway.upstreams.copies import CopiedCall, Copies, ServedCall
from gateway.upstreams.group import GroupView, UpstreamGroup
from gateway.upstreams.turns import send_in_turn
from gateway.upstreams.upstream import Upstream, identity_of, scores_identity, vectors_identity


class Caller(msgspec.Struct, frozen=True):
    """Authenticated sender of a call.

    timeout_s: its `x-timeout-s` header, None without one. cache: its `cache-control` header. reservation: id
    of its reservation of quota, which a repeated call takes over; None for a new one.
    """

    tenant: Tenant
    timeout_s: float | None = None
    cache: CacheMode = "use"
    reservation: str | None = None


class Served(msgspec.Struct, frozen=True):
    """Reply to a call, with the facts that its headers report.

    limit_statuses: the remaining amounts. degraded: they were counted without the shared store.
    fingerprint: id of the vector space of the reply's vectors; None for a reply without vectors.
    is_cut: whether texts have no more tokens than the call allows; False if they could not be cut.
    cache: what the cache had, None if the model has none or it was bypassed. has_cache: the model has one.
    shares_tokens: as in `AttemptRecord`.
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

    def view_of(self, name: str) -> Upstream | GroupView:
        """Return what serves a public name, as operators and callers see it. Raises: ModelNotFound."""
        serving = self.serving
        model = serving.routes.known_name(name)
        group = serving.groups.get(model)
        return serving.upstreams[serving.routes.upstream_of(model)] if group is None else GroupView(group)

    async def serve(self, call: Call, caller: Caller, timeline: Timeline) -> Served:
        """Resolve, prepare, admit and dispatch one call. Raises: GatewayError."""
        tenant = caller.tenant
        operation = operation_of(call.work)
        timeline.operation = operation.value
        tenant.require_operation(operation)
        # Taken once: a reload in the middle of the call changes nothing for it.
        serving = self.serving
        route = serving.routes.resolve(tenant, call.model, operation)
        timeline.model = route.model
        timeline.lap("auth")
        deadline = _deadline(route, caller)
        if route.model in serving.groups:
            return await self._serve_group(serving, call, caller, route, timeline)
        with serving.upstreams[route.upstream].hold() as upstream:
            prepared = await self._preparer.prepare(upstream.model_inputs, tenant, route, call, deadline)
            cache = self._cache_of(caller, route, upstream)
            async with await self._admission.admit(tenant, prepared, deadline, caller.reservation) as grant:
                timeline.lap("quota")
                reply = await self._dispatcher.dispatch(
                    grant, upstream.lane_of(prepared.work), upstream.model_inputs, timeline, cache
                )
                if grant.is_provisional:
                    await grant.confirm()
                    timeline.lap("quota")
            fingerprint = upstream.fingerprint if _has_vectors(reply) else None
        served = self._served(grant, route, reply, fingerprint, cache)
        return _with_usage(served, timeline)

    async def _serve_group(
        self, serving: Serving, call: Call, caller: Caller, route: Route, timeline: Timeline
    ) -> Served:
        """Prepare, admit and dispatch a call of a model with several upstreams. Raises: GatewayError."""
        tenant, deadline, group = caller.tenant, _deadline(route, caller), serving.groups[route.model]
        upstreams = {name: serving.upstreams[name] for name in group.judge.judged}
        caches: dict[str, CallCache | None] = {}
        with ExitStack() as holds:
            # A reload closes none of them while the call waits or moves.
            for upstream in upstreams.values():
                holds.enter_context(upstream.hold())
            names = await group.candidates(tenant.name, call, deadline)
            route = group.narrowed(route, names[0])
            inputs = upstreams[names[0]].model_inputs
            prepared = await self._preparer.prepare(inputs, tenant, route, call, deadline)
            async with await self._admission.admit(tenant, prepared, deadline, caller.reservation) as grant:
                timeline.lap("quota")

                async def send(name: str, *, is_last: bool) -> Reply:
                    upstream, grant.may_move = upstreams[name], not is_last
                    if name != names[0]:
                        again = await self._preparer.prepare_again(
                            upstream.model_inputs, prepared, tenant, deadline
                        )
                        grant.restart(again)
                    cache = caches[name] = self._cache_of(caller, route, upstream)
                    lane = upstream.lane_of(grant.prepared.work)
                    return await self._dispatcher.dispatch(
                        grant, lane, upstream.model_inputs, timeline, cache
                    )

                served_by, reply = await send_in_turn(group, names, send, deadline, self._admission.observe)
                await grant.confirm()
        self.copies.offer(group, ServedCall(call, served_by, reply), partial(self._send_copy, route, tenant))
        route = msgspec.structs.replace(route, upstream=served_by)
        fingerprint = group.space.id if _has_vectors(reply) else None
        served = self._served(grant, route, reply, fingerprint, caches[served_by])
        return _with_usage(served, timeline)

    async def _send_copy(
        self, route: Route, tenant: Tenant, copied: CopiedCall, upstream: str
    ) -> Reply | None:
        """Send a copy of a call, which no tenant pays for; return None if its upstream was removed.

        Raises: GatewayError.
        """
        target = self.upstreams.get(upstream)
        if target is None:
            return None
        route = msgspec.structs.replace(route, upstream=upstream, limits=())
        tenant = msgspec.structs.replace(tenant, limits=())
        deadline, call = _deadline(route, Caller(tenant)), msgspec.structs.replace(copied.call, bulk=True)
        with target.hold():
            prepared = await self._preparer.prepare(target.model_inputs, tenant, route, call, deadline)
            grant = self._admission.grant_copy(tenant, prepared, deadline, copied.purpose)
            lane = target.lane_of(prepared.work)
            return await self._dispatcher.dispatch(grant, lane, target.model_inputs, Timeline())

    def _served(
        self, grant: Grant, route: Route, reply: Reply, fingerprint: str | None, cache: CallCache | None
    ) -> Served:
        cut = grant.prepared.cut
        if cut.indices:
            reply = _with_cut(reply, cut.indices)
        return Served(
            reply,
            grant.tenant,
            route,
            grant.limit_statuses,
            grant.degraded,
            fingerprint,
            is_cut=cut.is_complete,
            cache=None if cache is None else cache.use,
            has_cache=route.cache and self.cache is not None,
        )

    def _cache_of(self, caller: Caller, route: Route, upstream: Upstream) -> CallCache | None:
        """Return the cache of a call, None if its model has none, or the caller bypasses it."""
        if self.cache is None or not route.cache or caller.cache == "bypass":
            return None
        origin = CallOrigin(caller.tenant.name, route.model, upstream.name)
        is_refreshed = caller.cache == "refresh"
        return CallCache(self.cache, origin, partial(identity_of, upstream), is_refreshed=is_refreshed)

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


def _has_vectors(reply: Reply) -> bool:
    return isinstance(reply, EmbedReply) or (isinstance(reply, EncodeReply) and reply.dense is not None)


def _with_usage(served: Served, timeline: Timeline) -> Served:
    """Return a reply with the note that its tokens are a share, if they are."""
    return msgspec.structs.replace(served, shares_tokens=True) if timeline.attempts.shares_tokens else served


def _with_cut(reply: Reply, indices: tuple[int, ...]) -> Reply:
    """Return a reply that reports these inputs as cut, too."""
    if isinstance(reply, TokenizeReply | DetokenizeReply) or reply.truncated is None:
        return reply
    truncated = tuple(sorted({*reply.truncated, *indices}))
    return msgspec.structs.replace(reply, truncated=truncated)


def _deadline(route: Route, caller: Caller) -> Deadline:
    """Return the model's deadline, or the caller's own if that is sooner."""
    by_caller = caller.timeout_s is not None and caller.timeout_s < route.deadline_s
    timeout_s = caller.timeout_s if by_caller and caller.timeout_s else route.deadline_s
    return Deadline(asyncio.get_running_loop().time() + timeout_s, timeout_s, by_caller)
