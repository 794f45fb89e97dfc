"""Gemini: embedContent, batchEmbedContents and countTokens, and the list of models.

/v1/models, and a model there, are OpenAI's; Gemini's are below /v1beta.
Source: Gemini API v1 and v1beta, embeddings and models; google-genai 3.4.0, which sends texts in batches.
Names of fields are those of protobuf's JSON: camel case, or snake case as in the `.proto` files.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath

from backends.contract import EmbedReply, Operation, Tokenize, TokenizeReply
from gateway.api.dialects.gemini.contents import GeminiContent, one_of
from gateway.api.document.fields import CUT, QUERY, REFUSED, TEXTS
from gateway.api.server.body import ModelName
from gateway.api.server.call_io import Scope
from gateway.api.server.dialect import Dialect, KeyHeader
from gateway.api.server.encoding import PLAIN_FLOATS
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import ErrorFormat, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import NAME, model_name, route_options
from gateway.api.server.request import LEAST_WITHOUT_TOKENS, Request
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.media import VectorOptions, embed_inputs
from gateway.api.wire.replies import vector_list
from gateway.api.wire.tokens import tokenize_checked
from gateway.calls import Call
from gateway.errors import GatewayError, InvalidInput, ModelNotFound
from gateway.media.sources import Fetch
from gateway.prompts import Role

TaskType = Literal[
    "TASK_TYPE_UNSPECIFIED",
    "RETRIEVAL_QUERY",
    "RETRIEVAL_DOCUMENT",
    "SEMANTIC_SIMILARITY",
    "CLASSIFICATION",
    "CLUSTERING",
    "QUESTION_ANSWERING",
    "FACT_VERIFICATION",
    "CODE_RETRIEVAL_QUERY",
]
ROLE_OF_TASK: dict[TaskType, Role] = {
    "RETRIEVAL_QUERY": "query",
    "RETRIEVAL_DOCUMENT": "document",
    "SEMANTIC_SIMILARITY": "similarity",
    "CLASSIFICATION": "classification",
    "CLUSTERING": "clustering",
    "QUESTION_ANSWERING": "query",
    "FACT_VERIFICATION": "query",
    "CODE_RETRIEVAL_QUERY": "query",
}
RESOURCE = "models/"
# Paths of models that Google's clients share with OpenAI's, and Gemini's own.
SHARED = "/v1/models"
OWN = "/v1beta/models"
KEY_HEADER = KeyHeader("x-goog-api-key", "gemini", "The key as Google's clients send it.")
METHODS = ("embedContent", "batchEmbedContents", "countTokens")
# Fields of countTokens that belong to models that answer.
FIELDS_OF_CHATS = {
    "generate_content_request": "generateContentRequest",
    "system_instruction": "systemInstruction",
    "tools": "tools",
    "generation_config": "generationConfig",
}
# 0 is protobuf's default and means all dimensions.
Width = Annotated[int, msgspec.Meta(ge=0, le=65536)]


class GeminiErrorDetail(msgspec.Struct):
    """Source: google.rpc.Status: code repeats the HTTP status, status is the name of a gRPC code."""

    code: int
    message: str
    status: str


class GeminiError(msgspec.Struct):
    """Gemini's envelope."""

    error: GeminiErrorDetail


# Source: google.rpc.Code, which maps each code to one HTTP status.
GEMINI_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    409: "ALREADY_EXISTS",
    412: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def _gemini_error(error: GatewayError) -> GeminiError:
    status = error.facts.status
    return GeminiError(
        GeminiErrorDetail(status, error.message, GEMINI_STATUSES.get(status, "INVALID_ARGUMENT"))
    )


GEMINI = ErrorFormat("gemini", GeminiError, _gemini_error, ("/v1beta/",))
endpoint = partial(inference, errors=GEMINI, tags=["Gemini"], below_models=False)


class EmbedContentConfig(msgspec.Struct):
    """Newer place of the options of a request. autoTruncate: whether inputs that are too long are cut."""

    task_type: TaskType | None = msgspec.field(default=None, name="taskType")
    title: str | None = None
    output_dimensionality: Width | None = msgspec.field(default=None, name="outputDimensionality")
    auto_truncate: bool | None = msgspec.field(default=None, name="autoTruncate")


