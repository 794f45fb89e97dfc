"""Outcome of a piece of work as plain values for a golden file."""

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
from backends.contract.errors import BackendError


async def outcome_of(run: Callable[[Work], Awaitable[Reply]], work: Work) -> dict[str, Any]:
    """Run the work and return the error's kind, or the tokens, truncated inputs and numbers.

    Of vectors the outcome holds the first four components.
    """
    try:
        reply = await run(work)
    except BackendError as error:
        return {"error": error.kind}
    truncated = None if reply.truncated is None else list(reply.truncated)
    outcome: dict[str, Any] = {"tokens": reply.tokens, "truncated": truncated}
    match reply:
        case EmbedReply():
            outcome["shape"] = list(reply.vectors.shape)
            outcome["numbers"] = reply.vectors[:, :4].tolist()
        case RerankReply():
            outcome["numbers"] = reply.scores.tolist()
        case ClassifyReply():
            outcome["labels"] = list(reply.labels)
            outcome["numbers"] = reply.scores.tolist()
        case DetokenizeReply():
            outcome["texts"] = list(reply.texts)
        case TokenizeReply():
            outcome["ids"] = [[token.id for token in tokens] for tokens in reply.inputs]
            outcome["special"] = [[token.special for token in tokens] for tokens in reply.inputs]
    return outcome
