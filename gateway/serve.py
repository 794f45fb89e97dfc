"""THE STORY: what happens to a call between decode and encode. Read this first.

Each stage takes what the one before it gave, so there is only one order: nothing reaches a replica
without a grant, nothing is granted without a route, and no route is found for nobody.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from backends.contract import EmbedReply, EncodeReply, Reply
from gateway.admission import Admission
from gateway.calls import Call, Deadline, operation_of
from gateway.config.schema import Config
from gateway.dispatch import Dispatcher
from gateway.quotas.limits import LimitStatus
from gateway.routing.routes import Route, Routes
from gateway.tenants.keyring import Keyring, Tenant
from gateway.timeline import Timeline
from gateway.upstreams.upstream import Upstream


class Caller(msgspec.Struct, frozen=True):
    """Who is on the line. timeout_s: what the caller asked for in x-timeout-s."""

    tenant: Tenant
    timeout_s: float | None = None


class Served(msgspec.Struct, frozen=True):
    """A reply and what its headers tell: whose it is, over which route, what is left, whether that was
    counted without the shared store, and which vector space its vectors are in.
    """

    reply: Reply
    tenant: Tenant
    route: Route
    limit_statuses: tuple[LimitStatus, ...]
    degraded: bool = False
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """All that one config makes callable. Replaced whole: a call ends with the set that it began with."""

    config: Config
    routes: Routes
    upstreams: Mapping[str, Upstream]


class Gateway:
    """The collaborators of the story, built once, and the one reference to what is served now."""

    def __init__(
        self, keyring: Keyring, serving: Serving, admission: Admission, dispatcher: Dispatcher
    ) -> None:
        self.keyring = keyring
        self.serving = serving
        self._admission = admission
        self._dispatcher = dispatcher

    @property
    def routes(self) -> Routes:
        """Public names, as they are now."""
        return self.serving.routes

    @property
    def upstreams(self) -> Mapping[str, Upstream]:
        """Upstreams by name, as they are now."""
        return self.serving.upstreams

    async def serve(self, call: Call, caller: Caller, timeline: Timeline) -> Served:
        """A call's whole life. Raises: GatewayError."""
        tenant = caller.tenant
        timeline.tenant = tenant.name
        operation = operation_of(call.work)
        timeline.operation = operation.value
        tenant.require_operation(operation)
        serving = self.serving
        route = serving.routes.resolve(tenant, call.model, operation)
        timeline.model = route.model
        timeline.lap("auth")
        deadline = _deadline(route, caller)
        with serving.upstreams[route.upstream].held() as upstream:
            with await self._admission.admit(tenant, route, upstream, call, deadline) as grant:
                timeline.lap("quota")
                reply = await self._dispatcher.dispatch(grant, call, deadline.at_s, timeline)
            space = upstream.fingerprint if _holds_vectors(reply) else None
        return Served(reply, tenant, route, grant.limit_statuses, grant.degraded, space)


def _holds_vectors(reply: Reply) -> bool:
    return isinstance(reply, EmbedReply) or (isinstance(reply, EncodeReply) and reply.dense is not None)


def _deadline(route: Route, caller: Caller) -> Deadline:
    """The model's deadline, or the caller's own if that is sooner."""
    by_caller = caller.timeout_s is not None and caller.timeout_s < route.deadline_s
    allowed_s = caller.timeout_s if by_caller and caller.timeout_s else route.deadline_s
    return Deadline(asyncio.get_running_loop().time() + allowed_s, by_caller)
