"""Wire of Infinity: its structs, request bodies, decoding of replies, and errors, without I/O.

Source: michaelfeil/infinity 0.0.77 (infinity_server.py, fastapi_schemas), run at 0.0.78.
Rule: never send null, and never `dimensions`, because Infinity truncates without normalizing again.
"""

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from backends.contract import (
    Audio,
    Classify,
    ClassifyReply,
    Embed,
    EmbedParts,
    EmbedReply,
    Encode,
    EncodeReply,
    Image,
    Part,
    Reply,
    Rerank,
    RerankReply,
    Vectors,
)
from backends.contract.errors import (
    BackendError,
    InvalidWork,
    ReplicaFailed,
    UnsupportedWork,
)
from backends.http.adapters import Route, Routes
from backends.http.answers import decode_json, in_order, translate_decode_errors
from backends.http.client import UpstreamResponse
from backends.http.media import check_dense, check_no_template, data_uri
from backends.http.openai_wire import decode_embeddings, error_of
from backends.http.replies import fit_vectors, label_scores, order_scores, token_matrices
from backends.http.statuses import status_error, with_answer
from backends.tokens.tokenizer import TokenCount

Body: TypeAlias = dict[str, Any]
Labels: TypeAlias = tuple[str, ...]
# Work of one request; pairs with several queries and inputs with media need more.
InfinityWork: TypeAlias = Embed | Encode | Rerank | Classify
MODALITIES: dict[type, str] = {str: "text", Image: "image", Audio: "audio"}


class InfinityStats(msgspec.Struct, frozen=True):
    """Load of one model. queue_absolute: waiting inputs. batch_size: inputs of one forward pass."""

    queue_absolute: int = 0
    batch_size: int | None = None


class InfinityServedModel(msgspec.Struct, frozen=True):
    """One entry of GET /models."""

    id: str
    capabilities: list[str]
    stats: InfinityStats = InfinityStats()
    backend: str = ""


class InfinityServedModels(msgspec.Struct, frozen=True):
    """Body of GET /models; one server can serve many models."""

    data: list[InfinityServedModel]


class InfinityRankItem(msgspec.Struct, frozen=True):
    """One entry of POST /rerank, sorted by score; index is that of the document."""

    relevance_score: float
    index: int | None = None


class InfinityRanks(msgspec.Struct, frozen=True):
    """Body of POST /rerank."""

    results: list[InfinityRankItem]


class InfinityLabelScore(msgspec.Struct, frozen=True):
    """One label of one input in POST /classify, sorted by score."""

    score: float
    label: str


class InfinityLabelScores(msgspec.Struct, frozen=True):
    """Body of POST /classify."""

    data: list[list[InfinityLabelScore]]


class TokenVectorsItem(msgspec.Struct, frozen=True):
    """Token vectors of one input."""

    embedding: list[list[float]]
    index: int | None = None


class TokenVectorsResponse(msgspec.Struct, frozen=True):
    """Body of POST /embeddings for a model with one vector per token; base64 would lose the shape."""

    data: list[TokenVectorsItem]


def decode_models(response: UpstreamResponse) -> list[InfinityServedModel]:
    """Decode GET /models.

    Raises: ReplicaFailed, if the body is not Infinity's.
    """
    try:
        return decode_json(response.body, InfinityServedModels).data
    except ReplicaFailed as error:
        raise ReplicaFailed("GET /models is not Infinity's").with_facts(detail=error.detail) from error


def check_parts(work: EmbedParts) -> None:
    """Check that Infinity would embed the inputs as requested. Raises: InvalidWork, UnsupportedWork."""
    check_dense(work)
    check_no_template(work)
    if not work.normalize:
        raise UnsupportedWork("this upstream always normalizes its vectors")
    for index, parts in enumerate(work.inputs):
        if len(parts) != 1:
            raise InvalidWork(
                f"this upstream has a vector for one text, image or recording; input {index} is more",
                input_index=index,
            )


def places_by_modality(work: EmbedParts) -> dict[str, list[int]]:
    """Return the places of the inputs of each modality, of which a request has one."""
    places: dict[str, list[int]] = {}
    for index, (part,) in enumerate(work.inputs):
        places.setdefault(MODALITIES[type(part)], []).append(index)
    return places


def parts_body(parts: Sequence[Part], modality: str, model: str) -> Body:
    """Return the body of a request for texts, images or sound."""
    inputs = [part if isinstance(part, str) else data_uri(part) for part in parts]
    return {"model": model, "input": inputs, "modality": modality, "encoding_format": "base64"}


