"""Stage five: let replicas do it. Cuts a call into slices, sends them through the lane, joins the replies.

The one place where a BackendError becomes a GatewayError.
"""

import asyncio
from collections.abc import Sequence
from itertools import count

import msgspec

from backends import errors
from backends.contract import Detokenize, EmbedReply, Reply, RerankReply, Score, Tokenize, Truncate
from backends.contract import Work as BackendWork
from backends.vectors import pair_cosines
from gateway.admission import Grant
from gateway.batching.fair_queue import Priority
from gateway.batching.lane import Lane, SliceReply
from gateway.batching.slices import Slice, cut, join
from gateway.batching.ticket import Owner
from gateway.calls import Call, Work, truncation
from gateway.errors import (
    LOADING_RETRY_S,
    DeadlineExceeded,
    EmptyInput,
    GatewayError,
    InvalidInput,
    ModelLoading,
    NoReplica,
    OperationUnsupported,
    Overloaded,
    UpstreamFailed,
)
from gateway.timeline import Timeline
from gateway.upstreams.upstream import texts_of

# A replica that is full says nothing of when it will not be.
OVERLOADED_RETRY_S = 2


class Dispatcher:
    """Sends each call by the upstream of its grant."""

    def __init__(self) -> None:
        self._flows = count()

    async def dispatch(self, grant: Grant, call: Call, deadline_s: float, timeline: Timeline) -> Reply:
        """The whole call's reply, in the caller's order.

        deadline_s: on the event loop's clock. Raises: GatewayError.
        """
        upstream = grant.upstream
        await upstream.lane.wait_joined(deadline_s)
        timeline.lap("queue")
        truncate = truncation(call, grant.route.truncate)
        sent = upstream.prepare(call, grant.route.prompts, grant.sent)
        work, counted = _with_truncation(sent.work, truncate), grant.input_tokens
        slices = cut(work, counted or sent.most_tokens(), upstream.bounds, exact=counted is not None)
        owner = self._passenger(grant, call, timeline)
        upstream.lane.check_room(sum(piece.tokens for piece in slices), owner)
        try:
            carried = await _carry(slices, upstream.lane, grant, owner, deadline_s)
            reply = join(slices, [one.reply for one in carried])
        except errors.BackendError as error:
            raise translated(error) from error
        timeline.lap("upstream")
        timeline.move("upstream", "queue", max(one.queued_s for one in carried))
        return scored(call.work, reply) if upstream.by_cosine(call.work) else reply

    def _passenger(self, grant: Grant, call: Call, timeline: Timeline) -> Owner:
        tenant = grant.tenant
        # A caller may lower the class of its own call, and nobody may raise it.
        priority: Priority = "bulk" if call.bulk else tenant.priority
        return Owner(
            tenant.name,
            next(self._flows),
            tenant.weight,
            priority,
            tenant.queue_tokens,
            tenant.join,
            timeline.trace,
        )


async def _carry(
    slices: Sequence[Slice], lane: Lane, grant: Grant, owner: Owner, deadline_s: float
) -> list[SliceReply]:
    """All slices, or the first error; then the others are called off."""

    def unanswered(piece: Slice) -> None:
        # To tokenize is free.
        if not isinstance(piece.work, Tokenize | Detokenize):
            grant.count_unanswered(piece.tokens)

    async def one(piece: Slice) -> SliceReply:
        carried = await lane.submit(piece, owner, deadline_s, unanswered)
        grant.count(carried.reply.tokens)
        return carried

    if len(slices) == 1:
        return [await one(slices[0])]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(piece)) for piece in slices]
    except BaseExceptionGroup as failures:
        # One error is one answer; which of several slices failed first does not matter to the caller.
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]


def _with_truncation(work: BackendWork, truncate: Truncate) -> BackendWork:
    if not isinstance(work, Tokenize | Detokenize):
        return msgspec.structs.replace(work, truncate=truncate)
    return work


def scored(work: Work, reply: Reply) -> Reply:
    """Cosines as scores: of each pair, or of the first vector with each other.

    A score rests on a cut text where either of its two was cut.
    """
    assert isinstance(reply, EmbedReply)
    if isinstance(work, Score):
        place = {text: index for index, text in enumerate(texts_of(work))}
        pairs = [(place[query], place[document]) for query, document in work.pairs]
    else:
        pairs = [(0, index) for index in range(1, len(reply.vectors))]
    firsts, seconds = zip(*pairs, strict=True) if pairs else ((), ())
    scores = pair_cosines(reply.vectors[list(firsts)], reply.vectors[list(seconds)])
    truncated = reply.truncated
    if truncated is not None:
        cut = set(truncated)
        truncated = tuple(index for index, pair in enumerate(pairs) if cut.intersection(pair))
    return RerankReply(scores, reply.tokens, truncated)


def translated(error: errors.BackendError) -> GatewayError:
    """What a backend's failure means for the caller."""
    match error:
        case errors.InvalidWork(empty=True):
            return EmptyInput(error.message)
        case errors.InvalidWork():
            return InvalidInput(error.message)
        case errors.UnsupportedWork():
            return OperationUnsupported(error.message)
        case errors.Overloaded():
            return Overloaded(error.message, retry_after_s=OVERLOADED_RETRY_S)
        case errors.Loading():
            return ModelLoading(error.message, retry_after_s=LOADING_RETRY_S)
        case errors.Unavailable():
            return NoReplica(error.message)
        case errors.TimedOut():
            return DeadlineExceeded(error.message)
    return UpstreamFailed(error.message)
