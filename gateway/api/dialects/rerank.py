"""Cohere's, Jina's and Voyage's rerank: /v1/rerank, /v2/rerank, and /rerank, which they share with TEI.

Source: as in `rerank_bodies.py`.
"""

from typing import Any

from litestar.openapi.datastructures import ResponseSpec
from msgspec import UnsetType

from backends.contract import Rerank, RerankReply
from gateway.api.server.encoding import json_bytes
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import COHERE, RERANK, TEI
from gateway.api.server.inference_api import InferenceApi, expect_reply, respond
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.rerank_bodies import (
    EitherRerankRequest,
    RerankOptions,
    RerankRequest,
    RerankResponse,
    RerankV2Response,
    VoyageRerankResponse,
    count_of,
    decode_documents,
    is_voyages,
    meta_of,
    rank_documents,
    with_documents,
)
from gateway.api.wire.tei_bodies import (
    TeiRank,
    TeiRerankRequest,
    compute_headers,
    decode_rerank,
    encode_rerank,
)
from gateway.calls import Call
from gateway.errors import InvalidInput
from gateway.serve import Served

# Litestar's annotation of a response does not accept unions.
EITHER_RESPONSE: Any = RerankResponse | VoyageRerankResponse
ANY_RESPONSE: Any = list[TeiRank] | RerankResponse | VoyageRerankResponse


def _documents_of(call: Call) -> tuple[str, ...]:
    assert isinstance(call.work, Rerank)
    return call.work.documents


async def _serve_v1(data: RerankOptions, call: Call, context: RequestContext, api: InferenceApi) -> HttpReply:
    """Serve a call and reply as Voyage, or with the fields of both Cohere and Jina."""
    count = count_of(data)
    served = await api.serve(context, call)
    texts, results = _documents_of(call), rank_documents(expect_reply(served.reply, RerankReply), count)
    if is_voyages(data):
        results = with_documents(results, texts) if data.return_documents else results
        usage = {"total_tokens": served.reply.tokens}
        body = {"object": "list", "data": results, "model": served.route.model, "usage": usage}
        return respond(context, served, json_bytes(body))
    if data.return_documents is not False:
        results = with_documents(results, [{"text": text} for text in texts])
    body = {
        "id": data.request_id or context.request_id,
        "object": "list",
        "model": served.route.model,
        "results": results,
        "usage": {"prompt_tokens": served.reply.tokens, "total_tokens": served.reply.tokens},
        "meta": meta_of(served, len(texts), "1"),
    }
    return respond(context, served, json_bytes(body))


@inference(
    "/v1/rerank",
    dialect=RERANK,
    reply=ResponseSpec(EITHER_RESPONSE, description="Documents, best first; to `top_k` in Voyage's form"),
    tags=["Cohere and Jina"],
)
async def rerank_v1(
    data: RerankRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,
) -> HttpReply:
    """Rank documents by their relevance to a query.

    Returns the best `top_n` documents, best first, with the fields that Cohere's and Jina's clients read. The
    reply to a body with `top_k` is Voyage's.
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
    call = decode_documents(data, data.documents, name, api)
    served = await api.serve(context, call)
    texts = _documents_of(call)
    results = rank_documents(expect_reply(served.reply, RerankReply), count_of(data))
    if data.return_documents:
        results = with_documents(results, [{"text": text} for text in texts])
    meta = meta_of(served, len(texts), "2")
    body = {"id": data.request_id or context.request_id, "results": results, "meta": meta}
    return respond(context, served, json_bytes(body))


@inference(
    "/rerank",
    dialect={"texts": TEI, "documents": RERANK},
    reply=ResponseSpec(
        ANY_RESPONSE, description="To `texts` every text, best first; to `documents` as /v1/rerank"
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
        if data.raw_scores:
            raise InvalidInput(
                "`raw_scores` belongs to `texts`: with `documents` send `use_activation: false`",
                param="raw_scores",
            )
        return await _serve_v1(data, decode_documents(data, data.documents, name, api), context, api)
    assert not isinstance(data.texts, UnsetType)
    call = decode_rerank(_tei_request(data, data.texts), name, api)
    served: Served = await api.serve(context, call)
    body = encode_rerank(expect_reply(served.reply, RerankReply), data.texts if data.return_text else None)
    return respond(context, served, body, compute_headers(context, served.reply, call))


def _tei_request(data: EitherRerankRequest, texts: list[str]) -> TeiRerankRequest:
    if not isinstance(data.query, str):
        raise InvalidInput("`query` is a text where `texts` are sent", param="query")
    return TeiRerankRequest(
        query=data.query,
        texts=texts,
        truncate=data.truncate,
        truncation_direction=data.truncation_direction,
        raw_scores=data.raw_scores,
        model=data.model,
    )


HANDLERS = [rerank_v1, rerank_v2, rerank]
