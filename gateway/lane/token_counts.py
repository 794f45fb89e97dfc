"""Token counts of replies: which of them are believed, compared with the gateway's own counts.

Tenants are billed by them, and a count that belongs to another batch shows that the reply does too.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from backends.contract import (
    Capabilities,
    Classify,
    DropsConnections,
    Embed,
    Encode,
    ModelWork,
    Operation,
    Reply,
    Rerank,
    Truncate,
    Work,
)
from backends.contract.errors import BackendError, ReplicaFailed
from backends.reference_texts import REFERENCE_TEXTS
from gateway.lane.slices import Slice
from gateway.routing.replica import Replica

# As long as a probe: the texts are few and short.
EXAMINE_TIMEOUT_S = 5.0
ONE_TEXT: dict[Operation, type[Embed | Classify]] = {Operation.EMBED: Embed, Operation.CLASSIFY: Classify}

logger = logging.getLogger("gateway")


# Own counts of a piece of work with its prompt, None without a tokenizer.
CountTokens = Callable[[ModelWork, str, Capabilities], Awaitable[list[int] | None]]


async def count_nothing(work: ModelWork, prompt: str, capabilities: Capabilities) -> None:
    """Count nothing, where the tokenizer of an upstream is not known."""


def needs_examination(piece: Slice, reply: Reply, replica: Replica) -> bool:
    """Return whether the count of a reply is not the gateway's own, and may not be believed as it is."""
    if reply.tokens == piece.tokens or reply.is_free:
        return False
    capabilities = replica.capabilities
    if capabilities is None or capabilities.reports_input_tokens:
        # The gateway's own engine counts what it computed.
        return False
    return piece.exact or reply.tokens < piece.inputs


async def believable(
    piece: Slice, reply: Reply, replica: Replica, upstream: str, count_tokens: CountTokens
) -> Reply:
    """Return a reply with a token count that can be.

    Raises: ReplicaFailed, if the replica counts as the gateway does, and not for this reply.
    """
    if reply.tokens < piece.inputs:
        _warn_once(
            upstream, replica, "upstream %s: %s reports no plausible token counts; the gateway's are charged"
        )
        return msgspec.structs.replace(reply, tokens=piece.tokens)
    if _may_be_whole(piece) and reply.tokens > piece.tokens:
        # The server reads inputs in chunks that are longer than the model; the gateway counted one chunk.
        return reply
    if await _counts_alike(piece, replica, count_tokens):
        _drop_connections(replica)
        raise ReplicaFailed(
            f"the upstream counted {reply.tokens} tokens, the gateway {piece.tokens}; "
            "the reply may belong to a different request"
        )
    _warn_once(
        upstream,
        replica,
        "upstream %s: %s counts tokens differently from `tokenizer`; the gateway's are charged",
    )
    return msgspec.structs.replace(reply, tokens=piece.tokens)


def _may_be_whole(piece: Slice) -> bool:
    return piece.work.truncate is Truncate.ERROR


async def _counts_alike(piece: Slice, replica: Replica, count_tokens: CountTokens) -> bool:
    """Return whether a replica counts a sample as the gateway does; it is asked once per operation."""
    operation, capabilities = piece.work.operation, replica.capabilities
    assert capabilities is not None
    known = replica.counts_alike.get(operation)
    if known is None:
        known = await _examine(_samples_of(piece.work), replica, count_tokens, capabilities)
        if known is not None:
            replica.counts_alike[operation] = known
    # Without an answer, the reply at hand is not believed.
    return known is not False


def _samples_of(work: Work) -> list[ModelWork]:
    """Return known texts, each by itself: a server that counts differently may agree on one by chance."""
    if isinstance(work, Encode):
        return [Encode((text,), work.outputs) for text in REFERENCE_TEXTS]
    kind = ONE_TEXT.get(work.operation)
    query = REFERENCE_TEXTS[0]
    return [Rerank(query, (text,)) if kind is None else kind((text,)) for text in REFERENCE_TEXTS]


async def _examine(
    samples: Sequence[ModelWork], replica: Replica, count_tokens: CountTokens, capabilities: Capabilities
) -> bool | None:
    """Return whether both count all samples alike, or None if one of them did not count a sample."""
    prompt = ""
    if samples[0].has_prompt:
        prompt = capabilities.prompts.get(capabilities.default_prompt or "", "")
    ends_s = time.monotonic() + EXAMINE_TIMEOUT_S
    # On new connections: an old one may hold replies to other requests.
    _drop_connections(replica)
    for sample in samples:
        try:
            reply = await replica.backend.run(sample, max(0.0, ends_s - time.monotonic()))
        except BackendError:
            return None
        own = await count_tokens(sample, prompt, capabilities)
        if own is None:
            return None
        if sum(own) != reply.tokens:
            return False
    return True


def _drop_connections(replica: Replica) -> None:
    if isinstance(replica.backend, DropsConnections):
        replica.backend.drop_connections()


def _warn_once(upstream: str, replica: Replica, message: str) -> None:
    if replica.warns_of_counts():
        logger.warning(message, upstream, replica.name)
