"""Embeddings of Titan, Nova and Cohere on Amazon Bedrock: request bodies and replies. Pure.

Source: AWS' pages on the parameters of these models. Titan and Nova take one input a request.
"""

import re
from collections.abc import Sequence

import msgspec

from backends.contract import Audio, Embed, EmbedParts, Part, Truncate
from backends.contract.errors import InvalidWork, input_too_long
from backends.hosted.models import (
    DEFAULT_TYPE,
    Body,
    HostedModel,
    HostedRoute,
    Request,
    Rows,
    every_place,
    vectors_of,
)
from backends.http.answers import decode_json
from backends.http.client import UpstreamResponse
from backends.http.media import base64_of, data_uri

COUNT_HEADER = "x-amzn-bedrock-input-token-count"


def reported_tokens(response: UpstreamResponse) -> int | None:
    """Return the tokens that are billed, None if the response does not have them."""
    count = response.headers.get(COUNT_HEADER, "")
    return int(count) if re.fullmatch(r"\d{1,9}", count) else None


# --- Titan


class TitanReply(msgspec.Struct, frozen=True, rename="camel"):
    """Body of a reply of a Titan model."""

    embedding: list[float]
    input_text_token_count: int | None = None


def _titan(work: Embed, model: HostedModel) -> list[Request]:
    (text,) = work.inputs
    return [Request(model.path, {"inputText": text}, (0,))]


def _titan_v2(work: Embed, model: HostedModel) -> list[Request]:
    (text,), width = work.inputs, model.width_of(work)
    body: Body = {"inputText": text, "normalize": work.normalize}
    return [Request(model.path, body if width is None else body | {"dimensions": width}, (0,))]


def _titan_image(work: Embed | EmbedParts, model: HostedModel) -> list[Request]:
    (item,), width = work.inputs, model.width_of(work)
    body = _titan_parts(item if isinstance(item, tuple) else (item,))
    if width is not None:
        body["embeddingConfig"] = {"outputEmbeddingLength": width}
    return [Request(model.path, body, (0,))]


def _titan_parts(parts: Sequence[Part]) -> Body:
    """Return the fields of one input. Raises: InvalidWork."""
    fields: Body = {}
    for part in parts:
        fields |= {"inputText": part} if isinstance(part, str) else {"inputImage": base64_of(part)}
    if len(fields) < len(parts):
        raise InvalidWork("this upstream has a vector for one text, one image or both", input_index=0)
    return fields


def _decode_titan(response: UpstreamResponse, expected: int) -> Rows:
    reply = decode_json(response.body, TitanReply)
    counted = reply.input_text_token_count
    return Rows(
        vectors_of([reply.embedding], expected), reported_tokens(response) if counted is None else counted
    )


# --- Nova

NOVA_WIDTHS = (256, 384, 1024, 3072)
NOVA_CUTS = {Truncate.ERROR: "NONE", Truncate.LEFT: "START", Truncate.RIGHT: "END"}
NOVA_FORMATS = {
    "image/png": "png",
    "image/jpeg": "jpeg",
    "image/gif": "gif",
    "image/webp": "webp",
    "audio/mpeg": "mp3",
    "audio/wav": "wav",
    "audio/ogg": "ogg",
}


class NovaEmbedding(msgspec.Struct, frozen=True, rename="camel"):
    """One vector of a reply of Nova."""

    embedding: list[float]
    truncated_char_length: int | None = None


class NovaReply(msgspec.Struct, frozen=True):
    """Body of a reply of Nova."""

    embeddings: list[NovaEmbedding]


def _nova(work: Embed | EmbedParts, model: HostedModel) -> list[Request]:
    (item,) = work.inputs
    parts = item if isinstance(item, tuple) else (item,)
    if len(parts) != 1:
        raise InvalidWork("this upstream has a vector for one text, image or recording", input_index=0)
    params = {
        "embeddingPurpose": model.type_of(work),
        "embeddingDimension": model.width_of(work) or NOVA_WIDTHS[-1],
        **_nova_part(parts[0], work.truncate),
    }
    body = {"taskType": "SINGLE_EMBEDDING", "singleEmbeddingParams": params}
    return [Request(model.path, body, (0,))]


def _nova_part(part: Part, truncate: Truncate) -> Body:
    """Return the content of an input. Raises: InvalidWork."""
    if isinstance(part, str):
        return {"text": {"truncationMode": NOVA_CUTS[truncate], "value": part}}
    form = NOVA_FORMATS.get(part.media_type)
    if form is None:
        raise InvalidWork(f"this upstream does not read {part.media_type}", input_index=0)
    source: Body = {"format": form, "source": {"bytes": base64_of(part)}}
    if isinstance(part, Audio):
        return {"audio": source}
    return {"image": {"detailLevel": "STANDARD_IMAGE", **source}}


