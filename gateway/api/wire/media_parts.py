"""Inputs with pictures in the forms that dialects share, and the call that they become.

Source: vLLM 0.33, multimodal inputs of pooling models; Jina's OpenAPI document 2026.04.02; Cohere's API v2.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from backends.contract import EmbedParts, Output
from gateway.api.wire.contents import ContentPart, address_of
from gateway.api.wire.conversations import ChatMessage, Messages
from gateway.errors import EmptyInput, InvalidInput
from gateway.media.pictures import Fetch, PictureSource, read_parts

PartInput: TypeAlias = str | PictureSource


class VectorOptions(msgspec.Struct, frozen=True):
    """Options of the vectors that a request asks for, as in `EmbedParts`."""

    normalize: bool = True
    dimensions: int | None = None
    multivector: bool = False


async def embed_parts(
    inputs: Sequence[Sequence[PartInput]], field: str, options: VectorOptions, fetch: Fetch
) -> EmbedParts:
    """Return the work of inputs with pictures. field: of the body. fetch: as in `read_parts`.

    Raises: EmptyInput, InvalidInput, and the errors of `fetch`.
    """
    for index, parts in enumerate(inputs):
        if not parts or "" in parts:
            raise EmptyInput(f"`{field}` {index} is empty, or has an empty text", param=field)
    return EmbedParts(
        await read_parts(inputs, field, fetch),
        Output.MULTIVECTOR if options.multivector else Output.DENSE,
        options.normalize,
        options.dimensions,
    )


def have_pictures(messages: Messages | None) -> bool:
    """Return whether a part of some messages is a picture."""
    flat = [
        item for message in messages or () for item in (message if isinstance(message, list) else [message])
    ]
    return any(
        part.image_url is not None
        for message in flat
        if isinstance(message.content, list)
        for part in message.content
    )


def parts_of_messages(messages: Messages) -> list[PartInput]:
    """Return the parts of the one message that an input with pictures is. Raises: InvalidInput."""
    if len(messages) != 1 or not isinstance(messages[0], ChatMessage) or messages[0].role != "user":
        raise InvalidInput("`messages` with pictures are one message of the role `user`", param="messages")
    content = messages[0].content
    return [content] if isinstance(content, str) else [part_of(part, "messages") for part in content]


def part_of(part: ContentPart, field: str) -> PartInput:
    """Return a part of a content in OpenAI's form. Raises: InvalidInput."""
    if part.type == "text" and part.text is not None:
        return part.text
    address = address_of(part)
    if part.type == "image_url" and address is not None:
        return PictureSource(address)
    raise InvalidInput(
        f"`{field}` has a part of type {part.type[:64]!r}; send text, or image_url with a `data:` URI",
        param=field,
    )
