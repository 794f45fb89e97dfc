"""Text Embeddings Inference: /embed_sparse and /embed_all, what is not one dense vector a text.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/types.rs and server.rs.
"""

import msgspec
from litestar import post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody

from backends.contract import Encode, EncodeReply, Operation, Output, TermWeights
from gateway.api.wire.inputs import Inputs, read_texts
from gateway.api.dialects.tei import Direction, compute_headers, side_of
from gateway.api.server.body import ModelName
from gateway.api.server.encoding import json_bytes
from gateway.api.server.error_bodies import documented
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import DIRECT, Api, HttpReply, expect_reply, respond
from gateway.calls import Call
from gateway.errors import InvalidInput

FAILURES = documented("tei")
# A vector of a thousand numbers for each token is 11 KB of JSON: what 32 texts of 512 tokens come to.
TOKEN_VECTORS_BYTES_MAX = 65_536


class EncodeRequest(msgspec.Struct):
    """Fields that are not `| None` refuse null, as TEI's do."""

    inputs: Inputs
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None
    model: ModelName | None = None


class Weight(msgspec.Struct):
    """One term of the vocabulary and its weight."""

    index: int
    value: float


async def decode_encode(
    data: EncodeRequest, output: Output, name: str | None, context: RequestContext, api: Api
) -> Call:
    """Raises: EmptyInput, InvalidInput, and what reading token ids raises."""
    model = name or data.model
    texts = await read_texts(data.inputs, "inputs", model, context, api, Operation.ENCODE)
    if output is not Output.SPARSE:
        check_token_vectors(texts, "inputs")
    work = Encode(texts, frozenset({output}), prompt_name=data.prompt_name)
    return Call(work, model, data.truncate, side_of(data))


def check_token_vectors(texts: tuple[str, ...], field: str) -> None:
    """Raises: InvalidInput where a vector for each token would be too much."""
    if sum(len(text.encode()) for text in texts) > TOKEN_VECTORS_BYTES_MAX:
        raise InvalidInput(
            f"more than {TOKEN_VECTORS_BYTES_MAX} bytes of text; a vector for each token is many times that",
            param=field,
        )


def encode_terms(terms: TermWeights) -> list[dict[str, object]]:
    """One input's weights as TEI lists them."""
    pairs = zip(terms.indices.tolist(), terms.values, strict=True)
    return [{"index": index, "value": value} for index, value in pairs]


@post(
    ["/embed_sparse", "/models/{name:str}/embed_sparse"],
    status_code=200,
    opt=DIRECT,
    responses={200: ResponseSpec(list[list[Weight]], description="The terms of each input")} | FAILURES,
    tags=["TEI"],
)
async def embed_sparse(
    data: JSONBody[EncodeRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,
) -> HttpReply:
    """Turn texts into weights of terms."""
    call = await decode_encode(data, Output.SPARSE, name, context, api)
    served = await api.serve(context, call)
    reply: EncodeReply = expect_reply(served.reply, EncodeReply)
    body = json_bytes([encode_terms(one) for one in reply.sparse or ()])
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
    data: JSONBody[EncodeRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,
) -> HttpReply:
    """Turn texts into a vector for each token."""
    call = await decode_encode(data, Output.TOKENS, name, context, api)
    served = await api.serve(context, call)
    reply: EncodeReply = expect_reply(served.reply, EncodeReply)
    body = json_bytes(list(reply.token_vectors or ()))
    return respond(context, served, body, compute_headers(context, served, call))


HANDLERS = [embed_sparse, embed_all]
