"""Arrow over HTTP: bodies with a column of texts, and replies with a column of vectors.

The options of a request, which a JSON body would have as fields, are in the query of its URL.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sized
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from gateway.api.server.request_context import HttpContext, RequestContext
from gateway.api.server.responses import ARROW, is_arrow
from gateway.api.wire.arrow import (
    Codec,
    Form,
    Rows,
    all_rows,
    check_installed,
    read_in_turn,
)
from gateway.errors import EmptyInput, InvalidInput

OPTIONS_MAX = 32
CODECS: Mapping[str, Codec] = {"lz4": "lz4", "zstd": "zstd"}


def arrow_body(kind: type[Any], field: str) -> Callable[..., Awaitable[Any]]:
    """Return the decoder of a path. kind: struct of its JSON body. field: the one with the texts."""

    async def decode(body: bytes | bytearray, context: HttpContext, api: Any) -> Any:
        """Return the struct. Raises: UnsupportedMedia, and the errors of `read_in_turn`."""
        check_installed()
        data = _with_options(kind, field, context.query)
        assert context.tenant is not None
        rows, texts = await read_in_turn(
            api.arrow_threads, context.tenant, body, api.inputs_max, context.io.body_bytes_max
        )
        if not texts:
            raise EmptyInput("the Arrow stream has no text")
        context.rows = rows
        setattr(data, field, texts)
        return data

    return decode


def _with_options(kind: type[Any], field: str, query: bytes) -> Any:
    """Return a body with the options of a query, in place of its texts a mark.

    Raises: InvalidInput, msgspec.ValidationError.
    """
    try:
        pairs = parse_qsl(query.decode(), keep_blank_values=True, max_num_fields=OPTIONS_MAX)
    except ValueError as error:
        raise InvalidInput("the query of the URL cannot be read, or has too many options") from error
    options = dict(pairs)
    unknown = sorted(options.keys() - (frozenset(kind.__struct_fields__) - {field}))
    if unknown:
        raise InvalidInput(f"`{unknown[0][:64]}` is no option of this path", param=unknown[0][:64])
    if len(options) < len(pairs):
        raise InvalidInput("an option is in the query of the URL twice")
    return msgspec.convert(options | {field: "-"}, kind, strict=False)


def wants_arrow(context: RequestContext) -> bool:
    """Return whether the reply is an Arrow stream: as `accept` says, else as the body was.

    Raises: InvalidInput for a body with nulls whose reply is to be JSON.
    """
    accepted = context.header(b"accept")
    if "arrow" in accepted and any(is_arrow(kind) for kind in accepted.split(",")):
        return True
    if context.rows is None:
        return False
    if "json" not in accepted:
        return True
    if context.rows.has_nulls:
        raise InvalidInput("the Arrow stream has nulls, which a JSON reply has no place for: accept Arrow")
    return False


async def arrow_stream(
    context: RequestContext,
    write: Callable[[Any, Rows, Form], memoryview],
    values: Sized,
    facts: Mapping[str, str],
) -> tuple[memoryview, str]:
    """Return a reply with a value for each text, and its media type. Raises: UnsupportedMedia."""
    check_installed()
    form = Form(_codec_of(context.header(b"accept")), facts)
    rows = all_rows(len(values)) if context.rows is None else context.rows
    media_type = ARROW if form.codec is None else f"{ARROW}; codecs={form.codec}"
    return await asyncio.to_thread(write, values, rows, form), media_type


def facts_of(model: str, tokens: int) -> dict[str, str]:
    """Return the metadata of a reply's schema."""
    return {"model": model, "tokens": str(tokens)}


def _codec_of(accepted: str) -> Codec | None:
    """Return the first codec that the caller lists and pyarrow writes: `…stream; codecs="zstd,lz4"`."""
    _, listed, names = accepted.lower().partition("codecs=")
    if not listed:
        return None
    quoted = names.split('"')[1] if names.startswith('"') else names.split(";")[0]
    found = [CODECS[name] for item in quoted.split(",") if (name := item.strip()) in CODECS]
    return found[0] if found else None
