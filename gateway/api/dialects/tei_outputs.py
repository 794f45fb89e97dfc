"""Text Embeddings Inference: /embed_sparse and /embed_all, for outputs other than one dense vector a text.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/types.rs and server.rs.
"""

from litestar import post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody

from backends.contract import EncodeReply
from gateway.api.server.encoding import json_bytes
from gateway.api.server.error_bodies import documented
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import DIRECT, Api, HttpReply, expect_reply, respond
from gateway.api.wire.tei_bodies import (
    TeiEncodeRequest,
    TeiWeight,
    compute_headers,
    decode_sparse,
    decode_token_vectors,
    term_items,
)

FAILURES = documented("tei")


@post(
    ["/embed_sparse", "/models/{name:str}/embed_sparse"],
    status_code=200,
    opt=DIRECT,
    responses={200: ResponseSpec(list[list[TeiWeight]], description="The terms of each input")} | FAILURES,
    tags=["TEI"],
)
async def embed_sparse(
    data: JSONBody[TeiEncodeRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,
) -> HttpReply:
    """Turn texts into sparse vectors.

    Returns the weighted terms of each input, in the order of the inputs.
    """
    call = await decode_sparse(data, name, context, api)
    served = await api.serve(context, call)
    reply: EncodeReply = expect_reply(served.reply, EncodeReply)
    body = json_bytes([term_items(terms) for terms in reply.sparse or ()])
    return respond(context, served, body, compute_headers(context, served, call))


@post(
    ["/embed_all", "/models/{name:str}/embed_all"],
    status_code=200,
    opt=DIRECT,
    responses={
        200: ResponseSpec(list[list[list[float]]], description="A vector for each token of each input")
    }
    | FAILURES,
    tags=["TEI"],
)
async def embed_all(
    data: JSONBody[TeiEncodeRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,
) -> HttpReply:
    """Turn texts into one vector for each token.

    Returns a list of vectors for each input, in the order of the inputs. The vectors are not normalized.
    """
    call = await decode_token_vectors(data, name, context, api)
    served = await api.serve(context, call)
    reply: EncodeReply = expect_reply(served.reply, EncodeReply)
    body = json_bytes(list(reply.token_vectors or ()))
    return respond(context, served, body, compute_headers(context, served, call))


HANDLERS = [embed_sparse, embed_all]
