"""Ollama: POST /api/embed and /api/embeddings, and what its clients ask first: tags, ps, show and version.

Source: types of the client ollama 0.6.3, whose own server they describe. That answers an empty input with an
empty list.
"""

from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
from litestar import get
from litestar.di import NamedDependency

from backends.contract import Capabilities, Embed, EmbedReply, Operation
from gateway import __version__
from gateway.api.document.fields import TEXTS
from gateway.api.server.body import INTEGER_MAX, ModelName
from gateway.api.server.dialect import Dialect
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import ErrorFormat, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import route_options
from gateway.api.server.request import Request
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import NO_KEY, HttpReply
from gateway.calls import Call
from gateway.errors import GatewayError, InvalidInput, ModelNotFound

# The tag that Ollama adds to a name without one.
DEFAULT_TAG = ":latest"
# The models of a config have no date, and Ollama's clients read one.
MODIFIED_AT = "2023-11-14T22:13:20Z"
# Of a model that no time unloads, as Ollama writes it: its command line shows "Forever".
EXPIRES_AT = "2318-01-01T00:00:00Z"
# States of an upstream, and of a model of the engine.
IN_MEMORY = frozenset({"ready", "loaded"})
NANOSECONDS = 1_000_000_000
# `num_ctx` counts the special tokens around a text; most models have two.
SPECIAL_TOKENS = 2
# Prefix of the facts in `model_info`, which Ollama names after the model's architecture.
ARCHITECTURE = "gateway"

Count = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]


class OllamaError(msgspec.Struct):
    """Source: ollama-python 0.6.3: one sentence, which clients show."""

    error: str


OLLAMA = ErrorFormat("ollama", OllamaError, lambda error: OllamaError(error.message), ("/api/",))
endpoint = partial(inference, errors=OLLAMA, tags=["Ollama"], below_models=False)


class OllamaOptions(msgspec.Struct):
    """Runtime options. num_ctx: the most tokens of an input. Other options change no embedding."""

    takes_other_fields: ClassVar[bool] = True

    num_ctx: Count | None = None


class OllamaEmbedRequest(msgspec.Struct):
    """Body of /api/embed.

    input: one text or a list. dimensions: 0 means all. keep_alive: ignored, because the config decides how
    long a model stays in memory.
    """

    input: str | list[str]
    model: ModelName | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=0, le=65536)] | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaEmbeddingsRequest(msgspec.Struct):
    """Body of /api/embeddings. prompt: one text. The other fields are those of /api/embed."""

    prompt: str
    model: ModelName | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaShowRequest(msgspec.Struct):
    """Body of /api/show. name: older name of `model`. system, template: refused, the gateway has no chat."""

    model: ModelName | None = None
    name: ModelName | None = None
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: OllamaOptions | None = None


class OllamaEmbedResponse(msgspec.Struct):
    """Vectors of length 1, in the order of the inputs. Durations are in nanoseconds.

    load_duration: time in the queue. prompt_eval_count: tokens after truncation, with special tokens.
    """

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsResponse(msgspec.Struct):
    """One vector of length 1."""

    embedding: list[float]


class OllamaDetails(msgspec.Struct, frozen=True):
    """Facts about the file of a model in Ollama. Those that the gateway does not know are empty."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: tuple[str, ...] = ()
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModelItem(msgspec.Struct):
    """One embedding model. digest: fingerprint of its vector space, if it is known. size: 0, not known."""

    name: str
    model: str
    digest: str = ""
    size: int = 0
    modified_at: str = MODIFIED_AT
    details: OllamaDetails = OllamaDetails()


class OllamaModelList(msgspec.Struct):
    """The embedding models that the key may use."""

    models: list[OllamaModelItem]


class OllamaRunningModel(OllamaModelItem, kw_only=True):
    """A model that is in memory. size: bytes there, 0 if they are not known, as of a remote server."""

    expires_at: str = EXPIRES_AT
    size_vram: int = 0
    context_length: int = 0


class OllamaRunningList(msgspec.Struct):
    """The embedding models that the key may use and that answer without being loaded first."""

    models: list[OllamaRunningModel]


class OllamaShowResponse(msgspec.Struct):
    """Facts about one model. model_info: context and embedding length, below the name of an architecture."""

    model_info: dict[str, str | int]
    capabilities: list[str]
    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    modified_at: str = MODIFIED_AT
    details: OllamaDetails = OllamaDetails()


class OllamaVersion(msgspec.Struct):
    """Version of the gateway."""

    version: str


def model_of(name: str | None, api: InferenceApi) -> str | None:
    """Return the model that a body names. Ollama's default tag is left out unless a model has it."""
    if name and name.endswith(DEFAULT_TAG) and name not in api.gateway.routes.all_names():
        return name.removesuffix(DEFAULT_TAG)
    return name


