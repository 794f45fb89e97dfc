"""Replies of an embeddings API: vectors as Arrow, base64 or JSON, and errors. Pure.

The sizes that a stream of Arrow states are checked before pyarrow reads it, which decompresses without a
bound.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pybase64

from gateway.arrow import batch_sizes
from gateway.client.errors import Unreadable

ARROW = "application/vnd.apache.arrow.stream"
# Of one reply, as it arrives and as it is decompressed.
REPLY_BYTES_MAX = 256 * 1024 * 1024
# Of one reply; a call has a few MiB of text at most.
TOKENS_MAX = 2**31
# Fields of error bodies that name the kind, in OpenAI's envelope and in TEI's.
KINDS = ("code", "error_type", "type")
KIND_CHARACTERS_MAX = 64
# The gateway's messages about one input begin with its index.
INPUT = re.compile(r"input ([0-9]{1,9}): ")
NO_VECTORS = "its vectors are no lists of numbers of a fixed size"
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
# pyarrow raises the last two for damaged streams.
UNREADABLE = (*NOT_JSON, ValueError, TypeError, LookupError, OSError, pa.ArrowException)

Vectors: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float32]]


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


class _OpenAIReply(msgspec.Struct):
    data: list[_Item]
    model: str | None = None
    usage: _Usage | None = None


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
    size = 0
    # All messages are checked first: a kilobyte of compressed buffers can stand for gigabytes.
    for found in batch_sizes(body):
        if found.is_delta:
            raise ValueError("a delta of a dictionary")
        size += found.decoded_bytes
        if size > REPLY_BYTES_MAX:
            raise ValueError(f"more than {REPLY_BYTES_MAX} bytes once it is decompressed")
    schema = pa.ipc.open_stream(body).schema
    place = schema.get_field_index("embeddings")
    if place < 0:
        raise ValueError("it has no column `embeddings`, or several")
    kind = schema.field(place).type
    if not pa.types.is_fixed_size_list(kind) or not pa.types.is_floating(kind.value_type):
        raise ValueError(NO_VECTORS)
    # The other columns would take memory, and are of no use.
    options = pa.ipc.IpcReadOptions(included_fields=[place])
    column = pa.ipc.open_stream(body, options=options).read_all().column(0).combine_chunks()
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
    if len({len(row) for row in rows}) > 1:
        raise ValueError("its vectors have different widths")
    return np.asarray(rows, np.float32).reshape(len(rows), len(rows[0]) if rows else 0)


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
    message = _message_of(body)
    return "".join(mark if mark.isprintable() or mark in "\n\t" else " " for mark in message)


def place_of(body: bytes, count: int) -> int | None:
    """Return the index that the message of an error begins with; None if it names none of so many texts."""
    found = INPUT.match(_message_of(body))
    return int(found[1]) if found is not None and int(found[1]) < count else None


def kind_of(body: bytes, status: int) -> str:
    """Return the server's word for an error: a code such as `empty_input`, else its type, else the status."""
    fields = fields_of(body) or {}
    error = fields.get("error")
    named = error if isinstance(error, dict) else fields
    found = next((named[name] for name in KINDS if isinstance(named.get(name), str)), f"status_{status}")
    return found[:KIND_CHARACTERS_MAX] if found.isprintable() else f"status_{status}"


def _message_of(body: bytes) -> str:
    fields = fields_of(body)
    if fields is None:
        return body[:300].decode(errors="replace").strip() or "no message"
    error = fields.get("error", fields.get("message", fields.get("detail")))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error if error is not None else fields)[:300]


def fields_of(body: bytes) -> dict[str, Any] | None:
    """Return the fields of an error body; None if it is no JSON object."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except NOT_JSON:
        return None