def _encode_embed(work: Embed) -> tuple[str, Body]:
    return "/embeddings", {"input": work.inputs, "encoding_format": "base64"}


def _decode_embed(work: Embed, response: UpstreamResponse, count: TokenCount, _: Labels) -> EmbedReply:
    vectors, _tokens = decode_embeddings(response.body, len(work.inputs))
    return EmbedReply(fit_vectors(vectors, work), count.tokens, count.truncated)


def _encode_multivector(work: Encode) -> tuple[str, Body]:
    return "/embeddings", {"input": work.inputs, "encoding_format": "float"}


def _decode_multivector(
    work: Encode, response: UpstreamResponse, count: TokenCount, _: Labels
) -> EncodeReply:
    matrices = decode_matrices(response, len(work.inputs))
    return EncodeReply(count.tokens, multivector=matrices, truncated=count.truncated)


def _encode_rerank(work: Rerank) -> tuple[str, Body]:
    return "/rerank", {"query": work.query, "documents": work.documents, "raw_scores": work.raw_scores}


def _decode_rerank(work: Rerank, response: UpstreamResponse, count: TokenCount, _: Labels) -> RerankReply:
    ranks = decode_json(response.body, InfinityRanks).results
    scores = order_scores([(rank.index, rank.relevance_score) for rank in ranks], len(work.documents))
    return RerankReply(scores, count.tokens, count.truncated)


def _encode_classify(work: Classify) -> tuple[str, Body]:
    return "/classify", {"input": work.inputs}


def _decode_classify(
    work: Classify, response: UpstreamResponse, count: TokenCount, labels: Labels
) -> ClassifyReply:
    scores = label_scores(decode_predictions(response), labels, len(work.inputs))
    return ClassifyReply(labels, scores, count.tokens, count.truncated)


ROUTES: Routes = {
    Embed: Route(_encode_embed, _decode_embed),
    Encode: Route(_encode_multivector, _decode_multivector),
    Rerank: Route(_encode_rerank, _decode_rerank),
    Classify: Route(_encode_classify, _decode_classify),
}


def encode(work: InfinityWork, model: str) -> tuple[str, Body]:
    """Return path and body of one piece of work."""
    path, body = ROUTES[type(work)].encode(work)
    return path, {"model": model} | body


def decode(work: InfinityWork, response: UpstreamResponse, count: TokenCount, labels: Labels = ()) -> Reply:
    """Decode the reply in a response of status 200. labels: those of a classifier.

    Raises: ReplicaFailed if the response does not belong to this work.
    """
    return ROUTES[type(work)].decode(work, response, count, labels)


def decode_matrices(response: UpstreamResponse, expected: int) -> tuple[Vectors, ...]:
    """Decode the token vectors of each input, (tokens of the input, dim) float32.

    Raises: ReplicaFailed.
    """
    items = decode_json(response.body, TokenVectorsResponse).data
    places = in_order([item.index for item in items], "data", listed=True)
    with translate_decode_errors():
        return token_matrices([items[place].embedding for place in places], expected, None)


def decode_predictions(response: UpstreamResponse) -> list[list[tuple[str, float]]]:
    """Decode the (label, score) entries of each input in the server's order.

    Raises: ReplicaFailed.
    """
    lists = decode_json(response.body, InfinityLabelScores).data
    return [[(item.label, item.score) for item in row] for row in lists]


# Error of images and sound that Infinity cannot read, such as a recording whose rate is not the model's.
UNREADABLE = re.compile(r"'infinity_emb\.primitives\.(?:Image|Audio)Corruption'> -> ([^\n]+)")
REASON_MAX = 200


@with_answer
def failure(response: UpstreamResponse) -> BackendError:
    """Convert a response whose status is not 200 to an error."""
    match response.status:
        case 422:
            # The adapter has limited the inputs; too many of them is a conflict between the two
            # configurations.
            return ReplicaFailed(
                "the upstream refused the request's shape; `request_inputs` may be more than it takes"
            )
        case 400 if error_of(response).message.startswith("ModelNotDeployedError"):
            return ReplicaFailed("the upstream now serves a different kind of model")
        case 400 if (found := UNREADABLE.search(error_of(response).message)) is not None:
            return InvalidWork(f"Infinity cannot read an input: {found[1][:REASON_MAX]}")
    return status_error(response)
