"""Cohere's and Jina's rerank: /v1/rerank, /v2/rerank, and /rerank, which they share with TEI.

Source: cohere-python 7.0.9, Jina's OpenAPI document 2026.04.02. Clients of both call /v1/rerank, so its reply
has the fields of both.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from litestar.openapi.datastructures import ResponseSpec
from msgspec import UNSET, UnsetType

from backends.contract import Operation, Rerank, RerankReply
from backends.texts import token_upper_bound
from gateway.api.server.body import INTEGER_MAX, Integer, ModelName
from gateway.api.server.encoding import json_bytes
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import COHERE, RERANK, TEI
from gateway.api.server.inference_api import InferenceApi, expect_reply, respond
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.tei_bodies import (
    TeiRank,
    TeiRerankRequest,
    compute_headers,
    decode_rerank,
    encode_rerank,
)
from gateway.api.wire.tei_truncation import Direction
from gateway.api.wire.vllm_options import (
    VllmOptions,
    check_options,
    instruction_of,
    is_raw,
    truncate_of,
    truncation_side,
)
from gateway.calls import Call
from gateway.errors import EmptyInput, InvalidInput
from gateway.serve import Served

# 0 means all documents for vLLM's clients. Cohere's and Jina's never send it.
TopN = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
# 0, which is vLLM's default, is no bound.
DocumentTokens = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
# Source: Cohere's pricing: one search unit is a query with up to 100 documents.
DOCUMENTS_PER_SEARCH_UNIT = 100
NOT_CUT = "max_tokens_per_doc is not applied: a document is cut at the model's own length only"


class Document(msgspec.Struct):
    """A document as an object. Keys other than these are ignored. image: Jina's; refused."""

    text: str | UnsetType = UNSET
    image: Any = UNSET


Documents = list[str | Document]


class RerankOptions(VllmOptions, kw_only=True):
    """Options of every rerank request, with vLLM's fields.

    truncation: Jina's switch. priority: Cohere's; 0, its highest and default, is interactive; any other value
    is bulk. rank_fields, max_chunks_per_doc and return_embeddings are refused.
    """

    query: str
    model: ModelName | None = None
    top_n: TopN | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: DocumentTokens | None = None
    truncation: bool | None = None
    rank_fields: list[str] | None = None
    max_chunks_per_doc: Integer | None = None
    return_embeddings: bool | None = None


class RerankRequest(RerankOptions, kw_only=True):
    """Body of /v1/rerank and /v2/rerank. documents: strings, or objects with `text`."""

    documents: Documents


class EitherRerankRequest(RerankOptions, kw_only=True):
    """Body of /rerank: `texts` with TEI's options, or `documents` with Cohere's and Jina's."""

    texts: list[str] | UnsetType = UNSET
    documents: Documents | UnsetType = UNSET
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    raw_scores: bool = False
    return_text: bool = False


class DocumentText(msgspec.Struct):
    """A document in the reply."""

    text: str


class RankedDocument(msgspec.Struct, omit_defaults=True):
    """Score of one document. index: its place in the request. document: only with `return_documents`."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


class RankedIndex(msgspec.Struct):
    """Score of one document. index: its place in the request."""

    index: int
    relevance_score: float


class RerankUsage(msgspec.Struct):
    """Tokens after truncation, with special tokens. The query counts with each document."""

    prompt_tokens: int
    total_tokens: int


class RerankMeta(msgspec.Struct, omit_defaults=True):
    """Cohere's metadata: api_version {version}, billed_units {search_units}, tokens {input_tokens}."""

    api_version: dict[str, str]
    billed_units: dict[str, int]
    tokens: dict[str, int]
    warnings: list[str] | None = None


class RerankResponse(msgspec.Struct):
    """Results, best first. Equal scores are in the request's order."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: RerankUsage
    meta: RerankMeta
    object: str = "list"


class RerankV2Response(msgspec.Struct):
    """Results, best first, without documents. Equal scores are in the request's order."""

    id: str
    results: list[RankedIndex]
    meta: RerankMeta


def decode_documents(data: RerankOptions, documents: Documents, name: str | None, api: InferenceApi) -> Call:
    """Decode a body with `documents`. name: the model in the path.

    An empty document is scored like any other. An empty query is an error.
    Raises: EmptyInput, InvalidInput.
    """
    for field in ("rank_fields", "max_chunks_per_doc"):
        if getattr(data, field) is not None:
            raise InvalidInput(f"`{field}` is not supported: join fields, cut texts before", param=field)
    if data.return_embeddings:
        raise InvalidInput("`return_embeddings` is not supported", param="return_embeddings")
    check_options(data, own={"priority"})
    if not data.query:
        raise EmptyInput("`query` is an empty string", param="query")
    api.check_count(len(documents), "documents")
    texts = api.texts([_text_of(document, index) for index, document in enumerate(documents)], "documents")
    model = name or data.model
    work = Rerank(data.query, texts, raw_scores=is_raw(data))
    truncate = data.truncation
    if data.truncate_prompt_tokens is not None:
        capabilities = api.capabilities_of(model, Operation.RERANK)
        truncate = truncate_of(data, capabilities.max_input_tokens if capabilities else None)
    return Call(
        work,
        model,
        truncate,
        truncation_side(data),
        bulk=bool(data.priority),
        instruction=instruction_of(data),
    )


