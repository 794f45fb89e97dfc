"""Embeddings of the Gemini API and of Vertex AI: request bodies and replies. Pure.

Source: google-genai's client, and Google's pages on text and multimodal embeddings. `predict` takes texts,
`embedContent` one content, and the Gemini API's `batchEmbedContents` a list of contents.
"""

from collections.abc import Sequence

import msgspec

from backends.contract import Embed, EmbedParts, Part, Truncate
from backends.contract.errors import InvalidWork
from backends.hosted.models import (
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
from backends.http.media import base64_of
from backends.http.openai_wire import Count, whole_number

# Media that the models read.
MEDIA_TYPES = frozenset({"image/png", "image/jpeg", "audio/mpeg", "audio/wav"})


class Values(msgspec.Struct, frozen=True):
    """One vector."""

    values: list[float]


class Usage(msgspec.Struct, frozen=True, rename="camel"):
    """Token counts of a reply."""

    prompt_token_count: Count = None

    @property
    def tokens(self) -> int | None:
        """Tokens of the inputs, None if they are not reported. Raises: ReplicaFailed."""
        return whole_number(self.prompt_token_count, "usageMetadata.promptTokenCount")


class BatchReply(msgspec.Struct, frozen=True, rename="camel"):
    """Body of a reply of batchEmbedContents."""

    embeddings: list[Values]
    usage_metadata: Usage = Usage()


class ContentReply(msgspec.Struct, frozen=True, rename="camel"):
    """Body of a reply of embedContent."""

    embedding: Values
    usage_metadata: Usage = Usage()
    truncated: bool = False


class Statistics(msgspec.Struct, frozen=True):
    """Tokens of a text, and whether it was cut."""

    token_count: Count = None
    truncated: bool = False


class Embedding(msgspec.Struct, frozen=True):
    """One vector of predict."""

    values: list[float]
    statistics: Statistics = Statistics()


class Prediction(msgspec.Struct, frozen=True):
    """One prediction."""

    embeddings: Embedding


class Predictions(msgspec.Struct, frozen=True):
    """Body of a reply of predict."""

    predictions: list[Prediction]


def content_of(item: str | Sequence[Part], index: int) -> Body:
    """Return an input as one content, which has one vector for all its parts. Raises: InvalidWork."""
    parts = (item,) if isinstance(item, str) else item
    return {"parts": [_part(part, index) for part in parts]}


def _part(part: Part, index: int) -> Body:
    if isinstance(part, str):
        return {"text": part}
    if part.media_type not in MEDIA_TYPES:
        raise InvalidWork(f"this upstream does not read {part.media_type}", input_index=index)
    return {"inlineData": {"mimeType": part.media_type, "data": base64_of(part)}}


def _task(work: Embed | EmbedParts, model: HostedModel, name: str) -> Body:
    kind = model.type_of(work)
    return {} if kind is None else {name: kind}


def _batch(work: Embed | EmbedParts, model: HostedModel) -> list[Request]:
    common = {"model": model.name} | _task(work, model, "taskType")
    requests = [common | {"content": content_of(item, i)} for i, item in enumerate(work.inputs)]
    return [Request(f"{model.path}:batchEmbedContents", {"requests": requests}, every_place(work))]


def _decode_batch(response: UpstreamResponse, expected: int) -> Rows:
    reply = decode_json(response.body, BatchReply)
    return Rows(vectors_of([item.values for item in reply.embeddings], expected), reply.usage_metadata.tokens)


def _content(work: Embed | EmbedParts, model: HostedModel) -> list[Request]:
    (item,) = work.inputs
    config = _task(work, model, "taskType") | {"autoTruncate": work.truncate is not Truncate.ERROR}
    body = {"content": content_of(item, 0), "embedContentConfig": config}
    return [Request(f"{model.path}:embedContent", body, (0,))]


def _decode_content(response: UpstreamResponse, expected: int) -> Rows:
    reply = decode_json(response.body, ContentReply)
    cut = tuple(range(expected)) if reply.truncated else ()
    return Rows(vectors_of([reply.embedding.values], expected), reply.usage_metadata.tokens, cut)


def _predict(work: Embed, model: HostedModel) -> list[Request]:
    task = _task(work, model, "task_type")
    body = {
        "instances": [{"content": text} | task for text in work.inputs],
        "parameters": {"autoTruncate": work.truncate is not Truncate.ERROR},
    }
    return [Request(f"{model.path}:predict", body, every_place(work))]


def _decode_predictions(response: UpstreamResponse, expected: int) -> Rows:
    found = [item.embeddings for item in decode_json(response.body, Predictions).predictions]
    vectors = vectors_of([item.values for item in found], expected)
    path = "predictions[].embeddings.statistics.token_count"
    counts = [whole_number(item.statistics.token_count, path) for item in found]
    known = [count for count in counts if count is not None]
    cut = tuple([i for i, item in enumerate(found) if item.statistics.truncated])
    return Rows(vectors, sum(known) if len(known) == len(counts) else None, cut)


BATCH = HostedRoute(_batch, _decode_batch)
CONTENT = HostedRoute(_content, _decode_content)
PREDICT = HostedRoute(_predict, _decode_predictions)
