"""Images in requests to hosted APIs: what each of them takes, and the vectors and scores of their replies.

Source: Jina's OpenAPI document 2026.04.02, Cohere's API reference (v2, embed), Voyage's API reference
(multimodal embeddings), NVIDIA's reference of the NIM for reranking 2.4.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from backends.contract import Audio, EmbedParts, EmbedReply, Image, Part, RerankReply, ScoreParts, Vectors
from backends.contract.errors import InvalidWork, ReplicaFailed, UnsupportedWork
from backends.contract.vectors import shape_vectors
from backends.http.client import countdown
from backends.http.media import base64_of, check_dense, check_no_template, data_uri, probe_image
from backends.http.replies import run_some
from backends.openai.api import Body, OpenAIApi, OpenAIProfile, decode_scores, decode_vectors, failure, scaled
from backends.openai.shapes import DEFAULT_TYPE, ApiShape

# Of one call to one replica: Cohere's older models take one image a request.
REQUESTS_IN_FLIGHT = 8
PROBE = EmbedParts(((probe_image(),),))


class MediaRequest(NamedTuple):
    """Fields of one request, and the places of its inputs in the work."""

    fields: Body
    places: Sequence[int]


def media_requests(work: EmbedParts, shape: ApiShape) -> list[MediaRequest]:
    """Return the requests of a piece of work. Raises: InvalidWork, UnsupportedWork."""
    check_dense(work)
    check_no_template(work)
    if not work.normalize:
        raise UnsupportedWork("this upstream's wire has no vectors that are not normalized")
    if work.truncate not in shape.truncation:
        raise UnsupportedWork("this upstream's API cannot cut the left end")
    if any(isinstance(part, Audio) for parts in work.inputs for part in parts):
        raise UnsupportedWork("this upstream reads texts and images, and no sound")
    kind = shape.input_type.get(work.prompt_name or DEFAULT_TYPE)
    common = dict(shape.truncation[work.truncate]) | ({} if kind is None else {shape.type_field: kind})
    return [
        MediaRequest(common | fields, places)
        for fields, places in (_cohere(work) if shape.media == "cohere" else _whole(work, shape))
    ]


def _whole(work: EmbedParts, shape: ApiShape) -> list[MediaRequest]:
    """Return the request of an API whose inputs may differ in kind. Raises: InvalidWork."""
    inputs: list[Any]
    if shape.media == "content":
        inputs = [{"content": [_voyage_part(part) for part in parts]} for parts in work.inputs]
    else:
        singles = [_single(parts, index) for index, parts in enumerate(work.inputs)]
        inputs = [
            _nim_input(part, work) if shape.media == "strings" else _jina_input(part) for part in singles
        ]
    return [MediaRequest({shape.inputs: inputs}, range(len(work.inputs)))]


def _single(parts: Sequence[Part], index: int) -> Part:
    """Return the only part of an input. Raises: InvalidWork."""
    if len(parts) != 1:
        raise InvalidWork(
            f"this upstream has a vector for one text or one image; input {index} is more", input_index=index
        )
    return parts[0]


def _jina_input(part: Part) -> Body:
    return {"text": part} if isinstance(part, str) else {"image": base64_of(part)}


def _nim_input(part: Part, work: EmbedParts) -> str:
    """Return an input of NIM's. Raises: InvalidWork."""
    if isinstance(part, str):
        return part
    if work.prompt_name == "query":
        raise InvalidWork("this upstream reads images as documents only, not as queries")
    return data_uri(part)


def _voyage_part(part: Part) -> Body:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_base64", "image_base64": data_uri(part)}


def _cohere(work: EmbedParts) -> list[MediaRequest]:
    """Return a request for all texts, and one for each other input."""
    texts = [i for i, parts in enumerate(work.inputs) if len(parts) == 1 and isinstance(parts[0], str)]
    found = [MediaRequest({"texts": [work.inputs[i][0] for i in texts]}, texts)] if texts else []
    for index, parts in enumerate(work.inputs):
        if len(parts) == 1 and isinstance(parts[0], Image):
            found.append(MediaRequest({"images": [data_uri(parts[0])], "input_type": "image"}, [index]))
        elif len(parts) > 1:
            found.append(MediaRequest({"inputs": [{"content": list(map(_cohere_part, parts))}]}, [index]))
    return found


