"""Images in requests to hosted APIs: what each of them takes, and the vectors of their replies.

Source: Jina's OpenAPI document 2026.04.02, Cohere's API reference (v2, embed), Voyage's API reference
(multimodal embeddings).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from backends.contract import Audio, EmbedParts, EmbedReply, Image, Part, Vectors
from backends.contract.errors import InvalidWork, UnsupportedWork
from backends.contract.vectors import shape_vectors
from backends.http.client import countdown
from backends.http.media import base64_of, check_dense, check_no_template, data_uri, probe_image
from backends.http.replies import run_some
from backends.openai.api import Body, OpenAIApi, OpenAIProfile, decode_vectors, failure
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
    """Return the request of an API whose inputs may differ in kind."""
    places = range(len(work.inputs))
    if shape.media == "content":
        inputs = [{"content": [_voyage_part(part) for part in parts]} for parts in work.inputs]
        return [MediaRequest({shape.inputs: inputs}, places)]
    return [MediaRequest({shape.inputs: [_jina_input(work.inputs[i], i) for i in places]}, places)]


def _jina_input(parts: Sequence[Part], index: int) -> Body:
    """Return an input of Jina's. Raises: InvalidWork."""
    if len(parts) != 1:
        raise InvalidWork(
            f"this upstream has a vector for one text or one image; input {index} is more", input_index=index
        )
    (part,) = parts
    return {"text": part} if isinstance(part, str) else {"image": base64_of(part)}


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
