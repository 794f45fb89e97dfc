"""Text Embeddings Inference: /embed_sparse and /embed_all, for outputs other than one dense vector a text.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/types.rs and server.rs.
"""

from litestar.openapi.datastructures import ResponseSpec

from backends.contract import EncodeReply
from gateway.api.server.encoding import json_bytes
from gateway.api.server.endpoints import BodyForms, inference
from gateway.api.server.error_bodies import TEI
from gateway.api.server.inference_api import InferenceApi, expect_reply, respond
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.arrow_http import arrow_body, arrow_sparse, facts_of, wants_arrow
from gateway.api.wire.tei_bodies import (
    TeiEncodeRequest,
    TeiWeight,
    compute_headers,
    decode_sparse,
    decode_token_vectors,
    term_items,
)


@inference(
    "/embed_sparse",
    dialect=TEI,
    reply=ResponseSpec(list[list[TeiWeight]], description="The terms of each input"),
    tags=["TEI"],
    forms=BodyForms(arrow=arrow_body(TeiEncodeRequest, "inputs")),
)
async def embed_sparse(
    data: TeiEncodeRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,
) -> HttpReply:
    """Turn texts into sparse vectors.

    Returns the weighted terms of each input, in the order of the inputs. Takes and returns Arrow as `/embed`
    does.
    """
    as_arrow = wants_arrow(context)
    call = await decode_sparse(data, name, context, api)
    served = await api.serve(context, call)
    reply: EncodeReply = expect_reply(served.reply, EncodeReply)
    if as_arrow:
        stream, media_type = await arrow_sparse(context, reply, facts_of(served.route.model, reply.tokens))
        return respond(context, served, stream, compute_headers(context, served.reply, call), media_type)
    body = json_bytes([term_items(terms) for terms in reply.sparse or ()])
    return respond(context, served, body, compute_headers(context, served.reply, call))


@inference(
    "/embed_all",
    dialect=TEI,
    reply=ResponseSpec(list[list[list[float]]], description="A vector for each token of each input"),
    tags=["TEI"],
)
async def embed_all(
    data: TeiEncodeRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,
) -> HttpReply:
    """Turn texts into one vector for each token.

    Returns a list of vectors for each input, in the order of the inputs. The vectors are not normalized.
    """
    call = await decode_token_vectors(data, name, context, api)
    served = await api.serve(context, call)
    reply: EncodeReply = expect_reply(served.reply, EncodeReply)
    body = json_bytes(list(reply.token_vectors or ()))
    return respond(context, served, body, compute_headers(context, served.reply, call))


HANDLERS = [embed_sparse, embed_all]
