"""NVIDIA NIM: the ranking of passages, at its own paths and at those of NVIDIA's hosted API.

Its embeddings are at /v1/embeddings.
Source: NeMo Retriever reranking NIM 1.8, API reference; langchain-nvidia-ai-endpoints 1.5, NVIDIARerank;
litellm 1.110, which calls the hosted paths.
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
from gateway.api.wire.inputs import SIDE_OF, TopN, TruncateSide
from gateway.api.wire.replies import RerankUsage, rank_list, usage_of_ranks
from gateway.calls import Call
from gateway.errors import EmptyInput

# In the hosted path of no model, which has the publisher instead of one.
PUBLISHER = "nvidia"


class RankedText(msgspec.Struct):
    """A query or a passage."""

    text: str


class RankingRequest(msgspec.Struct):
    """Body of /v1/ranking. truncate: `END` and `START` cut there, `NONE` refuses what is too long.

    top_n: number of rankings, as RAGFlow and LiteLLM send it; without one, all.
    """

    query: RankedText
    passages: list[RankedText]
    model: ModelName | None = None
    truncate: TruncateSide | None = None
    top_n: TopN | None = None


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
    return await _serve(request)


@inference(
    "/v1/retrieval/{name:str}/reranking",
    errors=OPENAI,
    reply=RankingResponse,
    description="Passages, best first",
    tags=["Cohere and Jina"],
    below_models=False,
)
async def hosted_ranking(request: Request[RankingRequest]) -> HttpReply:
    """Rank passages at the paths of NVIDIA's hosted API.

    The same as `/v1/ranking`. `model` in the body takes precedence over the path, which spells it differently
    at NVIDIA. The path `/v1/retrieval/nvidia/reranking` names no model.
    """
    in_path = None if request.name == PUBLISHER else request.name
    return await _serve(msgspec.structs.replace(request, name=request.body.model or in_path))


async def _serve(request: Request[RankingRequest]) -> HttpReply:
    served, reply = await request.serve(decode_ranking(request), RerankReply)
    rankings = rank_list(reply, request.body.top_n, lambda index, score: {"index": index, "logit": score})
    body = {
        "object": "list",
        "rankings": rankings,
        "usage": usage_of_ranks(reply),
    }
    return await request.reply(served, body)


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
    "RankingRequest.top_n": "Number of rankings to return. Without it, all.",
    "RankingRequest.truncate": SIDE,
    "RankedText.text": "The text.",
}
DIALECT = Dialect(handlers=[ranking, hosted_ranking], examples=EXAMPLES, meanings=MEANINGS)
