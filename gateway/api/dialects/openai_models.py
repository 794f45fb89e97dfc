"""OpenAI: GET /v1/models and /v1/models/{id}: what this key may use."""

from typing import Any

import msgspec
from litestar import Request, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from backends.contract import ModelState
from gateway.api.server.error_bodies import documented
from gateway.api.server.request_context import context_of
from gateway.api.server.responses import Api
from gateway.errors import ModelNotFound
from gateway.upstreams.upstream import UpstreamState

FAILURES = documented("openai")


class ModelItem(msgspec.Struct):
    """One model. Beyond what OpenAI's own list tells: operations, what it can be asked; state, whether it
    can be now (refused: only by replicas of another vector space); fingerprint, its vector space; residence,
    whether an engine has it in memory (one that is not is loaded when it is asked); last_error, why it could
    not be loaded.
    """

    id: str
    created: int
    owned_by: str
    operations: list[str]
    state: UpstreamState
    fingerprint: str | None
    residence: ModelState | None = None
    last_error: str | None = None
    object: str = "model"


class ModelList(msgspec.Struct):
    """All models that the key may use."""

    data: list[ModelItem]
    object: str = "list"


# OpenAI's clients want a time of creation; the models of a config have none.
CREATED = 1_700_000_000


def _item(api: Api, name: str) -> ModelItem:
    routes = api.gateway.routes
    operations = [operation.value for operation in routes.operations(name)]
    upstream = api.gateway.upstreams[routes.upstream_of(name)]
    told = upstream.residence
    return ModelItem(
        name,
        CREATED,
        upstream.name,
        operations,
        upstream.state,
        upstream.fingerprint,
        None if told is None else told.state,
        None if told is None else told.error,
    )


@get("/v1/models", responses=FAILURES, tags=["OpenAI"])
async def list_models(request: Request[Any, Any, Any], api: NamedDependency[Api]) -> ModelList:
    """The models that this key may use."""
    tenant = api.authenticator.authenticate(context_of(request.scope))
    return ModelList([_item(api, name) for name in api.gateway.routes.names(tenant)])


@get("/v1/models/{model:path}", responses=FAILURES, tags=["OpenAI"])
async def get_model(
    request: Request[Any, Any, Any], api: NamedDependency[Api], model: FromPath[str]
) -> ModelItem:
    """One model; its name may hold slashes."""
    tenant = api.authenticator.authenticate(context_of(request.scope))
    name = model.removeprefix("/")
    if name not in api.gateway.routes.names(tenant):
        raise ModelNotFound(f"there is no model {name!r} here", param="model")
    return _item(api, name)


HANDLERS = [list_models, get_model]
