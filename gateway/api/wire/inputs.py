"""Inputs of a request body: texts, or token ids if the model's config specifies their vocabulary.

Source: TEI's and OpenAI's unions: a list of numbers is one input, a list of lists is many.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec

from backends.contract import Capabilities, Operation, Truncate
from backends.contract.texts import TOKEN_ID_LIMIT
from gateway.api.server.body import INTEGER_MAX, Integer
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.request_context import RequestContext
from gateway.api.wire.conversations import Messages, conversations_of
from gateway.errors import EmptyInput, InvalidInput

# No vector is longer. A number past 32 bits is one that TEI itself cannot read.
Dimensions = Annotated[int, msgspec.Meta(ge=1, le=65536)]
# TEI looks an empty name up too, and finds no prompt.
PromptName = Annotated[str, msgspec.Meta(min_length=1)]
# Of Cohere and NIM: the end that is cut; NONE refuses what is too long.
TruncateSide = Literal["NONE", "START", "END"]
SIDE_OF: dict[TruncateSide, Truncate] = {"START": Truncate.LEFT, "END": Truncate.RIGHT}
# 0 means all documents for vLLM's clients. Cohere's and Jina's never send it.
TopN = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
# RAGFlow sends Xinference's options as texts.
Flag: TypeAlias = bool | Literal["true", "false"]
# Ids and texts share one list type, because a union of two list types cannot be decoded in one pass.
Inputs: TypeAlias = str | list[str | Integer | list[Integer]]
# Each token gets a vector. 65,536 are 32 texts, TEI's largest request, for a model of 2,048 tokens. How many
# numbers the vectors have is only known from the replies; `gateway.dispatch` bounds them.
TOKEN_VECTORS_MAX = 65_536
# Longest instruction in UTF-8. It is a part of every text, so that a long one would multiply the tokens.
INSTRUCTION_BYTES_MAX = 4096


class InputField(msgspec.Struct, frozen=True):
    """A field with inputs, and their purpose.

    name: of the field, for error messages. model: as the caller named it; its vocabulary decodes token ids.
    """

    name: str
    model: str | None
    operation: Operation


def is_on(flag: Flag | None) -> bool:
    """Return whether an option is on."""
    return flag in (True, "true")


async def read_texts(
    inputs: Inputs, field: InputField, context: RequestContext, api: InferenceApi
) -> tuple[str, ...]:
    """Return the texts of a request, with token ids decoded. None of them is empty, unless ids decode to it.

    Raises: EmptyInput, InvalidInput, and the errors of `Routes.resolve` and `IdDecoder.decode`.
    """
    if isinstance(inputs, str):
        return api.whole_texts(inputs, field.name)
    # A list of numbers is one input, however long; any other is refused before it is looked through.
    if not inputs or not isinstance(inputs[0], int):
        api.check_count(len(inputs), field.name)
    items = split_items(inputs, field.name)
    ids = [item for item in items if isinstance(item, list)]
    if not ids:
        return api.whole_texts([item for item in items if isinstance(item, str)], field.name)
    decoded = iter(await api.decode_ids(context, field.model, field.operation, ids))
    return tuple([next(decoded) if isinstance(item, list) else item for item in items])


async def read_inputs(
    inputs: Inputs | None,
    messages: Messages | None,
    field: InputField,
    context: RequestContext,
    api: InferenceApi,
) -> tuple[str, ...]:
    """Return the texts of a request, or its conversations. inputs, messages: None for an absent field.

    No inputs at all count as absent next to messages: some clients require the field.

    Raises: EmptyInput, InvalidInput, and the errors of `read_texts`.
    """
    if messages is None:
        if inputs is None:
            raise InvalidInput(f"`{field.name}` is missing", param=field.name)
        return await read_texts(inputs, field, context, api)
    if inputs:
        raise InvalidInput(f"send `{field.name}` or `messages`, one of them", param="messages")
    conversations = conversations_of(messages)
    api.check_count(len(conversations), "messages")
    return tuple(conversations)


def split_items(inputs: Sequence[str | int | list[int]], field: str) -> list[str | list[int]]:
    """Return each input as one item: a text, or a list of token ids. Raises: EmptyInput, InvalidInput."""
    numbers = [item for item in inputs if isinstance(item, int)]
    if numbers and len(numbers) < len(inputs):
        raise InvalidInput(f"`{field}` mixes numbers with other inputs", param=field)
    texts_and_lists = [item for item in inputs if not isinstance(item, int)]
    ids = [numbers, *[item for item in texts_and_lists if isinstance(item, list)]]
    for item in ids:
        check_ids(item, field)
    items: list[str | list[int]] = [numbers] if numbers else texts_and_lists
    if not all(items):
        raise EmptyInput(f"`{field}` contains an empty input", param=field)
    return items


def check_ids(ids: Sequence[int], field: str) -> None:
    """Check that every number can be a token id of some vocabulary. Raises: InvalidInput."""
    if ids and not 0 <= min(ids) <= max(ids) < TOKEN_ID_LIMIT:
        raise InvalidInput(f"`{field}` contains a number that is not a token id", param=field)


def check_token_vectors(texts: tuple[str, ...], field: str, capabilities: Capabilities | None) -> None:
    """Check that the reply with a vector for each token of these texts is not too large.

    A text has at most as many tokens as bytes, and at most as many as the model reads.
    capabilities: of the model. Raises: InvalidInput.
    """
    longest = (capabilities.max_input_tokens if capabilities else None) or TOKEN_VECTORS_MAX + 1
    if sum(min(len(text.encode()), longest) for text in texts) > TOKEN_VECTORS_MAX:
        raise InvalidInput(
            f"the texts may have more than {TOKEN_VECTORS_MAX} tokens, with a vector for each; "
            "send fewer or shorter texts",
            param=field,
        )


def check_instruction(instruction: str | None, *, param: str = "instruction") -> str | None:
    """Return a caller's instruction, or None for an empty one, which is the same as none.

    Raises: InvalidInput.
    """
    if not instruction:
        return None
    if len(instruction.encode()) > INSTRUCTION_BYTES_MAX:
        raise InvalidInput(
            f"`{param}` is longer than {INSTRUCTION_BYTES_MAX} bytes: shorten it", param="instruction"
        )
    return instruction
