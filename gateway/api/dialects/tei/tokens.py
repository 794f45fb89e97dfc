"""Tokens of texts: /tokenize, which TEI and vLLM share, and TEI's /decode.

Source: text-embeddings-inference 1.9.3, router/src/http/types.rs; vLLM 0.33, entrypoints/serve/tokenize.
"""

from typing import Any

import msgspec
from msgspec import UNSET

from backends.contract import Detokenize, DetokenizeReply, Operation, Token, TokenizeReply
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import TEI, VLLM
from gateway.api.server.inference_api import InferenceApi, expect_reply, respond
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.least_costs import LEAST_WITHOUT_TOKENS
from gateway.api.wire.tokens import DecodeRequest, TokenizeRequest, decode_ids, decode_tokenize
from gateway.calls import Call


class TokenList(msgspec.Struct):
    """vLLM's reply. max_model_len: null if it is unknown."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


TOKENIZE_RESPONSE: Any = list[list[Token]] | TokenList


def encode_token_list(tokens: tuple[Token, ...], max_tokens: int | None, *, strings: bool) -> bytes:
    """Encode vLLM's reply. strings: include the text of each token."""
    texts = [token.text for token in tokens] if strings else None
    return msgspec.json.encode(TokenList(len(tokens), max_tokens, [token.id for token in tokens], texts))


@inference(
    "/tokenize",
    errors={"inputs": TEI, "prompt": VLLM, "messages": VLLM},
    reply=TOKENIZE_RESPONSE,
    description="The tokens of each input",
    tags=["TEI", "vLLM"],
    least=LEAST_WITHOUT_TOKENS,
)
async def tokenize(
    data: TokenizeRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,
) -> HttpReply:
    """Split texts into tokens.

    `inputs` is TEI's dialect and returns the tokens of each input; `prompt` is vLLM's and returns one list of
    ids.
    """
    call = decode_tokenize(data, name, api)
    served = await api.serve(context, call)
    inputs = expect_reply(served.reply, TokenizeReply).inputs
    if data.prompt is UNSET:
        return respond(context, served, msgspec.json.encode(inputs))
    capabilities = api.capabilities_of(served.route.model, Operation.TOKENIZE)
    max_tokens = capabilities.max_input_tokens if capabilities else None
    body = encode_token_list(inputs[0], max_tokens, strings=bool(data.return_token_strs))
    return respond(context, served, body)


@inference(
    "/decode",
    errors=TEI,
    tags=["TEI"],
    reply=list[str],
    description="A text for each list of ids",
    least=LEAST_WITHOUT_TOKENS,
)
async def decode(
    data: DecodeRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,
) -> HttpReply:
    """Turn token ids into texts.

    Returns one text for each list of ids.
    """
    work = Detokenize(decode_ids(data.ids, "ids", api), skip_special_tokens=data.skip_special_tokens)
    served = await api.serve(context, Call(work, name or data.model))
    return respond(context, served, msgspec.json.encode(expect_reply(served.reply, DetokenizeReply).texts))


HANDLERS = [tokenize, decode]