class EmbedContentRequest(msgspec.Struct, kw_only=True):
    """Body of embedContent, and one of the requests of batchEmbedContents.

    model: the one in the path, if it is there. title: refused, because models here have no place for it.
    task_type, output_dimensionality: the same as taskType and outputDimensionality.
    """

    content: GeminiContent
    model: ModelName | None = None
    task_type: TaskType | None = msgspec.field(default=None, name="taskType")
    task_type_snake: TaskType | None = msgspec.field(default=None, name="task_type")
    title: str | None = None
    output_dimensionality: Width | None = msgspec.field(default=None, name="outputDimensionality")
    output_dimensionality_snake: Width | None = msgspec.field(default=None, name="output_dimensionality")
    config: EmbedContentConfig | None = msgspec.field(default=None, name="embedContentConfig")


class BatchEmbedContentsRequest(msgspec.Struct):
    """Body of batchEmbedContents. requests: they all have the same options."""

    requests: list[EmbedContentRequest]


class CountTokensRequest(msgspec.Struct):
    """Body of countTokens. contents: texts to count. The other fields are of chats, and refused."""

    contents: list[GeminiContent]
    generate_content_request: Any = msgspec.field(default=None, name="generateContentRequest")
    system_instruction: Any = msgspec.field(default=None, name="systemInstruction")
    tools: Any = None
    generation_config: Any = msgspec.field(default=None, name="generationConfig")


class CountTokensResponse(msgspec.Struct):
    """Sum of the tokens of all contents, with special tokens, not truncated and without a prompt."""

    total_tokens: int = msgspec.field(name="totalTokens")


class ContentEmbedding(msgspec.Struct):
    """One vector of length 1."""

    values: list[float]


class GeminiUsage(msgspec.Struct):
    """Tokens after truncation, with special tokens and the prompt."""

    prompt_token_count: int = msgspec.field(name="promptTokenCount")
    total_token_count: int = msgspec.field(name="totalTokenCount")


class EmbedContentResponse(msgspec.Struct):
    """The vector of the content."""

    embedding: ContentEmbedding
    usage: GeminiUsage = msgspec.field(name="usageMetadata")


class BatchEmbedContentsResponse(msgspec.Struct):
    """Vectors, in the order of the requests."""

    embeddings: list[ContentEmbedding]
    usage: GeminiUsage = msgspec.field(name="usageMetadata")


class GeminiModel(msgspec.Struct, omit_defaults=True):
    """One embedding model. inputTokenLimit: only if the model reports it."""

    name: str
    display_name: str = msgspec.field(name="displayName")
    methods: tuple[str, ...] = msgspec.field(name="supportedGenerationMethods")
    input_token_limit: int | None = msgspec.field(default=None, name="inputTokenLimit")


class GeminiModelList(msgspec.Struct):
    """The embedding models that the key may use."""

    models: list[GeminiModel]


class Options(msgspec.Struct, frozen=True):
    """Options of one request. dimensions: None for all."""

    task: TaskType
    dimensions: int | None
    truncate: bool | None


async def decode_requests(
    requests: Sequence[EmbedContentRequest], name: str, api: InferenceApi, fetch: Fetch | None = None
) -> Call:
    """Decode the requests of a body into one call. name: the model in the path. fetch: as in `fetch_sources`.

    Raises: EmptyInput, InvalidInput, and the errors of `fetch`.
    """
    api.check_count(len(requests), "requests")
    inputs = [request.content.sources(index) for index, request in enumerate(requests)]
    distinct = {options_of(request, name) for request in requests}
    if len(distinct) > 1:
        raise InvalidInput(
            "the requests of a batch have the same taskType and outputDimensionality: send several",
            param="requests",
        )
    (options,) = distinct
    role = ROLE_OF_TASK.get(options.task)
    work = await embed_inputs(inputs, "content", VectorOptions(dimensions=options.dimensions), fetch)
    return Call(work, name, options.truncate, role=role)


def options_of(request: EmbedContentRequest, name: str) -> Options:
    """Return the options of one request. name: the model in the path.

    Raises: InvalidInput if it names a different model, has a title, or an option twice with two values.
    """
    config = request.config or EmbedContentConfig()
    if request.model is not None and request.model.removeprefix(RESOURCE) != name:
        raise InvalidInput(f"`model` is {request.model!r}, the path has {name!r}", param="model")
    if request.title or config.title:
        raise InvalidInput(
            "`title` is not supported: put it in front of the text, as the model expects", param="title"
        )
    tasks = (request.task_type, request.task_type_snake, config.task_type)
    widths = (
        request.output_dimensionality,
        request.output_dimensionality_snake,
        config.output_dimensionality,
    )
    task: TaskType | None = one_of(tasks, "taskType")
    return Options(
        task or "TASK_TYPE_UNSPECIFIED", one_of(widths, "outputDimensionality") or None, config.auto_truncate
    )


