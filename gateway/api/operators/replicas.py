"""Operator endpoints for replicas: keep work away from one, end that, and compare the vectors of several.

A drain is stored with the additions, so that every worker and gateway follows it.
"""

from functools import partial
from typing import Annotated

import msgspec
from litestar import post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody

from gateway.api.operators.access import OPERATORS
from gateway.api.operators.additions import AdditionsApi
from gateway.api.operators.admin import CHANGED, ReloadReport
from gateway.api.server.body import ModelName, OnePass
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.audit.records import Actor
from gateway.declared.additions import Drain
from gateway.errors import InvalidInput, NotFound, Overloaded
from gateway.serve import Gateway, Serving
from gateway.upstreams.upstream import Upstream
from gateway.upstreams.verification import Verification, comparable_replicas, verify

FAILURES = document_errors(TEI)
NAMES_MAX = 64
# A comparison has a line for every two replicas.
REPLICAS_MAX = 64
# Models named in the refusal of a drain.
MODELS_SHOWN = 8
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]


class ReplicaBody(msgspec.Struct, forbid_unknown_fields=True):
    """A replica. upstream: its name. replica: its address, as `replicas` of the upstream lists it."""

    upstream: ModelName
    replica: Address


class VerifyBody(msgspec.Struct, forbid_unknown_fields=True):
    """Upstreams whose replicas are compared, by name."""

    upstreams: Annotated[list[ModelName], msgspec.Meta(min_length=1, max_length=NAMES_MAX)]


class ReplicasApi:
    """Actions on replicas. adding: sends edits to the parent process, which stores them."""

    def __init__(self, gateway: Gateway, adding: AdditionsApi) -> None:
        self._gateway = gateway
        self._adding = adding
        self._is_verifying = False

    async def drain(self, body: ReplicaBody, by: Actor) -> ReloadReport:
        """Keep new work away from a replica. Raises: GatewayError."""
        _check_drainable(self._upstream(body.upstream), body.replica, self._gateway.serving)
        return await self._adding.edit(Drain(body.upstream, body.replica, is_drained=True, by=by))

    async def undrain(self, body: ReplicaBody, by: Actor) -> ReloadReport:
        """Give a drained replica work again. Raises: GatewayError."""
        return await self._adding.edit(Drain(body.upstream, body.replica, is_drained=False, by=by))

    async def verify(self, body: VerifyBody) -> Verification:
        """Compare the vectors of replicas. Raises: GatewayError."""
        upstreams = [self._upstream(name) for name in dict.fromkeys(body.upstreams)]
        count = sum(len(comparable_replicas(upstream)) for upstream in upstreams)
        if count > REPLICAS_MAX:
            message = f"{count} replicas, and at most {REPLICAS_MAX} are compared: name fewer upstreams"
            raise InvalidInput(message, param="upstreams")
        if self._is_verifying:
            # It is work for every replica.
            raise Overloaded("another comparison of replicas is running")
        self._is_verifying = True
        try:
            return await verify(upstreams, self._gateway.serving.config.models)
        finally:
            self._is_verifying = False

    def _upstream(self, name: str) -> Upstream:
        upstream = self._gateway.upstreams.get(name)
        if upstream is None:
            raise NotFound(f"there is no upstream {name!r}")
        return upstream


def _check_drainable(upstream: Upstream, name: str, serving: Serving) -> None:
    """Check that the upstream lists the replica, and its models can do without it. Raises: GatewayError."""
    if upstream.settings.is_local:
        raise InvalidInput("engines are not drained; stop an instance, which drains it", param="replica")
    if upstream.settings.discover is not None:
        message = "this upstream has the replicas that its name resolves to: take the address out of the name"
        raise InvalidInput(message, param="replica")
    if name not in upstream.settings.replicas:
        raise NotFound(f"upstream {upstream.name!r} has no replica {name!r}")
    usable = [replica.name for replica in upstream.pool.usable()]
    if usable == [name] and (models := _models_in_need(upstream.name, serving)):
        names = ", ".join(models[:MODELS_SHOWN])
        more = f" and {len(models) - MODELS_SHOWN} more" if len(models) > MODELS_SHOWN else ""
        message = (
            f"it is the last replica that serves {names}{more}: "
            "add a replica or another upstream first, or remove the models"
        )
        raise InvalidInput(message, param="replica")


def _models_in_need(upstream: str, serving: Serving) -> list[str]:
    """Return the models that no other upstream serves now."""
    return [
        name
        for name, model in serving.config.models.items()
        if upstream in {member.name for member in model.members}
        and not (name in serving.groups and serving.groups[name].can_do_without(upstream))
    ]


# Declares a handler of an action on replicas.
_action = partial(post, return_dto=None, status_code=200, tags=["Operators"], opt=OPERATORS)


@_action("/admin/replicas/drain", dto=OnePass[ReplicaBody], responses=CHANGED | FAILURES)
async def drain_replica(
    data: JSONBody[ReplicaBody], replicas: NamedDependency[ReplicasApi], operator: NamedDependency[Actor]
) -> ReloadReport:
    """Give a replica no new work, until it is put back.

    Batches in flight finish; `/admin/status` counts them. Every gateway that shares the store follows.
    """
    return await replicas.drain(data, operator)


@_action("/admin/replicas/undrain", dto=OnePass[ReplicaBody], responses=CHANGED | FAILURES)
async def undrain_replica(
    data: JSONBody[ReplicaBody], replicas: NamedDependency[ReplicasApi], operator: NamedDependency[Actor]
) -> ReloadReport:
    """Give a drained replica work again.

    It is probed as before, and gets work once it responds.
    """
    return await replicas.undrain(data, operator)


@_action(
    "/admin/replicas/verify",
    dto=OnePass[VerifyBody],
    responses={
        200: ResponseSpec(Verification, generate_examples=False, description="The comparison, as a matrix")
    }
    | FAILURES,
)
async def verify_replicas(data: JSONBody[VerifyBody], replicas: NamedDependency[ReplicasApi]) -> Verification:
    """Compare the vectors that replicas return for the reference texts.

    Each is compared with the others, and with the fingerprint of its upstream, as by `gateway verify`.
    """
    return await replicas.verify(data)


HANDLERS = [drain_replica, undrain_replica, verify_replicas]
