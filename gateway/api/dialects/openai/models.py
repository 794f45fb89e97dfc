"""GET /v1/models and /v1/models/{id}, also without /v1: the models that a key may use.

OpenAI's, Mistral's and Xinference's clients read `data`, SIE's read `models`.
Source: OpenAI OpenAPI document 2.3.0; sie-sdk 0.10.1, `ModelInfo`; mistralai 3.7, `BaseModelCard`;
xinference-client 4.1, `RESTfulClient.get_model`.
"""

from typing import Literal

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath

from backends.contract import Capabilities, ModelState, Operation, Output
from gateway.api.server.error_bodies import OPENAI, TEI, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import BELOW_MODEL, model_name, route_options
from gateway.api.server.request_context import RequestContext
from gateway.errors import ModelNotFound
from gateway.tenants.keyring import Tenant
from gateway.upstreams.member import UpstreamState

FAILURES = document_errors(OPENAI)


SieState = Literal["available", "loading", "loaded", "failed"]


class MistralCapabilities(msgspec.Struct):
    """Abilities of a model in Mistral's terms. The gateway has no chat and no fine-tuning."""

    vision: bool
    audio: bool
    classification: bool
    completion_chat: bool = False
    completion_fim: bool = False
    function_calling: bool = False
    fine_tuning: bool = False


class OpenAIModelItem(msgspec.Struct):
    """One model, with fields beyond OpenAI's.

    operations: that it can serve. state: whether it can serve now (refused: its only replicas have a
    different vector space). fingerprint: of its vector space. residence: whether an engine has it in memory;
    a model that is not in memory is loaded by the first request. last_error: why it could not be loaded.
    default_for: keys of `defaults` in router.yaml that select it. max_model_len: the most tokens of an input,
    as in vLLM; null if it is unknown. price_per_million_tokens: in `currency`; both are absent where tokens
    cost nothing. type, capabilities and max_context_length are Mistral's; the length is absent if it is
    unknown. model_type is Xinference's, which has none for a model that only classifies.
    """

    id: str
    created: int
    owned_by: str
    capabilities: MistralCapabilities
    operations: list[str]
    state: UpstreamState
    fingerprint: str | None
    residence: ModelState | None = None
    last_error: str | None = None
    default_for: list[str] = []
    max_model_len: int | None = None
    price_per_million_tokens: float | msgspec.UnsetType = msgspec.UNSET
    currency: str | msgspec.UnsetType = msgspec.UNSET
    max_context_length: int | msgspec.UnsetType = msgspec.UNSET
    model_type: Literal["embedding", "rerank"] | msgspec.UnsetType = msgspec.UNSET
    type: str = "base"
    object: str = "model"


class SieModelItem(msgspec.Struct):
    """One model as SIE lists it.

    state: available if its next request loads it. outputs: kinds of output, and score for a reranker. dims:
    width of the dense vectors, if it is known. Every model has one profile.
    """

    name: str
    loaded: bool
    state: SieState
    outputs: list[str]
    dims: dict[str, int]
    max_sequence_length: int | None
    inputs: tuple[str, ...] = ("text",)
    aliases: tuple[str, ...] = ()


class OpenAIModelList(msgspec.Struct):
    """The models that the key may use. models: the same in SIE's form."""

    data: list[OpenAIModelItem]
    models: list[SieModelItem]
    object: str = "list"


SIE_STATES: dict[UpstreamState, SieState] = {
    "ready": "loaded",
    "loading": "loading",
    "refused": "failed",
    "unavailable": "available",
    "canary_only": "loaded",
}
# SIE's names of inputs besides text.
SIE_INPUTS = {Operation.EMBED_IMAGE: "image", Operation.EMBED_AUDIO: "audio"}
# The first that a model has: an embedding model may also rank.
XINFERENCE_TYPES: dict[Operation, Literal["embedding", "rerank"]] = {
    Operation.EMBED: "embedding",
    Operation.ENCODE: "embedding",
    Operation.RERANK: "rerank",
}
# OpenAI's clients require a creation time, and the models of a config have none.
CREATED = 1_700_000_000


