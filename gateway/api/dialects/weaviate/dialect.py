"""Weaviate's own containers: vectors of texts, pictures and sound, and what it asks them first.

Their rerank is at /rerank, by the field `property`. Source: weaviate 1.33, modules text2vec-transformers,
multi2vec-clip and multi2vec-bind; weaviate/t2v-transformers-models 1.12.
"""

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import UNSET, UnsetType

from backends.contract import Embed, EmbedParts, EmbedReply, Operation
from gateway import __version__
from gateway.api.document.fields import MEANINGS as SHARED
from gateway.api.document.fields import TEXTS
from gateway.api.server.body import INTEGER_MAX, ModelName
from gateway.api.server.dialect import Dialect
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import model_name, route_options
from gateway.api.server.request import Request
from gateway.api.server.responses import EMPTY, NO_KEY, HttpReply, empty
from gateway.api.wire.inputs import Dimensions
from gateway.api.wire.media import VectorOptions, embed_parts
from gateway.api.wire.weaviate import WEAVIATE
from gateway.calls import Call
from gateway.errors import InvalidInput, NoReplica
from gateway.media.sources import PictureSource, SoundSource, SourcePart
from gateway.prompts import Role

Pooling = Literal["masked_mean", "cls"]
# The same poolings, as servers and checkpoints name them.
POOLING_OF: dict[Pooling, str] = {"masked_mean": "mean", "cls": "cls"}
Task = Literal["query", "passage"]
ROLE_OF: dict[Task, Role] = {"query": "query", "passage": "document"}
# Of multi2vec-bind, and of no model here.
REFUSED_KINDS = ("video", "imu", "thermal", "depth")
POOLING_FIELD = "config.pooling_strategy"

endpoint = partial(inference, errors=WEAVIATE, tags=["Weaviate"])
FAILURES = document_errors(WEAVIATE)
Count = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]


class VectorsConfig(msgspec.Struct):
    """Options of /vectors. pooling_strategy: the model's own decides; a different one is noted."""

    pooling_strategy: Pooling | None = None
    task_type: Task | None = None
    dimensions: Dimensions | None = None


class VectorsRequest(msgspec.Struct):
    """Body of /vectors: one `text`, or several `texts`.

    dims, vector, error: fields of the reply, which Weaviate sends empty.
    """

    text: str | UnsetType | None = UNSET
    texts: list[str] | UnsetType | None = UNSET
    config: VectorsConfig | None = None
    model: ModelName | None = None
    dims: Count | None = None
    vector: list[float] | None = None
    error: str | None = None


class VectorsResponse(msgspec.Struct):
    """Vectors of length 1. `text` and `vector` to a `text`, `vectors` to `texts`. dim: the same as `dims`."""

    dims: int
    text: str | UnsetType = UNSET
    vector: list[float] | UnsetType = UNSET
    dim: int | UnsetType = UNSET
    vectors: list[list[float]] | UnsetType = UNSET


class VectorizeRequest(msgspec.Struct):
    """Body of /vectorize: texts, and pictures and recordings in base64. Other kinds are refused."""

    texts: list[str] | None = None
    images: list[str] | None = None
    audio: list[str] | None = None
    video: list[str] | None = None
    imu: list[str] | None = None
    thermal: list[str] | None = None
    depth: list[str] | None = None
    model: ModelName | None = None


class VectorizeResponse(msgspec.Struct, rename="camel"):
    """Vectors of length 1, in the order of each kind of inputs. audio_vectors: only if there is sound."""

    text_vectors: list[list[float]]
    image_vectors: list[list[float]]
    audio_vectors: list[list[float]] | UnsetType = UNSET


class WeaviateMeta(msgspec.Struct, omit_defaults=True):
    """Facts that Weaviate shows at its own /v1/meta. model: in the path, if there is one."""

    version: str
    model: str | None = None


def decode_vectors(request: Request[VectorsRequest]) -> Call:
    """Decode a body of /vectors. Raises: EmptyInput, InvalidInput."""
    data, config = request.body, request.body.config or VectorsConfig()
    given = [value for value in (data.text, data.texts) if not isinstance(value, UnsetType | None)]
    if len(given) != 1:
        raise InvalidInput("send `text` or `texts`, one of them", param="text")
    (inputs,) = given
    texts = request.api.whole_texts(inputs, "text" if isinstance(inputs, str) else "texts")
    if config.pooling_strategy is not None:
        _compare_pooling(config.pooling_strategy, request)
    role = None if config.task_type is None else ROLE_OF[config.task_type]
    return Call(Embed(texts, dimensions=config.dimensions), request.model, role=role)


def _compare_pooling(asked: Pooling, request: Request[VectorsRequest]) -> None:
    """Note that the model pools in its own way, unless that is the one which was asked for.

    Raises: InvalidInput, and the errors of `InferenceApi.capabilities_of`.
    """
    context, api = request.context, request.api
    capabilities = api.capabilities_of(request.model, Operation.EMBED, context.tenant)
    if capabilities is not None and capabilities.pooling == POOLING_OF[asked]:
        return
    if api.refuses_unknown_fields:
        raise InvalidInput(
            f"`pooling_strategy` is {asked}, and the model pools in its own way: leave it out", param="config"
        )
    context.ignore_fields(", ".join(filter(None, (context.ignored_fields, POOLING_FIELD))))