def decode_count(data: CountTokensRequest, name: str, api: InferenceApi) -> Call:
    """Decode a body of countTokens. name: the model in the path. Raises: EmptyInput, InvalidInput."""
    for field, spelled in FIELDS_OF_CHATS.items():
        if getattr(data, field):
            raise InvalidInput(
                f"`{spelled}` is not supported: the models here read texts; send `contents` alone",
                param=spelled,
            )
    api.check_count(len(data.contents), "contents")
    texts = api.texts([content.text(index) for index, content in enumerate(data.contents)], "contents")
    return Call(tokenize_checked(Tokenize(texts), "contents"), name)


def _paths(method: str) -> tuple[str, ...]:
    """Return the paths of a method.

    The last is for names with a slash: Google's first client for JavaScript, which LangChain's class has
    within it, takes them for whole resource names and leaves `models/` out.
    """
    bases = ("/v1/models", "/v1beta/models", "/v1beta")
    return tuple(f"{base}/{NAME}/:{method}" for base in bases)


def _usage(tokens: int) -> dict[str, int]:
    return {"promptTokenCount": tokens, "totalTokenCount": tokens}


@endpoint(
    *_paths("batchEmbedContents"),
    reply=BatchEmbedContentsResponse,
    description="One vector for each request",
)
async def batch_embed_contents(request: Request[BatchEmbedContentsRequest]) -> HttpReply:
    """Turn contents of texts, images and sound into vectors.

    Returns one vector for each request, in order. The requests have the same options.
    """
    call = await decode_requests(request.body.requests, request.name or "", request.api, request.fetch)
    served, reply = await request.serve(call, EmbedReply)
    embeddings = vector_list(reply.vectors, PLAIN_FLOATS, lambda _, row: {"values": row})
    return await request.reply(served, {"embeddings": embeddings, "usageMetadata": _usage(reply.tokens)})


@endpoint(
    *_paths("embedContent"),
    reply=EmbedContentResponse,
    description="One vector",
)
async def embed_content(request: Request[EmbedContentRequest]) -> HttpReply:
    """Turn one content into a vector."""
    call = await decode_requests([request.body], request.name or "", request.api, request.fetch)
    served, reply = await request.serve(call, EmbedReply)
    embedding = {"values": reply.vectors[0]}
    return await request.reply(served, {"embedding": embedding, "usageMetadata": _usage(reply.tokens)})


@endpoint(
    *_paths("countTokens"),
    reply=CountTokensResponse,
    description="The number of tokens",
    least=LEAST_WITHOUT_TOKENS,
)
async def count_tokens(request: Request[CountTokensRequest]) -> HttpReply:
    """Count the tokens of texts, as the model reads them.

    Costs no tokens of a quota, as /tokenize.
    """
    call = decode_count(request.body, request.name or "", request.api)
    served, reply = await request.serve(call, TokenizeReply)
    return await request.reply(served, {"totalTokens": sum(map(len, reply.inputs))})


def _models(api: InferenceApi, context: RequestContext) -> list[GeminiModel]:
    tenant, routes = api.authenticator.authenticate(context), api.gateway.routes
    names = [name for name in routes.names(tenant) if Operation.EMBED in routes.operations(name)]
    return [_model(api, name) for name in names]


def _model(api: InferenceApi, name: str) -> GeminiModel:
    capabilities = api.capabilities_of(name, Operation.EMBED, None)
    longest = capabilities.max_input_tokens if capabilities else None
    return GeminiModel(RESOURCE + name, name, METHODS, longest)


@get("/v1beta/models", responses=document_errors(GEMINI), tags=["Gemini"], opt=route_options(errors=GEMINI))
async def list_models(
    context: NamedDependency[RequestContext], api: NamedDependency[InferenceApi]
) -> GeminiModelList:
    """List the embedding models that this key may use."""
    return GeminiModelList(_models(api, context))


