"""Rerank on Amazon Bedrock: of Cohere through InvokeModel, and of the agents' runtime for all. Pure.

Source: botocore's service model of bedrock-agent-runtime 2023-07-26, and Cohere's API reference.
"""

from typing import Any

import msgspec

from backends.contract import Rerank, Truncate
from backends.contract.errors import InvalidWork, input_too_long
from backends.hosted.models import Body, HostedModel, HostedRoute, Request, Rows, every_place
from backends.http.answers import decode_json
from backends.http.client import UpstreamResponse
from backends.http.replies import order_scores

# Of a text, by the service model.
CHARACTERS_MAX = 32_000


class CohereScore(msgspec.Struct, frozen=True):
    """Score of one document."""

    index: int
    relevance_score: float


class CohereScores(msgspec.Struct, frozen=True):
    """Body of a rerank of Cohere."""

    results: list[CohereScore]


def _cohere(work: Rerank, model: HostedModel) -> list[Request]:
    body = {"api_version": 2, "query": work.query, "documents": work.documents, "top_n": len(work.documents)}
    return [Request(model.path, body, every_place(work))]


def _decode_cohere(response: UpstreamResponse, expected: int) -> Rows:
    found = decode_json(response.body, CohereScores).results
    return Rows(order_scores([(item.index, item.relevance_score) for item in found], expected))


# --- Rerank of the agents' runtime, for Amazon's and Cohere's models


class AgentScore(msgspec.Struct, frozen=True, rename="camel"):
    """Score of one document."""

    index: int
    relevance_score: float


class AgentScores(msgspec.Struct, frozen=True, rename="camel"):
    """Body of Rerank; next_token: of the next page."""

    results: list[AgentScore]
    next_token: str | None = None


def _agent(work: Rerank, model: HostedModel) -> list[Request]:
    query = _agent_text(work.query, work, None)
    sources = [
        {
            "type": "INLINE",
            "inlineDocumentSource": {"type": "TEXT", "textDocument": {"text": _agent_text(text, work, i)}},
        }
        for i, text in enumerate(work.documents)
    ]
    configuration = {"modelConfiguration": {"modelArn": model.name}, "numberOfResults": len(sources)}
    body = {
        "queries": [{"type": "TEXT", "textQuery": {"text": query}}],
        "sources": sources,
        "rerankingConfiguration": {
            "type": "BEDROCK_RERANKING_MODEL",
            "bedrockRerankingConfiguration": configuration,
        },
    }
    return [Request(model.path, body, every_place(work))]


def _agent_text(text: str, work: Rerank, index: int | None) -> str:
    """Return a text within the bounds of Rerank. Raises: InvalidWork."""
    if not text:
        raise InvalidWork("this upstream takes no empty text", empty=True, input_index=index)
    if len(text) <= CHARACTERS_MAX:
        return text
    if work.truncate is Truncate.ERROR:
        raise input_too_long(None, input_index=index)
    return text[:CHARACTERS_MAX]


def _decode_agent(response: UpstreamResponse, expected: int) -> Rows:
    found = decode_json(response.body, AgentScores).results
    return Rows(order_scores([(item.index, item.relevance_score) for item in found], expected))


COHERE = HostedRoute(_cohere, _decode_cohere)
AGENT = HostedRoute(_agent, _decode_agent)


def next_page(body: Body, response: UpstreamResponse) -> tuple[list[Any], Body | None]:
    """Return the results on a page of Rerank, and the body for the next one, None after the last."""
    page = decode_json(response.body, AgentScores)
    results = [{"index": item.index, "relevanceScore": item.relevance_score} for item in page.results]
    return results, None if page.next_token is None else body | {"nextToken": page.next_token}