def decode_embed(request: Request[OllamaEmbedRequest]) -> Call:
    """Decode a body of /api/embed. Raises: EmptyInput, InvalidInput, and the errors of `text_tokens_of`."""
    data, api = request.body, request.api
    model = model_of(data.model, api)
    width = width_of(data.dimensions, model, request)
    work = Embed(api.whole_texts(data.input, "input"), dimensions=width)
    return Call(work, model, data.truncate, text_tokens=text_tokens_of(data.options, model, request))


def decode_embeddings(request: Request[OllamaEmbeddingsRequest]) -> Call:
    """Decode a body of /api/embeddings. Raises: the errors of `text_tokens_of`."""
    data = request.body
    model = model_of(data.model, request.api)
    return Call(Embed((data.prompt,)), model, text_tokens=text_tokens_of(data.options, model, request))


def width_of(dimensions: int | None, model: str | None, request: Request[Any]) -> int | None:
    """Return the width to which vectors are cut, or None for the model's own.

    Ollama returns the whole vector if it has fewer components than `dimensions`, and some of its clients send
    768 for every model that they do not know.
    """
    if not dimensions:
        return None
    try:
        known = request.api.dimensions_of(model, Operation.EMBED, request.context.tenant)
    except GatewayError:
        # The call is refused when it is served, with the names that the key may use.
        return dimensions
    return None if known is not None and dimensions >= known else dimensions


def text_tokens_of(options: OllamaOptions | None, model: str | None, request: Request[Any]) -> int | None:
    """Return the most tokens of a text that `num_ctx` allows, or None if the model itself takes no more.

    Raises: the errors of `InferenceApi.capabilities_of`.
    """
    if options is None or not options.num_ctx:
        return None
    capabilities = request.api.capabilities_of(model, Operation.EMBED, request.context.tenant)
    longest = capabilities.max_input_tokens if capabilities else None
    if longest is not None and options.num_ctx >= longest:
        return None
    return max(1, options.num_ctx - SPECIAL_TOKENS)


async def _load(request: Request[Any]) -> tuple[str, dict[str, str]]:
    """Charge one request without a text, with which Ollama's clients load a model.

    Returns the model, and the headers of the reply. Raises: the errors of `Routes.resolve`, QuotaExceeded,
    QuotaUnavailable.
    """
    api = request.api
    tenant = api.authenticator.authenticate(request.context)
    tenant.require_operation(Operation.EMBED)
    route = api.gateway.routes.resolve(tenant, model_of(request.model, api), Operation.EMBED)
    async with api.charging(tenant) as headers:
        return route.model, headers


@endpoint("/api/embed", reply=OllamaEmbedResponse, description="One vector for each input")
async def embed(request: Request[OllamaEmbedRequest]) -> HttpReply:
    """Turn texts into vectors.

    Returns one vector for each input, in the order of the inputs; an empty list for an empty input.
    """
    if not request.body.input:
        model, headers = await _load(request)
        return HttpReply(msgspec.json.encode(OllamaEmbedResponse(model, [], 0, 0, 0)), headers)
    served, reply = await request.serve(decode_embed(request), EmbedReply)
    timeline = request.context.timeline
    body = {
        "model": served.route.model,
        "embeddings": reply.vectors,
        "total_duration": int(timeline.total_s() * NANOSECONDS),
        "load_duration": int(timeline.laps.get("queue", 0.0) * NANOSECONDS),
        "prompt_eval_count": reply.tokens,
    }
    return await request.reply(served, body)


@endpoint("/api/embeddings", reply=OllamaEmbeddingsResponse, description="One vector")
async def embeddings(request: Request[OllamaEmbeddingsRequest]) -> HttpReply:
    """Turn one text into a vector.

    The older form of `/api/embed`.
    """
    if not request.body.prompt:
        _, headers = await _load(request)
        return HttpReply(msgspec.json.encode(OllamaEmbeddingsResponse([])), headers)
    served, reply = await request.serve(decode_embeddings(request), EmbedReply)
    return await request.reply(served, {"embedding": reply.vectors[0]})