def _decode_nova(response: UpstreamResponse, expected: int) -> Rows:
    found = decode_json(response.body, NovaReply).embeddings
    vectors = vectors_of([item.embedding for item in found], expected)
    cut = tuple([i for i, item in enumerate(found) if item.truncated_char_length is not None])
    return Rows(vectors, reported_tokens(response), cut)


# --- Cohere

COHERE_TYPES = {
    "query": "search_query",
    "document": "search_document",
    "classification": "classification",
    "clustering": "clustering",
    # A type is required. Texts without a role are documents in most uses.
    DEFAULT_TYPE: "search_document",
}
COHERE_V3_CUTS = {Truncate.ERROR: "NONE", Truncate.LEFT: "START", Truncate.RIGHT: "END"}
# Of a text; the models read 512 tokens.
COHERE_V3_CHARACTERS_MAX = 2048
COHERE_V4_CUTS = {Truncate.ERROR: "NONE", Truncate.LEFT: "LEFT", Truncate.RIGHT: "RIGHT"}


class FloatEmbeddings(msgspec.Struct, frozen=True, rename={"vectors": "float"}):
    """Vectors by their type; only numbers are requested."""

    vectors: list[list[float]]


class CohereReply(msgspec.Struct, frozen=True):
    """Body of a reply of Cohere, whose vectors have a type if the request named one."""

    embeddings: list[list[float]] | FloatEmbeddings


def _cohere_v3(work: Embed, model: HostedModel) -> list[Request]:
    body = {
        "texts": [_cohere_text(text, work.truncate, i) for i, text in enumerate(work.inputs)],
        "input_type": model.type_of(work),
        "truncate": COHERE_V3_CUTS[work.truncate],
    }
    return [Request(model.path, body, every_place(work))]


def _cohere_text(text: str, truncate: Truncate, index: int) -> str:
    """Return a text within the bound of older models, which precedes their own cut. Raises: InvalidWork."""
    if len(text) <= COHERE_V3_CHARACTERS_MAX:
        return text
    if truncate is Truncate.ERROR:
        raise input_too_long(None, input_index=index)
    left, right = text[-COHERE_V3_CHARACTERS_MAX:], text[:COHERE_V3_CHARACTERS_MAX]
    return left if truncate is Truncate.LEFT else right


def _cohere_v3_parts(work: EmbedParts, model: HostedModel) -> list[Request]:
    """Return a request for all texts, and one for each picture. Raises: InvalidWork."""
    texts, requests = list[int](), list[Request]()
    for index, parts in enumerate(work.inputs):
        if len(parts) != 1:
            raise InvalidWork(
                f"this upstream has a vector for one text or one image; input {index} is more",
                input_index=index,
            )
        (part,) = parts
        if isinstance(part, str):
            texts.append(index)
        else:
            body = {"images": [data_uri(part)], "input_type": "image"}
            requests.append(Request(model.path, body, (index,)))
    if texts:
        plain = Embed(tuple([str(work.inputs[i][0]) for i in texts]), truncate=work.truncate)
        (request,) = _cohere_v3(msgspec.structs.replace(plain, prompt_name=work.prompt_name), model)
        requests.append(request._replace(places=texts))
    return requests


def _cohere_v4(work: Embed | EmbedParts, model: HostedModel) -> list[Request]:
    width = model.width_of(work)
    if isinstance(work, Embed):
        content: Body = {"texts": work.inputs}
    else:
        content = {"inputs": [{"content": list(map(_cohere_part, parts))} for parts in work.inputs]}
    body = {
        **content,
        "input_type": model.type_of(work),
        "truncate": COHERE_V4_CUTS[work.truncate],
        "embedding_types": ["float"],
    }
    if width is not None:
        body["output_dimension"] = width
    return [Request(model.path, body, every_place(work))]


def _cohere_part(part: Part) -> Body:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    # Its own API has an object here.
    return {"type": "image_url", "image_url": data_uri(part)}


def _decode_cohere(response: UpstreamResponse, expected: int) -> Rows:
    found = decode_json(response.body, CohereReply).embeddings
    vectors = found.vectors if isinstance(found, FloatEmbeddings) else found
    return Rows(vectors_of(vectors, expected), reported_tokens(response))


TITAN = HostedRoute(_titan, _decode_titan)
TITAN_V2 = HostedRoute(_titan_v2, _decode_titan)
TITAN_IMAGE = HostedRoute(_titan_image, _decode_titan)
NOVA = HostedRoute(_nova, _decode_nova)
COHERE_V3 = HostedRoute(_cohere_v3, _decode_cohere)
COHERE_V3_PARTS = HostedRoute(_cohere_v3_parts, _decode_cohere)
COHERE_V4 = HostedRoute(_cohere_v4, _decode_cohere)
