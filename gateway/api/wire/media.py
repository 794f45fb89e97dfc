"""Inputs with pictures or sound in the forms that dialects share, and the call that they become.

Source: vLLM 0.33, multimodal inputs of pooling models; Jina's OpenAPI document 2026.04.02; Cohere's API v2.
"""

from collections.abc import Sequence

import msgspec

from backends.contract import Embed, EmbedParts, Operation, Output, ScoreParts, Turn, Turns
from gateway.api.wire.conversations import (
    ChatMessage,
    ContentPart,
    Messages,
    address_of,
    is_media,
    split_conversations,
)
from gateway.errors import EmptyInput, InvalidInput
from gateway.media.sources import (
    Fetch,
    PictureSource,
    SoundSource,
    SourcePart,
    embed_operation,
    fetch_sources,
    read_parts,
)


class VectorOptions(msgspec.Struct, frozen=True):
    """Options of the vectors that a request asks for, as in `EmbedParts`."""

    normalize: bool = True
    dimensions: int | None = None
    multivector: bool = False


async def embed_parts(
    inputs: Sequence[Sequence[SourcePart]],
    field: str,
    options: VectorOptions,
    fetch: Fetch | None,
    turns: tuple[Turns, ...] = (),
) -> EmbedParts:
    """Return the work of inputs with pictures or sound. field: of the body. fetch: as in `fetch_sources`.

    turns: of inputs that are conversations, whose messages may be empty.
    Raises: EmptyInput, InvalidInput, and the errors of `fetch`.
    """
    if not turns:
        _check_empty(inputs, field)
    fetched = await fetch_sources(inputs, embed_operation(inputs), fetch)
    return EmbedParts(
        await read_parts(inputs, field, fetched),
        Output.MULTIVECTOR if options.multivector else Output.DENSE,
        options.normalize,
        options.dimensions,
        turns=turns,
    )


async def embed_inputs(
    inputs: Sequence[Sequence[SourcePart]], field: str, options: VectorOptions, fetch: Fetch | None
) -> Embed | EmbedParts:
    """Return the work of inputs each of which has one vector: of texts if all of them are one text.

    field, fetch: as of `embed_parts`. Raises: as `embed_parts`.
    """
    _check_empty(inputs, field)
    texts = [parts[0] for parts in inputs if len(parts) == 1 and isinstance(parts[0], str)]
    if len(texts) < len(inputs):
        return await embed_parts(inputs, field, options, fetch)
    return Embed(tuple(texts), normalize=options.normalize, dimensions=options.dimensions)


def _check_empty(inputs: Sequence[Sequence[SourcePart]], field: str) -> None:
    """Check that no input is empty or has an empty text. Raises: EmptyInput."""
    for index, parts in enumerate(inputs):
        if not parts or "" in parts:
            raise EmptyInput(f"`{field}` {index} is empty, or has an empty text", param=field)


def one_text(parts: list[SourcePart]) -> list[SourcePart]:
    """Return the parts of an input; several texts without media are one text of as many lines.

    Chat templates of models that read texts join the parts of a message so.
    """
    texts = [part for part in parts if isinstance(part, str)]
    return ["\n".join(texts)] if len(texts) == len(parts) and parts else parts


def have_media(messages: Messages | None) -> bool:
    """Return whether a part of some messages is a picture or a recording."""
    flat = [
        item for message in messages or () for item in (message if isinstance(message, list) else [message])
    ]
    return any(isinstance(message.content, list) and is_media(message.content) for message in flat)


def parts_of_messages(messages: Messages) -> tuple[list[list[SourcePart]], tuple[Turns, ...]]:
    """Return the parts of each conversation with media, and its messages; none for lone ones of a user.

    Raises: EmptyInput, InvalidInput.
    """
    conversations = split_conversations(messages)
    inputs = [[part for message in each for part in _parts_in(message)] for each in conversations]
    if all(len(each) == 1 and each[0].role == "user" and each[0].name is None for each in conversations):
        return inputs, ()
    return inputs, tuple([tuple(map(_turn_of, each)) for each in conversations])


def _parts_in(message: ChatMessage) -> list[SourcePart]:
    """Return the parts of one message. Raises: InvalidInput."""
    content = message.content
    return [content] if isinstance(content, str) else [part_of(part, "messages") for part in content]


def _turn_of(message: ChatMessage) -> Turn:
    is_text = isinstance(message.content, str)
    return Turn(message.role, 1 if is_text else len(message.content), message.name, is_text)


def part_of(part: ContentPart, field: str) -> SourcePart:
    """Return a part of a content in OpenAI's form. Raises: InvalidInput."""
    found: SourcePart | None = None
    match part.type:
        case "text":
            found = part.text
        case "image_url" if (address := address_of(part.image_url)) is not None:
            found = PictureSource(address)
        case "audio_url" if (address := address_of(part.audio_url)) is not None:
            found = SoundSource(address)
        case "input_audio" if part.input_audio is not None:
            found = SoundSource(part.input_audio.data)
    if found is None:
        raise InvalidInput(
            f"`{field}` has a part of type {part.type[:64]!r}; send text, image_url or audio_url with a "
            "`data:` URI, or input_audio, in the field of that name",
            param=field,
        )
    check_sole_content(part, part.type, field)
    return found


def check_sole_content(part: msgspec.Struct, type_: str, field: str) -> None:
    """Check that a part has no content but that in the field of its type. Raises: InvalidInput."""
    for name in part.__struct_fields__:
        if name not in {"type", type_} and getattr(part, name):
            raise InvalidInput(
                f"`{field}` has a part of type {type_[:64]!r} with `{name}`: send each in a part of its own",
                param=field,
            )


async def score_parts(
    queries: tuple[str, Sequence[Sequence[SourcePart]]],
    documents: tuple[str, Sequence[Sequence[SourcePart]]],
    fetch: Fetch | None,
    *,
    raw: bool,
) -> ScoreParts:
    """Return the work of one query with each document, or of as many queries as documents.

    queries, documents: their fields of the body, and their parts. fetch: as in `fetch_sources`.
    Raises: EmptyInput, InvalidInput, and the errors of `fetch`.
    """
    (query_field, query_parts), (field, parts) = queries, documents
    if len(query_parts) not in (1, len(parts)):
        raise InvalidInput(
            f"{len(query_parts)} inputs against {len(parts)}: lengths are 1:1, 1:N or N:N", param=query_field
        )
    for name, items in (queries, documents):
        _check(items, name)

    # Together, so that an address of both sides is fetched once, and within the bounds of one request.
    fetched = await fetch_sources([*query_parts, *parts], Operation.RERANK_IMAGE, fetch)
    first = await read_parts(query_parts, query_field, fetched)
    second = await read_parts(parts, field, fetched)
    return ScoreParts(tuple(zip(first * (len(second) // len(first)), second, strict=True)), raw)


def _check(items: Sequence[Sequence[SourcePart]], field: str) -> None:
    """Check that no input is empty or a recording. Raises: EmptyInput, InvalidInput."""
    _check_empty(items, field)
    for index, parts in enumerate(items):
        if any(isinstance(part, SoundSource) for part in parts):
            raise InvalidInput(f"`{field}` {index} is sound; texts and images are ranked", param=field)