def _text_of(document: str | Document, index: int) -> str:
    if isinstance(document, str):
        return document
    if document.image is not UNSET:
        raise InvalidInput(f"`documents` {index} is an image; texts are ranked here", param="documents")
    if isinstance(document.text, UnsetType):
        raise InvalidInput(f"`documents` {index} is an object without `text`", param="documents")
    return document.text


def rank_documents(reply: RerankReply, top_n: int | None) -> list[dict[str, Any]]:
    """Return at most top_n results, best first. Equal scores stay in the request's order.

    top_n: 0 and None return all.
    """
    scores = reply.scores.tolist()
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return [{"index": index, "relevance_score": reply.scores[index]} for index in order[: top_n or None]]


def encode_results(
    results: list[dict[str, Any]], data: RerankOptions, texts: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the results, with their documents if the request asks for them."""
    if not data.return_documents:
        return results
    return [result | {"document": {"text": texts[result["index"]]}} for result in results]


def meta_of(data: RerankOptions, texts: Sequence[str], tokens: int, version: str) -> dict[str, Any]:
    """Return Cohere's metadata of a reply."""
    meta: dict[str, Any] = {
        "api_version": {"version": version},
        "billed_units": {"search_units": -(-len(texts) // DOCUMENTS_PER_SEARCH_UNIT)},
        "tokens": {"input_tokens": tokens},
    }
    allowed = data.max_tokens_per_doc
    if allowed and any(token_upper_bound(text) > allowed for text in texts):
        meta["warnings"] = [NOT_CUT]
    return meta


# Litestar's annotation of a response does not accept unions.
EITHER_RESPONSE: Any = list[TeiRank] | RerankResponse


def _work_of(call: Call) -> Rerank:
    assert isinstance(call.work, Rerank)
    return call.work


async def _serve_v1(data: RerankOptions, call: Call, context: RequestContext, api: InferenceApi) -> HttpReply:
    """Serve a call and reply with the fields of both Cohere and Jina."""
    served = await api.serve(context, call)
    reply, texts = expect_reply(served.reply, RerankReply), _work_of(call).documents
    body = {
        "id": context.request_id,
        "object": "list",
        "model": served.route.model,
        "results": encode_results(rank_documents(reply, data.top_n), data, texts),
        "usage": {"prompt_tokens": reply.tokens, "total_tokens": reply.tokens},
        "meta": meta_of(data, texts, reply.tokens, "1"),
    }
    return respond(context, served, json_bytes(body))


@inference(
    "/v1/rerank",
    dialect=RERANK,
    reply=ResponseSpec(RerankResponse, description="Documents, best first"),
    tags=["Cohere and Jina"],
)
async def rerank_v1(
    data: RerankRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,
) -> HttpReply:
    """Rank documents by their relevance to a query.

    Returns the best `top_n` documents, best first, with the fields that Cohere's and Jina's clients read.
    """
    return await _serve_v1(data, decode_documents(data, data.documents, name, api), context, api)


@inference(
    "/v2/rerank",
    dialect=COHERE,
    reply=ResponseSpec(RerankV2Response, description="Documents, best first"),
    tags=["Cohere and Jina"],
)
async def rerank_v2(
    data: RerankRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,
) -> HttpReply:
    """Rank documents by relevance to a query, using Cohere's v2 API.

    Returns the best `top_n` documents by index, best first.
    """
    if data.top_n == 0:
        raise InvalidInput("`top_n` is at least 1; leave it out for all documents", param="top_n")
    call = decode_documents(data, data.documents, name, api)
    served = await api.serve(context, call)
    reply: RerankReply = expect_reply(served.reply, RerankReply)
    meta = meta_of(data, _work_of(call).documents, reply.tokens, "2")
    body = {"id": context.request_id, "results": rank_documents(reply, data.top_n), "meta": meta}
    return respond(context, served, json_bytes(body))


@inference(
    "/rerank",
    dialect={"texts": TEI, "documents": RERANK},
    reply=ResponseSpec(
        EITHER_RESPONSE, description="To `texts` every text, best first; to `documents` as /v1/rerank"
    ),
    tags=["TEI"],
)
async def rerank(
    data: EitherRerankRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,
) -> HttpReply:
    """Rank `texts` (TEI) or `documents` (Cohere, Jina) by their relevance to a query.

    The reply and its errors are in the dialect of the field that the body has.
    """
    if not isinstance(data.documents, UnsetType):
        return await _serve_v1(data, decode_documents(data, data.documents, name, api), context, api)
    assert not isinstance(data.texts, UnsetType)
    call = decode_rerank(_tei_request(data, data.texts), name, api)
    served: Served = await api.serve(context, call)
    body = encode_rerank(expect_reply(served.reply, RerankReply), data.texts if data.return_text else None)
    return respond(context, served, body, compute_headers(context, served, call))


def _tei_request(data: EitherRerankRequest, texts: list[str]) -> TeiRerankRequest:
    return TeiRerankRequest(
        query=data.query,
        texts=texts,
        truncate=data.truncate,
        truncation_direction=data.truncation_direction,
        raw_scores=data.raw_scores,
        model=data.model,
    )


HANDLERS = [rerank_v1, rerank_v2, rerank]
