"""Bodies of calls, and the vectors in their replies. Pure."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pybase64

from gateway.arrow import batch_sizes
from gateway.cli.embed.plan import Request
from gateway.cli.printable import printable

ARROW = "application/vnd.apache.arrow.stream"
EMBED_PATH = "/embed"
# Of one reply, as it arrives and as it is decompressed.
REPLY_BYTES_MAX = 256 * 1024 * 1024
UNREADABLE = (
    msgspec.MsgspecError,
    RecursionError,
    ValueError,
    TypeError,
    LookupError,
    # pyarrow raises both for damaged streams.
    OSError,
    pa.ArrowException,
)
# Of one reply; a call has a few MiB of text at most.
TOKENS_MAX = 2**31
# The gateway's messages about one input begin with its index.
INPUT = re.compile(r"input ([0-9]{1,9}): ")
NO_VECTORS = "its vectors are no lists of numbers of a fixed size"
SIDES = {"error": "NONE", "left": "START", "right": "END"}

Vectors: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float32]]


class Unreadable(Exception):
    """A reply with status 200 that is not one of an embeddings API."""


class Reply(NamedTuple):
    """Vectors of a call, (texts, dim). tokens: 0 if unknown. truncated: indices, None if unknown."""

    vectors: Vectors
    tokens: int = 0
    model: str | None = None
    fingerprint: str | None = None
    truncated: tuple[int, ...] | None = ()


class _Item(msgspec.Struct):
    embedding: str | list[float]
    index: int | None = None


class _Usage(msgspec.Struct):
    total_tokens: Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)] = 0


class _CodedError(msgspec.Struct):
    code: str | None = None


class _ErrorReply(msgspec.Struct):
    error: _CodedError


class _OpenAIReply(msgspec.Struct):
    data: list[_Item]
    model: str | None = None
    usage: _Usage | None = None


def body_of(request: Request, texts: Sequence[str], *, packed: bool) -> bytes:
    """Return the body of a call. packed: ask for base64, where the server does not return Arrow."""
    content: dict[str, Any] = {} if request.model is None else {"model": request.model}
    if request.dimensions is not None:
        content["dimensions"] = request.dimensions
    if request.path.endswith(EMBED_PATH):
        return msgspec.json.encode(content | _tei_options(request) | {"inputs": texts})
    if request.input_type is not None:
        content["input_type"] = request.input_type
    if request.truncate is not None:
        content["truncate"] = SIDES[request.truncate]
    if packed:
        content["encoding_format"] = "base64"
    return msgspec.json.encode(content | {"input": texts})


def _tei_options(request: Request) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if request.prompt_name is not None:
        options["prompt_name"] = request.prompt_name
    if request.truncate is not None:
        options["truncate"] = request.truncate != "error"
        if request.truncate != "error":
            options["truncation_direction"] = request.truncate.capitalize()
    return options


def read_reply(body: bytes, media_type: str, count: int) -> Reply:
    """Return the vectors of a reply to so many texts. Raises: Unreadable."""
    try:
        reply = _read_arrow(body, count) if media_type.startswith(ARROW) else _read_json(body)
    except UNREADABLE as error:
        raise Unreadable(f"not a reply of an embeddings API: {error}") from error
    vectors = reply.vectors
    if vectors.ndim != 2 or len(vectors) != count or not vectors.shape[1]:
        raise Unreadable(f"{len(vectors)} vectors for {count} texts")
    if not np.isfinite(vectors).all():
        raise Unreadable("a vector has numbers that are not finite")
    return reply


def _read_arrow(body: bytes, count: int) -> Reply:
    buffer = pa.py_buffer(body)
    # A kilobyte of compressed buffers can stand for gigabytes.
    _check_sizes(body)
    schema = pa.ipc.open_stream(buffer).schema
    place = schema.get_field_index("embeddings")
    if place < 0:
        raise ValueError("it has no column `embeddings`, or several")
    kind = schema.field(place).type
    if not pa.types.is_fixed_size_list(kind) or not pa.types.is_floating(kind.value_type):
        raise ValueError(NO_VECTORS)
    # The other columns would take memory, and are of no use.
    options = pa.ipc.IpcReadOptions(included_fields=[place])
    column = pa.ipc.open_stream(buffer, options=options).read_all().column(0).combine_chunks()
    column.validate(full=True)
    if column.null_count:
        raise ValueError(NO_VECTORS)
    if len(column) != count:
        raise ValueError(f"{len(column)} vectors for {count} texts")
    values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    facts = schema.metadata or {}
    model = facts.get(b"model")
    return Reply(
        values.reshape(len(column), kind.list_size),
        read_tokens(facts.get(b"tokens", b"0").decode()),
        None if model is None else model.decode(),
    )


def _check_sizes(body: bytes) -> None:
    """Check all messages before pyarrow reads one of them. Raises: ValueError."""
    size = 0
    # A kilobyte of compressed buffers can stand for gigabytes.
    for found in batch_sizes(body):
        if found.is_delta:
            raise ValueError("a delta of a dictionary")
        size += found.decoded_bytes
        if size > REPLY_BYTES_MAX:
            raise ValueError(f"more than {REPLY_BYTES_MAX} bytes once it is decompressed")


def _read_json(body: bytes) -> Reply:
    if body.lstrip()[:1] == b"[":
        # TEI's reply has vectors only.
        return Reply(_stacked(msgspec.json.decode(body, type=list[list[float]])))
    reply = msgspec.json.decode(body, type=_OpenAIReply)
    items = reply.data
    if all(item.index is not None for item in items):
        items = sorted(items, key=lambda item: item.index or 0)
        if [item.index for item in items] != list(range(len(items))):
            raise ValueError("its vectors are not numbered from 0")
    vectors = _stacked([_numbers(item.embedding) for item in items])
    return Reply(vectors, reply.usage.total_tokens if reply.usage else 0, reply.model)


def _numbers(embedding: str | list[float]) -> Any:
    if isinstance(embedding, list):
        return embedding
    return np.frombuffer(pybase64.b64decode(embedding, validate=True), "<f4")


def _stacked(rows: Sequence[Any]) -> Vectors:
    if not rows:
        return np.zeros((0, 0), np.float32)
    if len({len(row) for row in rows}) > 1:
        raise ValueError("its vectors have different widths")
    return np.asarray(rows, np.float32).reshape(len(rows), -1)


def read_tokens(text: str) -> int:
    """Return a count of tokens. Raises: Unreadable if it is none, or more than any reply can have."""
    if text.isascii() and text.isdigit() and len(text) <= len(str(TOKENS_MAX)) and int(text) <= TOKENS_MAX:
        return int(text)
    raise Unreadable(f"the reply counts {text[:80]!r} tokens")


def read_truncated(header: str | None, count: int) -> tuple[int, ...] | None:
    """Return the indices in a header such as 0-3,7; None if they are unknown. Raises: Unreadable."""
    if not header:
        return ()
    if header == "unknown":
        return None
    indices: list[int] = []
    for part in header.split(","):
        first, _, last = part.strip().partition("-")
        try:
            start, end = int(first), int(last or first)
        except ValueError as error:
            raise Unreadable(f"the header x-truncated-inputs is {header[:80]!r}") from error
        if not 0 <= start <= end < count:
            raise Unreadable(f"the header x-truncated-inputs names input {end} of {count}")
        indices += range(start, end + 1)
    return tuple(indices)


def problem_of(body: bytes) -> str:
    """Return the message of an error body in words, without what a terminal would obey."""
    return printable(_message_of(body))


def code_of(body: bytes) -> str | None:
    """Return the code of an error body of OpenAI's API, None if it has none."""
    try:
        return msgspec.json.decode(body, type=_ErrorReply).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def place_of(body: bytes, count: int) -> int | None:
    """Return the index that the message of an error begins with; None if it names none of so many texts."""
    found = INPUT.match(_message_of(body))
    return int(found[1]) if found is not None and int(found[1]) < count else None


def _message_of(body: bytes) -> str:
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body[:300].decode(errors="replace").strip() or "no message"
    error = fields.get("error", fields.get("message", fields.get("detail")))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error if error is not None else fields)[:300]
