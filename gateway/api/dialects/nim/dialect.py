"""NVIDIA NIM: the ranking of passages. Its embeddings are at /v1/embeddings.

Source: NeMo Retriever reranking NIM 1.8, API reference; langchain-nvidia-ai-endpoints 1.4, NVIDIARerank.
"""

from typing import Any, Literal

import msgspec

from backends.contract import Rerank, RerankReply
from gateway.api.document.fields import QUERY, SIDE, TEXTS
from gateway.api.server.body import ModelName
from gateway.api.server.dialect import Dialect
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import OPENAI
from gateway.api.server.request import Request
from gateway.api.server.responses import HttpReply
from gateway.api.wire.inputs import SIDE_OF, TruncateSide
from gateway.api.wire.replies import RerankUsage, best_first
from gateway.calls import Call
from gateway.errors import EmptyInput


class RankedText(msgspec.Struct):
    """A query or a passage."""

    text: str


class RankingRequest(msgspec.Struct):
    """Body of /v1/ranking. truncate: `END` and `START` cut there, `NONE` refuses what is too long."""

    query: RankedText
    passages: list[RankedText]
    model: ModelName | None = None
    truncate: TruncateSide | None = None


class Ranking(msgspec.Struct):
    """Score of one passage. index: its place in the request. logit: the model's raw score."""

    index: int
    logit: float


class RankingResponse(msgspec.Struct):
    """Passages, best first. Equal scores are in the request's order."""

    rankings: list[Ranking]
    usage: RerankUsage
    object: Literal["list"] = "list"


def decode_ranking(request: Request[RankingRequest]) -> Call:
    """Decode a body. Raises: EmptyInput, InvalidInput."""
    data, api = request.body, request.api
    if not data.query.text:
        raise EmptyInput("`query.text` is an empty string", param="query")
    api.check_count(len(data.passages), "passages")
    passages = api.texts([passage.text for passage in data.passages], "passages")
    truncate = None if data.truncate is None else data.truncate != "NONE"
    side = SIDE_OF.get(data.truncate) if data.truncate else None
    return Call(Rerank(data.query.text, passages, raw_scores=True), request.model, truncate, side)


@inference(
    "/v1/ranking",
    errors=OPENAI,
    reply=RankingResponse,
    description="Passages, best first",
    tags=["Cohere and Jina"],
)
async def ranking(request: Request[RankingRequest]) -> HttpReply:
    """Rank passages by their relevance to a query, using NVIDIA NIM's API.

    Returns all passages with their logits, best first.
    """
    served, reply = await request.serve(decode_ranking(request), RerankReply)
    body = {
        "object": "list",
        "rankings": [{"index": index, "logit": reply.scores[index]} for index in best_first(reply)],
        "usage": {"prompt_tokens": reply.tokens, "total_tokens": reply.tokens},
    }
    return request.reply(served, body)


EXAMPLES: dict[type[msgspec.Struct], Any] = {
    RankingRequest: {
        "model": "reranker",
        "query": {"text": QUERY},
        "passages": [{"text": text} for text in TEXTS],
    }
}
MEANINGS = {
    "RankingRequest.passages": "Texts to rank.",
    "RankingRequest.query": "Text that they are compared with.",
    "RankingRequest.truncate": SIDE,
    "RankedText.text": "The text.",
}
DIALECT = Dialect(handlers=[ranking], examples=EXAMPLES, meanings=MEANINGS)
