"""Cohere's, Jina's and Voyage's rerank: /v1/rerank, /v2/rerank, and /rerank, which they share with TEI.

Source: as in `rerank_bodies.py`.
"""

from functools import partial
from typing import Any

from msgspec import UnsetType

from backends.contract import Rerank, RerankReply
from gateway.api.dialects.cohere.errors import COHERE, RERANK
from gateway.api.dialects.cohere.rerank_bodies import (
    Documents,
    EitherRerankRequest,
    RerankOptions,
    RerankRequest,
    RerankResponse,
    RerankV2Response,
    VoyageRerankResponse,
    count_of,
    decode_documents,
    decode_images,
    is_voyages,
    meta_of,
    shown_documents,
    with_documents,
)
from gateway.api.server.encoding import json_bytes
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import TEI
from gateway.api.server.inference_api import InferenceApi, expect_reply, respond
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.replies import rank_documents
from gateway.api.wire.tei import (
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


async def decode_call(
    data: RerankOptions, documents: Documents, name: str | None, context: RequestContext, api: InferenceApi
) -> Call:
    """Decode a body with `documents`, texts or images. Raises: as `decode_images`."""
    fetch = partial(api.fetch_media, context, name or data.model)
    call = await decode_images(data, documents, name, fetch, api)
    return call or decode_documents(data, documents, name, api)


def _shown(call: Call, documents: Documents) -> list[Any]:
    """Return the documents as a reply shows them."""
    if isinstance(call.work, Rerank):
        return [{"text": text} for text in call.work.documents]
    return shown_documents(documents)


async def _serve_v1(
    data: RerankOptions, documents: Documents, name: str | None, context: RequestContext, api: InferenceApi
) -> HttpReply:
    """Serve a body and reply as Voyage, or with the fields of both Cohere and Jina."""
    call = await decode_call(data, documents, name, context, api)
    count = count_of(data)
    served = await api.serve(context, call)
    shown, results = _shown(call, documents), rank_documents(expect_reply(served.reply, RerankReply), count)
    if is_voyages(data):
        texts = [document["text"] for document in shown]
        results = with_documents(results, texts) if data.return_documents else results
        usage = {"total_tokens": served.reply.tokens}
        body = {"object": "list", "data": results, "model": served.route.model, "usage": usage}
        return respond(context, served, json_bytes(body))
    # Images are large: without a word from the caller they are not sent back.
    if data.return_documents or (data.return_documents is None and isinstance(call.work, Rerank)):
        results = with_documents(results, shown)
    body = {
        "id": data.request_id or context.request_id,
        "object": "list",
        "model": served.route.model,
        "results": results,
        "usage": {"prompt_tokens": served.reply.tokens, "total_tokens": served.reply.tokens},
        "meta": meta_of(served, len(shown), "1"),
    }
    return respond(context, served, json_bytes(body))


@inference(
    "/v1/rerank",
    errors=RERANK,
    reply=EITHER_RESPONSE,
    description="Documents, best first; to `top_k` in Voyage's form",
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
    return await _serve_v1(data, data.documents, name, context, api)


@inference(
    "/v2/rerank",
    errors=COHERE,
    reply=RerankV2Response,
    description="Documents, best first",
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
    call = await decode_call(data, data.documents, name, context, api)
    served = await api.serve(context, call)
    shown = _shown(call, data.documents)
    results = rank_documents(expect_reply(served.reply, RerankReply), count_of(data))
    if data.return_documents:
        results = with_documents(results, shown)
    meta = meta_of(served, len(shown), "2")
    body = {"id": data.request_id or context.request_id, "results": results, "meta": meta}
    return respond(context, served, json_bytes(body))


@inference(
    "/rerank",
    errors={"texts": TEI, "documents": RERANK},
    reply=ANY_RESPONSE,
    description="To `texts` every text, best first; to `documents` as /v1/rerank",
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
        return await _serve_v1(data, data.documents, name, context, api)
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