@endpoint("/vectors", reply=VectorsResponse, description="The vector of the text, or of each text")
async def vectors(request: Request[VectorsRequest]) -> HttpReply:
    """Turn a text, or several texts, into vectors, as Weaviate's text2vec-transformers calls its container.

    Returns one vector for each text, in the order of the texts.
    """
    served, reply = await request.serve(decode_vectors(request), EmbedReply)
    rows = reply.vectors
    body: dict[str, Any] = {"dims": rows.shape[1]}
    if isinstance(request.body.text, str):
        body |= {"text": request.body.text, "vector": rows[0], "dim": rows.shape[1]}
    else:
        body["vectors"] = rows
    return await request.reply(served, body)


async def decode_vectorize(request: Request[VectorizeRequest]) -> Call:
    """Decode a body of /vectorize: its texts, then its images, then its sound.

    Raises: EmptyInput, InvalidInput, and the errors of `Request.fetch`.
    """
    data, api = request.body, request.api
    for kind in REFUSED_KINDS:
        if getattr(data, kind):
            raise InvalidInput(f"`{kind}` is not supported: no model here reads it", param=kind)
    texts = data.texts or []
    media: list[SourcePart] = [PictureSource(image) for image in data.images or ()]
    media += [SoundSource(sound) for sound in data.audio or ()]
    api.check_count(len(texts) + len(media), "texts")
    if not media:
        return Call(Embed(api.whole_texts(texts, "texts")), request.model)
    inputs: list[list[SourcePart]] = [[part] for part in (*texts, *media)]
    work: EmbedParts = await embed_parts(inputs, "texts", VectorOptions(), request.fetch)
    return Call(work, request.model)


@endpoint("/vectorize", reply=VectorizeResponse, description="One vector for each input")
async def vectorize(request: Request[VectorizeRequest]) -> HttpReply:
    """Turn texts, pictures and sound into vectors of one space, as Weaviate's multi2vec modules do.

    Returns one vector for each input, by kind.
    """
    data = request.body
    served, reply = await request.serve(await decode_vectorize(request), EmbedReply)
    images_from = len(data.texts or ())
    sound_from = images_from + len(data.images or ())
    rows = reply.vectors
    body = {"textVectors": rows[:images_from], "imageVectors": rows[images_from:sound_from]}
    if data.audio:
        body["audioVectors"] = rows[sound_from:]
    return await request.reply(served, body)


@get(
    ["/.well-known/ready", "/models/{name:str}/.well-known/ready"],
    responses={200: EMPTY} | FAILURES,
    tags=["Weaviate"],
    opt=route_options(errors=WEAVIATE),
    security=NO_KEY,
)
async def ready(api: NamedDependency[InferenceApi], name: FromPath[str | None] = None) -> Response[bytes]:
    """Answer 200 if the model, or without one any model, has a usable replica.

    Needs no key.
    """
    if name is not None:
        api.check_health(model_name(name))
    elif not any(upstream.health == "ready" for upstream in api.gateway.upstreams.values()):
        raise NoReplica("unhealthy")
    return empty()


@get(
    ["/.well-known/live", "/models/{name:str}/.well-known/live"],
    responses={200: EMPTY} | FAILURES,
    tags=["Weaviate"],
    opt=route_options(errors=WEAVIATE, is_probe=True),
    security=NO_KEY,
)
async def live(name: FromPath[str | None] = None) -> Response[bytes]:
    """Answer 200 while the process responds at all.

    Needs no key.
    """
    del name
    return empty()


@get(
    ["/meta", "/models/{name:str}/meta"],
    responses=FAILURES,
    tags=["Weaviate"],
    opt=route_options(errors=WEAVIATE),
    security=NO_KEY,
)
async def meta(api: NamedDependency[InferenceApi], name: FromPath[str | None] = None) -> WeaviateMeta:
    """Return the version of the gateway, and the model in the path.

    Needs no key.
    """
    model = model_name(name)
    if model is not None:
        api.gateway.view_of(model)
    return WeaviateMeta(__version__, model)


EXAMPLES: dict[type[msgspec.Struct], Any] = {
    VectorsRequest: {"text": TEXTS[0], "config": {"task_type": "passage"}},
    VectorizeRequest: {"texts": TEXTS},
}
SENT_EMPTY = "Changes nothing: Weaviate sends the fields of the reply, empty."
NOT_READ = "Refused unless it is empty: no model here reads it."
MEANINGS = {
    "config": "Options of the request.",
    "dims": SENT_EMPTY,
    "vector": SENT_EMPTY,
    "VectorsRequest.error": SENT_EMPTY,
    "VectorsRequest.text": "The text.",
    "VectorsRequest.texts": "Several texts, instead of `text`. The gateway's config bounds their number.",
    "VectorsConfig.pooling_strategy": (
        "The model pools in its own way; a different one is named in `x-ignored-fields`."
    ),
    "VectorsConfig.dimensions": SHARED["dimensions"],
    "VectorsConfig.task_type": "Purpose of the texts, which selects the prompt put before each of them.",
    "VectorizeRequest.texts": "Texts. The gateway's config bounds the number of all inputs.",
    "VectorizeRequest.images": "Pictures in base64.",
    "VectorizeRequest.audio": "Recordings in base64.",
    "VectorizeRequest.video": NOT_READ,
    "VectorizeRequest.imu": NOT_READ,
    "VectorizeRequest.thermal": NOT_READ,
    "VectorizeRequest.depth": NOT_READ,
    "property": "Marks a body of Weaviate, which sends it empty; without `documents` it is the document.",
}
DIALECT = Dialect(
    handlers=[vectors, vectorize, ready, live, meta],
    tags={"Weaviate": "The paths of Weaviate's own containers, but for rerank, which is at /rerank."},
    examples=EXAMPLES,
    meanings=MEANINGS,
)
