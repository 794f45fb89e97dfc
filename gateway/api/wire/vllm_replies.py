"""The frame that all replies of vLLM's pooling endpoints share.

Source: vLLM 0.33, entrypoints/pooling.
"""

import secrets
import time
from typing import Any

import msgspec

from gateway.api.server.encoding import json_bytes
from gateway.serve import Served


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


def encode_reply(kind: str, served: Served, items: list[Any]) -> bytes:
    """Encode a reply. kind: the prefix of its id."""
    tokens = served.reply.tokens
    usage = {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }
    head = {"id": f"{kind}-{secrets.token_hex(16)}", "object": "list", "created": int(time.time())}
    return json_bytes(head | {"model": served.route.model, "data": items, "usage": usage})
