"""The frame that all replies of vLLM's pooling endpoints share, and their replies in bytes.

Source: vLLM 0.33, entrypoints/pooling and utils/serial_utils.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from backends.contract import Vectors
from gateway.api.server.encoding import NumberFormat, VectorFormat
from gateway.api.server.request import Request
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import OCTETS, HttpReply
from gateway.errors import InvalidInput
from gateway.serve import Served

# The header has about 120 bytes for each input. Common clients refuse a header line of 64 KiB.
METADATA_INPUTS_MAX = 256


class VllmUsage(msgspec.Struct):
    """Tokens after truncation, with special tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class VllmReply(msgspec.Struct):
    """Fields of every reply, without its items."""

    id: str
    created: int
    model: str
    usage: VllmUsage


def reply_with(request: Request[Any], served: Served, kind: str, items: list[Any]) -> HttpReply:
    """Return a reply with its items. kind: the prefix of its id."""
    head = reply_head(kind, request.context, request.body.request_id)
    frame = {"object": "list", "model": served.route.model, "data": items, "usage": usage_of(served)}
    return request.reply(served, head | frame)


def reply_packed(
    request: Request[Any], served: Served, rows: Sequence[Vectors], numbers: NumberFormat
) -> HttpReply:
    """Return a reply of bytes, which the header `metadata` describes unless the body asks for no header."""
    body, items = encode_bytes(rows, numbers)
    headers = None
    if request.body.encoding_format == "bytes":
        head = reply_head("embd", request.context, None) | {"model": served.route.model}
        headers = {"metadata": json.dumps(head | {"data": items, "usage": usage_of(served)})}
    return request.reply_bytes(served, body, headers, OCTETS)


def reply_head(kind: str, context: RequestContext, request_id: str | None) -> dict[str, Any]:
    """Return the id and the time of a reply. The header `x-request-id` precedes the id in the body."""
    is_callers = context.header(b"x-request-id") == context.request_id
    name = context.request_id if is_callers else request_id or context.request_id
    return {"id": f"{kind}-{name}", "created": int(time.time())}


def usage_of(served: Served) -> dict[str, Any]:
    """Return the tokens of a reply."""
    tokens = served.reply.tokens
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


def check_metadata(encoding_format: VectorFormat | None, inputs: int) -> None:
    """Check that the header of a reply in bytes is not too long. Raises: InvalidInput."""
    if encoding_format == "bytes" and inputs > METADATA_INPUTS_MAX:
        raise InvalidInput(
            f"`bytes` describes at most {METADATA_INPUTS_MAX} inputs in a header: send `bytes_only`, "
            "or fewer inputs",
            param="encoding_format",
        )


def encode_bytes(rows: Sequence[Vectors], numbers: NumberFormat) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the rows one after the other, and the place and shape of each."""
    body, items = bytearray(), []
    for index, row in enumerate(rows):
        start = len(body)
        body += numbers.pack(row)
        item = {"index": index, "embed_dtype": numbers.dtype, "endianness": numbers.endianness}
        items.append(item | {"start": start, "end": len(body), "shape": row.shape})
    return bytes(body), items
