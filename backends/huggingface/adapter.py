"""Adapter of Hugging Face's inference: the pipeline of embeddings, and reranks in the form of TEI.

Source: the tasks of @huggingface/tasks, whose fields are those of TEI. Replies have no token counts.
"""

import re
from urllib.parse import quote

import msgspec

from backends.contract import Embed, ReplicaSpec, Rerank, Truncate
from backends.contract.errors import (
    BackendError,
    InvalidWork,
    ModelNotLoaded,
    ModelNotServed,
    input_too_long,
)
from backends.hosted.adapter import HostedBackend
from backends.hosted.models import Body, HostedModel, HostedRoute, Request, Rows, every_place, vectors_of
from backends.http.answers import decode_json, words_of
from backends.http.client import UpstreamResponse
from backends.http.egress import OpenClient, open_egress
from backends.http.openai_wire import REFUSED_INPUT, TOO_LONG
from backends.http.replies import order_scores
from backends.http.statuses import RETRY_AFTER_MAX_S, status_error, with_answer
from backends.huggingface.kind import HuggingFaceSettings

# Of TEI, if the servers behind the router send it.
TOKENS_HEADER = "x-compute-tokens"
# TEI's sentence for a long input, too.
LONG_INPUT = re.compile(r"must have less than \d+ tokens|" + "|".join(map(re.escape, TOO_LONG)))
LENGTH = re.compile(r"must have less than (\d{1,9}) tokens")


class Score(msgspec.Struct, frozen=True):
    """Score of one document."""

    index: int
    score: float


class Loading(msgspec.Struct, frozen=True):
    """Body of an error of a model that is being loaded."""

    estimated_time: float | None = None


def _cut(truncate: Truncate) -> Body:
    if truncate is Truncate.ERROR:
        return {"truncate": False}
    return {"truncate": True, "truncation_direction": "Left" if truncate is Truncate.LEFT else "Right"}


def _embed(work: Embed, model: HostedModel) -> list[Request]:
    body = {"inputs": work.inputs, "normalize": work.normalize} | _cut(work.truncate)
    return [Request(f"{model.path}/pipeline/feature-extraction", body, every_place(work))]


def _rerank(work: Rerank, model: HostedModel) -> list[Request]:
    body = {"query": work.query, "texts": work.documents, "raw_scores": work.raw_scores} | _cut(work.truncate)
    return [Request(f"{model.path}/rerank", body, every_place(work))]


def _decode_embed(response: UpstreamResponse, expected: int) -> Rows:
    # A model without a pooling gives a list for each token, which is no list of numbers.
    return Rows(vectors_of(decode_json(response.body, list[list[float]]), expected), _tokens(response))


def _decode_rerank(response: UpstreamResponse, expected: int) -> Rows:
    found = decode_json(response.body, list[Score])
    return Rows(order_scores([(item.index, item.score) for item in found], expected, ""), _tokens(response))


def _tokens(response: UpstreamResponse) -> int | None:
    count = response.headers.get(TOKENS_HEADER, "")
    return int(count) if re.fullmatch(r"\d{1,9}", count) else None


@with_answer
def failure(response: UpstreamResponse) -> BackendError:
    """Convert a response whose status is not 200 to an error."""
    words = words_of(response.body).lower()
    match response.status:
        case 503 if (seconds := _loading_s(response)) is not None:
            loading = ModelNotLoaded("the upstream loads its model")
            return loading.with_facts(retry_after_s=min(max(seconds, 1.0), RETRY_AFTER_MAX_S))
        case 400 | 413 | 422 if LONG_INPUT.search(words):
            length = LENGTH.search(words)
            return input_too_long(int(length[1]) if length else None)
        case 400 | 422:
            return InvalidWork(REFUSED_INPUT)
        case 404:
            return ModelNotServed("the upstream does not serve this model")
    return status_error(response)


def _loading_s(response: UpstreamResponse) -> float | None:
    try:
        return msgspec.json.decode(response.body, type=Loading).estimated_time
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


EMBED = HostedRoute(_embed, _decode_embed)
RERANK = HostedRoute(_rerank, _decode_rerank)


def open_replica(spec: ReplicaSpec, open_client: OpenClient = open_egress) -> HostedBackend:
    """Return a client of the model below the spec's base URL."""
    settings = spec.settings if isinstance(spec.settings, HuggingFaceSettings) else HuggingFaceSettings()
    name = spec.model or ""
    model = HostedModel(
        name,
        f"/{quote(name)}",
        "Hugging Face",
        {Embed: EMBED} if settings.task == "embed" else {Rerank: RERANK},
        failure,
        truncation=frozenset(Truncate),
        plain_vectors=True,
        raw_scores=True,
    )
    return HostedBackend(open_client(spec, None), model, spec.tokenizer)