@endpoint("/api/show", reply=OllamaShowResponse, description="Facts about the model")
async def show(request: Request[OllamaShowRequest]) -> HttpReply:
    """Describe one embedding model.

    Costs nothing.
    """
    data, api = request.body, request.api
    if data.system or data.template:
        raise InvalidInput("`system` and `template` are not supported: no model here has a chat template")
    model = model_of(data.model or data.name, api)
    if model not in _names(request.context, api):
        raise ModelNotFound(f"there is no embedding model {model!r} here", param="model")
    capabilities = api.capabilities_of(model, Operation.EMBED, request.context.tenant)
    return HttpReply(msgspec.json.encode(OllamaShowResponse(_model_info(capabilities), ["embedding"])), {})


def _model_info(capabilities: Capabilities | None) -> dict[str, str | int]:
    lengths: dict[str, Any] = {}
    if capabilities is not None:
        lengths = {
            "context_length": capabilities.max_input_tokens,
            "embedding_length": capabilities.dimensions,
        }
    known = {f"{ARCHITECTURE}.{field}": value for field, value in lengths.items() if value is not None}
    return {"general.architecture": ARCHITECTURE} | known


def _names(context: RequestContext, api: InferenceApi) -> list[str]:
    """Return the names of the caller's models that embed, as far as their operations are known."""
    names = api.gateway.routes.names(api.authenticator.authenticate(context))
    return [name for name in names if Operation.EMBED in api.gateway.routes.operations(name)]


@get("/api/tags", responses=document_errors(OLLAMA), tags=["Ollama"], opt=route_options(errors=OLLAMA))
async def tags(
    context: NamedDependency[RequestContext], api: NamedDependency[InferenceApi]
) -> OllamaModelList:
    """List the embedding models that this key may use."""
    fingerprints = {name: api.gateway.view_of(name).fingerprint or "" for name in _names(context, api)}
    return OllamaModelList([OllamaModelItem(name, name, digest) for name, digest in fingerprints.items()])


@get("/api/ps", responses=document_errors(OLLAMA), tags=["Ollama"], opt=route_options(errors=OLLAMA))
async def running(
    context: NamedDependency[RequestContext], api: NamedDependency[InferenceApi]
) -> OllamaRunningList:
    """List the embedding models of `/api/tags` that are in memory, here or at a server that answers."""
    found = [_running(name, api) for name in _names(context, api)]
    return OllamaRunningList([model for model in found if model is not None])


def _running(name: str, api: InferenceApi) -> OllamaRunningModel | None:
    """Return a model as /api/ps lists it, None if it is not in memory."""
    upstream = api.gateway.view_of(name)
    residence, capabilities = upstream.residence, upstream.capabilities
    if capabilities is None or (upstream.state if residence is None else residence.state) not in IN_MEMORY:
        return None
    return OllamaRunningModel(
        name,
        name,
        upstream.fingerprint or "",
        0 if residence is None else residence.memory_bytes,
        context_length=capabilities.max_input_tokens or 0,
    )


@get("/api/version", tags=["Ollama"], opt=route_options(errors=OLLAMA), security=NO_KEY)
async def version() -> OllamaVersion:
    """Return the version of the gateway.

    Needs no key.
    """
    return OllamaVersion(__version__)


EXAMPLES: dict[type[msgspec.Struct], Any] = {
    OllamaEmbedRequest: {"model": "bge", "input": TEXTS},
    OllamaEmbeddingsRequest: {"model": "bge", "prompt": TEXTS[0]},
    OllamaShowRequest: {"model": "bge"},
}
MEANINGS = {
    "keep_alive": "It changes nothing: the config decides how long a model stays in memory.",
    "name": "Older name of `model`.",
    "system": "Refused unless it is empty: the gateway has no chat.",
    "template": "Refused unless it is empty: the gateway has no chat.",
    "verbose": "It changes nothing.",
    "OllamaEmbedRequest.dimensions": "Width to which longer vectors are cut; 0 is the model's own.",
    "OllamaEmbedRequest.options": "Only `num_ctx`, the most tokens of an input, has an effect.",
    "OllamaEmbeddingsRequest.options": "Only `num_ctx`, the most tokens of the text, has an effect.",
    "OllamaShowRequest.options": "They change nothing.",
    "OllamaOptions.num_ctx": "Number of tokens to which an input is cut.",
}
DIALECT = Dialect(
    handlers=[embed, embeddings, show, tags, running, version],
    tags={"Ollama": "The embedding paths of Ollama, and its list of models."},
    examples=EXAMPLES,
    meanings=MEANINGS,
)
