"""Bodies of /tokenize and /decode, with their decoders.

Source: text-embeddings-inference 1.9.3, router/src/http/types.rs; vLLM 0.33, entrypoints/serve/tokenize.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from backends.contract import Detokenize, Tokenize
from backends.contract.texts import DETOKENIZE_IDS_MAX, TOKENIZE_BYTES_MAX
from gateway.api.server.body import Integer, ModelName
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.request_context import RequestContext
from gateway.api.wire.inputs import PromptName, check_ids
from gateway.calls import Call
from gateway.errors import EmptyInput, InvalidInput


class TokenizeRequest(msgspec.Struct):
    """Body of /tokenize.

    inputs: texts, in TEI's dialect. prompt: one text, in vLLM's. messages: refused, because
    no adapter lists the tokens of a conversation.
    """

    inputs: str | list[str] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    messages: list[Any] | UnsetType = UNSET
    add_special_tokens: bool = True
    prompt_name: PromptName | None = None
    return_token_strs: bool | None = False
    model: ModelName | None = None


class DecodeRequest(msgspec.Struct):
    """Body of TEI's /decode: one list of ids, or a list of lists."""

    ids: list[Integer | list[Integer]]
    skip_special_tokens: bool = True
    model: ModelName | None = None


async def decode_tokenize(
    data: TokenizeRequest, name: str | None, _: RequestContext, api: InferenceApi
) -> Call:
    """Decode a body of either dialect. name: the model in the path. Raises: EmptyInput, InvalidInput."""
    if data.messages is not UNSET:
        raise InvalidInput(
            "`messages` is refused: tokens are listed of texts only; send the rendered text as `prompt`",
            param="messages",
        )
    if data.prompt is not UNSET:
        # An empty prompt is allowed: vLLM returns its special tokens.
        field, texts = "prompt", api.texts([data.prompt], "prompt")
    else:
        assert data.inputs is not UNSET
        field, texts = "inputs", api.whole_texts(data.inputs, "inputs")
    work = Tokenize(
        texts,
        add_special_tokens=data.add_special_tokens,
        prompt_name=data.prompt_name,
        # vLLM's `token_strs` are the vocabulary's.
        pieces=data.prompt is not UNSET,
    )
    return Call(tokenize_checked(work, field), name or data.model)


async def decode_detokenize(
    data: DecodeRequest, name: str | None, _: RequestContext, api: InferenceApi
) -> Call:
    """Decode a body of TEI's /decode. name: the model in the path. Raises: EmptyInput, InvalidInput."""
    ids = decode_ids(data.ids, "ids", api)
    return Call(Detokenize(ids, skip_special_tokens=data.skip_special_tokens), name or data.model)


def tokenize_checked(work: Tokenize, field: str) -> Tokenize:
    """Return the work if its texts are not too long. field: their name. Raises: InvalidInput."""
    if sum(len(text.encode()) for text in work.inputs) > TOKENIZE_BYTES_MAX:
        raise InvalidInput(
            f"more than {TOKENIZE_BYTES_MAX} bytes of text; a reply is many times as long", param=field
        )
    return work


def decode_ids(ids: list[int | list[int]], field: str, api: InferenceApi) -> tuple[tuple[int, ...], ...]:
    """Return each list of ids. Raises: EmptyInput, InvalidInput."""
    lists = [tuple(item) for item in ids if isinstance(item, list)]
    numbers = [item for item in ids if isinstance(item, int)]
    if numbers and lists:
        raise InvalidInput(f"`{field}` mixes numbers with lists", param=field)
    inputs = lists or [tuple(numbers)]
    api.check_count(len(inputs), field)
    if not all(inputs):
        raise EmptyInput(f"`{field}` contains an empty list", param=field)
    if sum(map(len, inputs)) > DETOKENIZE_IDS_MAX:
        raise InvalidInput(f"more than {DETOKENIZE_IDS_MAX} ids in a call", param=field)
    check_ids([number for item in inputs for number in item], field)
    return tuple(inputs)