@get(
    "/v1beta/models/{name:str}",
    responses=document_errors(GEMINI),
    tags=["Gemini"],
    opt=route_options(errors=GEMINI, name_has_slashes=True),
)
async def get_model(
    context: NamedDependency[RequestContext], api: NamedDependency[InferenceApi], name: FromPath[str]
) -> GeminiModel:
    """Describe one embedding model.

    The name may contain slashes.
    """
    resource = RESOURCE + (model_name(name) or "")
    for model in _models(api, context):
        if model.name == resource:
            return model
    raise ModelNotFound(f"there is no embedding model {resource!r} here", param="model")


def move_path(scope: Scope) -> None:
    """Move a request for models to Gemini's path if its key stands where only Google's clients send it."""
    path: str = scope["path"]
    if not (path == SHARED or path.startswith(f"{SHARED}/")):
        return
    raw: bytes = scope.get("raw_path", path.encode())
    if not raw.startswith(SHARED.encode()):
        return
    names = {name for name, _ in scope["headers"]}
    if KEY_HEADER.name.encode() in names and b"authorization" not in names:
        scope["path"] = OWN + path.removeprefix(SHARED)
        scope["raw_path"] = OWN.encode() + raw[len(SHARED) :]


EXAMPLES: dict[type[msgspec.Struct], Any] = {
    BatchEmbedContentsRequest: {
        "requests": [{"model": "models/bge", "content": {"parts": [{"text": text}]}} for text in TEXTS]
    },
    CountTokensRequest: {"contents": [{"parts": [{"text": text}]} for text in TEXTS]},
    EmbedContentRequest: {"content": {"parts": [{"text": QUERY}]}, "taskType": "RETRIEVAL_QUERY"},
}
MEANINGS = {
    "embedContentConfig": "Newer place of the options.",
    "outputDimensionality": "Width to which vectors are cut; 0 is the model's own.",
    "output_dimensionality": "The same as `outputDimensionality`.",
    "requests": "One request for each input, all with the same options.",
    "taskType": "Purpose of the input, which selects the prompt put before it.",
    "task_type": "The same as `taskType`.",
    "title": "Refused unless it is empty: put it in front of the text.",
    "CountTokensRequest.generateContentRequest": REFUSED,
    "CountTokensRequest.systemInstruction": REFUSED,
    "CountTokensRequest.tools": REFUSED,
    "CountTokensRequest.generationConfig": REFUSED,
    "CountTokensRequest.contents": "Texts whose tokens are counted and added.",
    "EmbedContentRequest.model": "The model in the path, if it is there.",
    "EmbedContentConfig.taskType": "Purpose of the input, which selects the prompt put before it.",
    "EmbedContentConfig.title": "Refused unless it is null: no prompt here has a place for a title.",
    "EmbedContentConfig.outputDimensionality": "Width to which the vector is cut.",
    "EmbedContentConfig.autoTruncate": CUT,
    "EmbedContentRequest.content": "The input, whose parts have one vector.",
    "GeminiContent.parts": "Texts, images and recordings. Texts without others are lines of one text.",
    "GeminiContent.role": "Changes nothing.",
    "GeminiPart.text": "The text of the part.",
    "GeminiPart.inlineData": "An image or a recording in base64.",
    "GeminiPart.inline_data": "The same as `inlineData`.",
    "GeminiPart.fileData": "An image or a recording at an address that `media.fetch` allows.",
    "GeminiPart.file_data": "The same as `fileData`.",
    "GeminiPart.videoMetadata": REFUSED,
    "GeminiBlob.data": "The bytes in base64.",
    "GeminiBlob.mimeType": "Kind of the data, such as `image/png` or `audio/wav`.",
    "GeminiBlob.mime_type": "The same as `mimeType`.",
    "GeminiFile.fileUri": "Address of the file.",
    "GeminiFile.file_uri": "The same as `fileUri`.",
    "GeminiFile.mimeType": "Kind of the file, such as `image/png` or `audio/wav`.",
    "GeminiFile.mime_type": "The same as `mimeType`.",
}
DIALECT = Dialect(
    handlers=[batch_embed_contents, embed_content, count_tokens, list_models, get_model],
    tags={"Gemini": "The embedding methods of the Gemini API, and its list of models."},
    examples=EXAMPLES,
    meanings=MEANINGS,
    key_header=KEY_HEADER,
    key_parameter="key",
    move=move_path,
)
