"""A backend's answer to a work, as plain values that a golden file can hold."""

from collections.abc import Awaitable, Callable
from typing import Any

from backends.contract import (
    ClassifyReply,
    DetokenizeReply,
    EmbedReply,
    Reply,
    RerankReply,
    TokenizeReply,
    Work,
)
from backends.errors import BackendError


async def outcome_of(run: Callable[[Work], Awaitable[Reply]], work: Work) -> dict[str, Any]:
    """The error's kind, or tokens, what was cut, and the numbers; of vectors the first four components."""
    try:
        reply = await run(work)
    except BackendError as error:
        return {"error": error.kind}
    truncated = None if reply.truncated is None else list(reply.truncated)
    told: dict[str, Any] = {"tokens": reply.tokens, "truncated": truncated}
    match reply:
        case EmbedReply():
            told["shape"] = list(reply.vectors.shape)
            told["numbers"] = reply.vectors[:, :4].tolist()
        case RerankReply():
            told["numbers"] = reply.scores.tolist()
        case ClassifyReply():
            told["labels"] = list(reply.labels)
            told["numbers"] = reply.scores.tolist()
        case DetokenizeReply():
            told["texts"] = list(reply.texts)
        case TokenizeReply():
            told["ids"] = [[token.id for token in one] for one in reply.inputs]
            told["special"] = [[token.special for token in one] for one in reply.inputs]
    return told
