"""OpenAI: GET /v1/models and /v1/models/{id}: what this key may use."""

from typing import Any

import msgspec
from litestar import Request, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.api.answering import Api
from gateway.api.exchange import exchange_of
from gateway.errors import ModelNotFound


class ModelItem(msgspec.Struct):
    """One model. operations: what it can be asked, beyond what OpenAI's own list tells."""

    id: str
    created: int
    owned_by: str
    operations: list[str]
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
    return ModelItem(name, CREATED, routes.upstream_of(name), operations)


@get("/v1/models", tags=["OpenAI"])
async def list_models(request: Request[Any, Any, Any], api: NamedDependency[Api]) -> ModelList:
    """The models that this key may use."""
    tenant = api.identity.of(exchange_of(request.scope))
    return ModelList([_item(api, name) for name in api.gateway.routes.names(tenant)])


@get("/v1/models/{model:path}", tags=["OpenAI"])
async def get_model(
    request: Request[Any, Any, Any], api: NamedDependency[Api], model: FromPath[str]
) -> ModelItem:
    """One model; its name may hold slashes."""
    tenant = api.identity.of(exchange_of(request.scope))
    name = model.removeprefix("/")
    if name not in api.gateway.routes.names(tenant):
        raise ModelNotFound(f"there is no model {name!r} here", param="model")
    return _item(api, name)


HANDLERS = [list_models, get_model]