def _item(api: InferenceApi, name: str, tenant: Tenant) -> OpenAIModelItem:
    routes = api.gateway.routes
    operations = routes.operations(name)
    upstream = api.gateway.view_of(name)
    residence, capabilities = upstream.residence, upstream.capabilities
    config = api.gateway.serving.config
    price = config.models[name].price_per_million_tokens
    length = capabilities.max_input_tokens if capabilities else None
    return OpenAIModelItem(
        name,
        CREATED,
        upstream.name,
        MistralCapabilities(
            vision=Operation.EMBED_IMAGE in operations,
            audio=Operation.EMBED_AUDIO in operations,
            classification=Operation.CLASSIFY in operations,
        ),
        [operation.value for operation in operations],
        upstream.state,
        upstream.fingerprint,
        None if residence is None else residence.state,
        None if residence is None else residence.error,
        routes.defaults_of(name, tenant),
        length,
        price or msgspec.UNSET,
        (price and config.currency) or msgspec.UNSET,
        length or msgspec.UNSET,
        next(
            (kind for operation, kind in XINFERENCE_TYPES.items() if operation in operations), msgspec.UNSET
        ),
    )


def _sie_item(api: InferenceApi, name: str) -> SieModelItem:
    upstream = api.gateway.view_of(name)
    capabilities, residence = upstream.capabilities, upstream.residence
    is_unloaded = residence is not None and residence.state == "unloaded"
    state = "available" if is_unloaded else SIE_STATES[upstream.state]
    width = upstream.dimensions
    operations = api.gateway.routes.operations(name) if capabilities else []
    return SieModelItem(
        name,
        state == "loaded",
        state,
        _outputs(capabilities, api.gateway.routes.operations(name)),
        {} if width is None else {"dense": width},
        capabilities.max_input_tokens if capabilities else None,
        ("text", *(kind for operation, kind in SIE_INPUTS.items() if operation in operations)),
    )


def _outputs(capabilities: Capabilities | None, operations: list[Operation]) -> list[str]:
    """Return the kinds of output of a model under SIE's names."""
    kinds = capabilities.outputs if capabilities else frozenset()
    outputs = [kind.value for kind in (Output.SPARSE, Output.MULTIVECTOR) if kind in kinds]
    if Operation.EMBED in operations:
        return ["dense", *outputs]
    return outputs or [*["score"] * (Operation.RERANK in operations)]


@get(
    ["/v1/models", "/models", "/openai/v1/models", "/openai/models"],
    responses=FAILURES,
    tags=["OpenAI"],
    opt=route_options(errors=OPENAI),
)
async def list_models(
    context: NamedDependency[RequestContext], api: NamedDependency[InferenceApi]
) -> OpenAIModelList:
    """List the models that this key may use."""
    tenant = api.authenticator.authenticate(context)
    names = api.gateway.routes.names(tenant)
    return OpenAIModelList(
        [_item(api, name, tenant) for name in names], [_sie_item(api, name) for name in names]
    )


@get(
    ["/v1/models/{model:path}", "/openai/v1/models/{model:path}", "/openai/models/{model:path}"],
    responses=FAILURES,
    tags=["OpenAI"],
)
async def get_model(
    context: NamedDependency[RequestContext], api: NamedDependency[InferenceApi], model: FromPath[str]
) -> OpenAIModelItem:
    """Describe one model.

    The name may contain slashes.
    """
    return _described(api, context, (model_name(model) or "").removeprefix("/"))


# Errors of this path are TEI's, whose default operation a POST calls there.
@get(BELOW_MODEL, responses=document_errors(TEI), tags=["OpenAI"])
async def get_model_without_version(
    context: NamedDependency[RequestContext], api: NamedDependency[InferenceApi], name: FromPath[str]
) -> OpenAIModelItem:
    """Describe one model, as `/v1/models/{id}` does, to clients whose address ends before `/v1`."""
    return _described(api, context, model_name(name) or "")


def _described(api: InferenceApi, context: RequestContext, name: str) -> OpenAIModelItem:
    tenant = api.authenticator.authenticate(context)
    if name not in api.gateway.routes.names(tenant):
        raise ModelNotFound(f"there is no model {name!r} here", param="model")
    return _item(api, name, tenant)


HANDLERS = [list_models, get_model, get_model_without_version]
