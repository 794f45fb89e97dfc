"""Tokens of texts: /tokenize, which TEI and vLLM share, and TEI's /decode.

Source: text-embeddings-inference 1.9.3, router/src/http/types.rs; vLLM 0.33, entrypoints/serve/tokenize.
"""

from typing import Any

import msgspec
from msgspec import UNSET

from backends.contract import DetokenizeReply, Operation, Token, TokenizeReply
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import TEI, VLLM
from gateway.api.server.request import LEAST_WITHOUT_TOKENS, Request
from gateway.api.server.responses import HttpReply
from gateway.api.wire.tokens import DecodeRequest, TokenizeRequest, decode_detokenize, decode_tokenize


class TokenList(msgspec.Struct):
    """vLLM's reply. max_model_len: null if it is unknown."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


TOKENIZE_RESPONSE: Any = list[list[Token]] | TokenList


@inference(
    "/tokenize",
    errors={"inputs": TEI, "prompt": VLLM, "messages": VLLM},
    reply=TOKENIZE_RESPONSE,
    description="The tokens of each input",
    tags=["TEI", "vLLM"],
    least=LEAST_WITHOUT_TOKENS,
)
async def tokenize(request: Request[TokenizeRequest]) -> HttpReply:
    """Split texts into tokens.

    `inputs` is TEI's dialect and returns the tokens of each input; `prompt` is vLLM's and returns one list of
    ids.
    """
    data, api = request.body, request.api
    served, reply = await request.serve(
        await decode_tokenize(data, request.name, request.context, api), TokenizeReply
    )
    if data.prompt is UNSET:
        return request.reply_bytes(served, msgspec.json.encode(reply.inputs))
    (tokens,) = reply.inputs
    capabilities = api.capabilities_of(served.route.model, Operation.TOKENIZE, served.tenant)
    max_tokens = capabilities.max_input_tokens if capabilities else None
    texts = [token.text for token in tokens] if data.return_token_strs else None
    token_list = TokenList(len(tokens), max_tokens, [token.id for token in tokens], texts)
    return request.reply_bytes(served, msgspec.json.encode(token_list))


@inference(
    "/decode",
    errors=TEI,
    tags=["TEI"],
    reply=list[str],
    description="A text for each list of ids",
    least=LEAST_WITHOUT_TOKENS,
)
async def decode(request: Request[DecodeRequest]) -> HttpReply:
    """Turn token ids into texts.

    Returns one text for each list of ids.
    """
    call = await decode_detokenize(request.body, request.name, request.context, request.api)
    served, reply = await request.serve(call, DetokenizeReply)
    return request.reply_bytes(served, msgspec.json.encode(reply.texts))


HANDLERS = [tokenize, decode]