def _cohere_part(part: Part) -> Body:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": data_uri(part)}}


# --- rerank


def _ranked_sides(query: Sequence[Part], documents: Sequence[Sequence[Part]], shape: ApiShape) -> Body:
    """Return the fields of a query and its documents. Raises: InvalidWork."""
    if shape.rerank_media == "passages":
        return {
            "query": {"text": _only_text(query)},
            "passages": [_passage(parts, i) for i, parts in enumerate(documents)],
        }
    sides = [_ranked(query, "query")]
    sides += [_ranked(parts, f"document {index}", index) for index, parts in enumerate(documents)]
    return {"query": sides[0], "documents": sides[1:]}


def _ranked(parts: Sequence[Part], name: str, index: int | None = None) -> str | Body:
    """Return a query or document of Jina's. Raises: InvalidWork."""
    if len(parts) != 1:
        raise InvalidWork(f"this upstream ranks one text or one image; {name} is more", input_index=index)
    (part,) = parts
    return part if isinstance(part, str) else {"image": base64_of(part)}


def _only_text(query: Sequence[Part]) -> str:
    """Return a query of NIM's. Raises: InvalidWork."""
    if len(query) == 1 and isinstance(query[0], str):
        return query[0]
    raise InvalidWork("this upstream's query is a text; it reads images in documents")


def _passage(parts: Sequence[Part], index: int) -> Body:
    """Return a document of NIM's. Raises: InvalidWork."""
    fields: Body = {}
    for part in parts:
        fields |= {"text": part} if isinstance(part, str) else {"image": data_uri(part)}
    if len(fields) < len(parts):
        raise InvalidWork("this upstream ranks one text, one image or both as a document", input_index=index)
    return fields


async def score_media(
    api: OpenAIApi, work: ScoreParts, profile: OpenAIProfile, timeout_s: float
) -> RerankReply:
    """Score pairs with images, by one request for each query. Raises: BackendError."""
    shape, remaining_s = api.shape, countdown(timeout_s)
    assert profile.scores is not None
    if work.truncate not in shape.rerank_truncation:
        raise UnsupportedWork("this upstream's API cannot cut the left end")
    places: dict[tuple[Part, ...], list[int]] = {}
    for index, (query, _) in enumerate(work.pairs):
        places.setdefault(query, []).append(index)

    async def rank(query: tuple[Part, ...]) -> tuple[Vectors, int]:
        own = places[query]
        try:
            sides = _ranked_sides(query, [work.pairs[index][1] for index in own], shape)
        except InvalidWork as error:
            error.input_index = None if error.input_index is None else own[error.input_index]
            raise
        response = await api.rank(sides, work, profile, len(own), remaining_s())
        if response.status != 200:
            raise failure(response)
        scores, tokens = decode_scores(response, len(own))
        if tokens is None:
            raise ReplicaFailed("the upstream reported no usage")
        return scores, max(tokens, len(own))

    found = await run_some(rank, list(places), REQUESTS_IN_FLIGHT)
    order = np.argsort(np.concatenate(list(places.values())))
    scores = np.concatenate([rows for rows, _ in found])[order]
    scores, logits = scaled(scores, profile.scores, raw=work.raw_scores)
    return RerankReply(scores, sum(tokens for _, tokens in found), None, logits)


async def embed_media(
    api: OpenAIApi, work: EmbedParts, profile: OpenAIProfile, timeout_s: float
) -> EmbedReply:
    """Embed texts and images, some requests at a time. Raises: BackendError."""
    remaining_s = countdown(timeout_s)

    async def embed(request: MediaRequest) -> tuple[Vectors, int]:
        response = await api.send(request.fields, profile, len(request.places), remaining_s())
        if response.status != 200:
            raise failure(response)
        vectors, tokens = decode_vectors(response.body, len(request.places), api.shape)
        return vectors, max(tokens or 0, len(request.places))

    requests = media_requests(work, api.shape)
    found = await run_some(embed, requests, REQUESTS_IN_FLIGHT)
    places = np.concatenate([request.places for request in requests])
    vectors = np.concatenate([rows for rows, _ in found])[np.argsort(places)]
    shaped = shape_vectors(vectors, dimensions=work.dimensions, normalize=True)
    return EmbedReply(shaped, sum(tokens for _, tokens in found), None)
