"""Stage `dispatch`: cut a call into slices, send them through the lane, join the replies.

The one place where a BackendError becomes a GatewayError.
"""

import asyncio
import math
import re
from collections.abc import Sequence
from itertools import count
from typing import cast

import msgspec
import numpy as np

from backends.contract import EncodeReply, Reply, RerankReply, Vectors, errors
from backends.contract import Work as BackendWork
from backends.contract.vectors import max_similarity, pair_cosines
from backends.contract.work import VectorScores
from gateway.admission import Grant
from gateway.cache.call_cache import CallCache, ItemCache
from gateway.cache.entries import SplitCall
from gateway.errors import (
    LOADING_RETRY_S,
    EmptyInput,
    GatewayError,
    InvalidInput,
    ModelLoading,
    NoReplica,
    OperationUnsupported,
    Overloaded,
    ReplicaTimedOut,
    UpstreamFailed,
)
from gateway.lane.fair_queue import Priority
from gateway.lane.isolation import Suspicion
from gateway.lane.lane import Lane, SliceReply
from gateway.lane.outcomes import SliceFailed
from gateway.lane.slices import (
    Slice,
    cut,
    cut_again,
    halves,
    join,
    parts_of,
    separated,
)
from gateway.lane.ticket import Owner
from gateway.prepare import PreparedWork, Preparer
from gateway.routing.replica import REFUSED_BYTES_MIN
from gateway.telemetry.timeline import Timeline
from gateway.upstreams.model_inputs import ModelInputs

# A replica that is full does not report when it will have room.
OVERLOADED_RETRY_S = 2
# 32 texts of 512 tokens with vectors of 1,024 numbers: 64 MiB in memory, and 180 MB of JSON.
REPLY_NUMBERS_MAX = 16 * 1024 * 1024
# Slices of a call whose halves are searched for an input at fault at once.
SEARCHES_MAX = 2
# Parts of a slice that timed out. The lane sends several at once, each with a short timeout.
PARTS_MAX = 32
# A backend's message about a field of the request begins with its name.
FIELD = re.compile(r"`(?P<name>\w+)`")


class WorkPart(msgspec.Struct, frozen=True):
    """The inputs of a call that replicas compute.

    tokens: count of each input. is_exact: they are the model's own. places: index of each in the whole
    work, None if they are all of its inputs.
    """

    work: BackendWork
    tokens: Sequence[int]
    is_exact: bool
    places: Sequence[int] | None = None


class Dispatcher:
    """Sends granted calls through the lane of their upstream. cache: of vectors, None without one."""

    def __init__(self, preparer: Preparer, cache: ItemCache | None = None) -> None:
        self.cache = cache
        self._preparer = preparer
        self._flows = count()

    async def dispatch(
        self,
        grant: Grant,
        lane: Lane,
        inputs: ModelInputs,
        timeline: Timeline,
        cache: CallCache | None = None,
        *,
        may_move: bool = False,
    ) -> Reply:
        """Return the reply to the whole call, in the caller's order.

        cache: of the call, None without one. may_move: another upstream can serve the call if this one
        cannot. Raises: GatewayError.
        """
        prepared, capabilities = grant.prepared, inputs.capabilities()
        if capabilities is None:
            await lane.wait_for_replica(grant.deadline.at_s)
        timeline.lap("queue")
        if capabilities is None or capabilities is not prepared.capabilities:
            prepared = await self._preparer.refresh(inputs, prepared, grant.tenant, grant.deadline)
        part = WorkPart(prepared.work, prepared.most_tokens(), prepared.input_tokens is not None)
        split = None if cache is None else await cache.look_up(prepared.work)
        submission = _Submission(lane, grant, self._owner(grant, timeline, may_move=may_move), timeline)
        try:
            if cache is None or split is None:
                reply = await submission.compute(part)
            else:
                reply = await _complete(submission, (part, split, cache), timeline)
        except errors.BackendError as error:
            failure = translated(error, _place_of(error, prepared))
            failure.input_index = _index_in_call(error, prepared)
            raise failure from error
        if prepared.places is not None:
            reply = reply.select(prepared.places)
            _check_numbers(reply.numbers)
        return reply if prepared.by_vectors is None else await _scored(prepared.by_vectors, reply)

    def _owner(self, grant: Grant, timeline: Timeline, *, may_move: bool) -> Owner:
        tenant = grant.tenant
        # A caller may lower the priority of its own call, and never raise it.
        priority: Priority = "bulk" if grant.prepared.call.bulk else tenant.priority
        return Owner(
            tenant.name,
            next(self._flows),
            tenant.weight,
            priority,
            tenant.queue_tokens,
            tenant.join,
            timeline.trace,
            may_move,
            grant.copy,
            timeline.attempts,
        )


async def _complete(
    submission: "_Submission",
    cached: tuple[WorkPart, SplitCall, CallCache],
    timeline: Timeline,
) -> Reply:
    """Return the reply to a call of which the cache has a part.

    cached: the whole work, split by the cache. Raises: BackendError, GatewayError.
    """
    whole, split, cache = cached
    timeline.lap("cache")
    reply: Reply | None = None
    if missing := split.missing:
        tokens = [whole.tokens[index] for index in missing]
        part = WorkPart(cast("BackendWork", split.missing_work()), tokens, whole.is_exact, missing)
        computed = await submission.compute(part)
        counts = _counts_of(computed, part)
        reply = computed if counts is None else computed.with_input_tokens(counts)
        cache.keep(split, reply, counts)
    joined = cast("Reply", split.joined(reply))
    submission.grant.count_cached(split.hits, split.hit_tokens, is_charged=cache.is_charged)
    return joined


async def _scored(plan: VectorScores, reply: Reply) -> Reply:
    """Return the scores of a reply. Many vectors of each input are compared on a thread."""
    if isinstance(reply, EncodeReply):
        return await asyncio.to_thread(vector_scores, plan, reply)
    return vector_scores(plan, reply)


def vector_scores(plan: VectorScores, reply: Reply) -> RerankReply:
    """Return the score of each pair. reply: to the work of the plan.

    It is the cosine, or for many vectors of an input what `ScoreKind.COSINE` defines. A score counts as
    truncated if either of its two inputs was cut.
    """
    pairs = plan.places
    truncated = reply.truncated
    if truncated is not None:
        cut = set(truncated)
        truncated = tuple([index for index, pair in enumerate(pairs) if cut.intersection(pair)])
    if isinstance(reply, EncodeReply):
        scores = _late_scores(pairs, reply.multivector or (), raw=plan.raw)
    else:
        vectors = reply.dense_vectors
        assert vectors is not None
        firsts, seconds = zip(*pairs, strict=True) if pairs else ((), ())
        scores = pair_cosines(vectors[list(firsts)], vectors[list(seconds)])
    return RerankReply(scores, reply.tokens, truncated)


def _late_scores(pairs: Sequence[tuple[int, int]], vectors: Sequence[Vectors], *, raw: bool) -> Vectors:
    """Return the scores of late interaction. vectors: of each input, (its tokens, dim)."""
    scores = np.zeros(len(pairs), dtype=np.float32)
    for index, (query, document) in enumerate(pairs):
        best = max_similarity(vectors[query], [vectors[document]])[0]
        scores[index] = best if raw else best / len(vectors[query])
    return scores


def _check_numbers(numbers: int) -> None:
    """Check the size of a call's output. Raises: InvalidInput."""
    if numbers > REPLY_NUMBERS_MAX:
        raise InvalidInput(
            f"the output has more than {REPLY_NUMBERS_MAX} numbers; send fewer or shorter inputs"
        )


class _Submission:
    """Slices of one call on their way through a lane."""

    __slots__ = ("_lane", "_numbers", "_owner", "_searches", "_timeline", "_tokens", "grant")

    def __init__(self, lane: Lane, grant: Grant, owner: Owner, timeline: Timeline) -> None:
        self.grant = grant
        self._lane = lane
        self._owner = owner
        self._timeline = timeline
        # Count of each input of the part that is computed.
        self._tokens: Sequence[int] = ()
        # In the replies so far, of outputs that are larger than one vector for an input.
        self._numbers = 0
        # Made for the first of several slices that fails.
        self._searches: asyncio.Semaphore | None = None

    async def compute(self, part: WorkPart) -> Reply:
        """Return the reply of replicas to a part of a call. Raises: BackendError, GatewayError."""
        lane, self._tokens = self._lane, part.tokens
        slices = lane.separated(cut(part.work, part.tokens, lane.bounds(), exact=part.is_exact), part.tokens)
        is_lone = len(slices) == 1
        lane.check_room(slices[0].cost if is_lone else sum([piece.cost for piece in slices]), self._owner)
        try:
            replies = await (self._submit(slices[0]) if is_lone else self.submit_all(slices))
            if len(replies) == 1:
                reply, queued_s = replies[0][1].reply, replies[0][1].queued_s
            else:
                reply = join([piece for piece, _ in replies], [own.reply for _, own in replies])
                queued_s = max(own.queued_s for _, own in replies)
        except errors.InvalidWork as error:
            raise _of_whole(error, part) from error
        self._timeline.lap("upstream")
        self._timeline.move("upstream", "queue", queued_s)
        return reply

    async def submit_all(
        self, slices: Sequence[Slice], suspicion: Suspicion = Suspicion.NONE
    ) -> list[tuple[Slice, SliceReply]]:
        """Return the slices that were computed, in order, with their replies.

        On the first error, cancel the other slices. suspicion: of parts of a slice that failed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._submit(piece, suspicion)) for piece in slices]
        except BaseExceptionGroup as failures:
            # The caller gets one error; which of several slices failed first does not matter to it.
            raise failures.exceptions[0] from failures
        return [computed for task in tasks for computed in task.result()]

    async def _submit(
        self, piece: Slice, suspicion: Suspicion = Suspicion.NONE
    ) -> list[tuple[Slice, SliceReply]]:
        """Return the replies to a slice, which is cut if that is of use. Raises: BackendError, GatewayError.

        suspicion: of a part of a slice that failed.
        """
        grant = self.grant
        try:
            reply = await self._lane.submit(
                piece, self._owner, grant.deadline.at_s, self._count_unanswered, suspicion
            )
        except TimeoutError as error:
            raise grant.deadline.error() from error
        except (errors.BackendError, SliceFailed) as error:
            return await self._submit_parts(piece, error, suspicion)
        grant.count(reply.reply.tokens)
        self._numbers += reply.reply.numbers
        _check_numbers(self._numbers)
        return [(piece, reply)]

    async def _submit_parts(
        self, piece: Slice, error: errors.BackendError | SliceFailed, suspicion: Suspicion
    ) -> list[tuple[Slice, SliceReply]]:
        """Return the replies to the parts of a slice that failed as a whole.

        Raises: the error, if no part could succeed.
        """
        match error:
            case SliceFailed(error=errors.AttemptTimedOut()):
                self.grant.count_outlasted()
                return await self._search(piece, Suspicion.HUNG, is_part=bool(suspicion))
            case SliceFailed():
                return await self._search(piece, Suspicion.FAILED, is_part=bool(suspicion))
            case errors.InvalidWork():
                if _hides_input(piece, error):
                    return await self._search(piece, Suspicion.FAILED, is_part=bool(suspicion))
                is_single = piece.inputs == 1 and (bool(suspicion) or len(self._tokens) > 1)
                raise _named(error, piece, is_single=is_single) from error
            case errors.RequestTooLarge() | errors.PermitsTaken():
                if piece.inputs == 1:
                    raise _single_input_error(piece, error) from error
                tokens = self._tokens[piece.start : piece.start + piece.inputs]
                parts = cut_again(piece, tokens, self._lane.bounds())
                return await self.submit_all(parts, suspicion)
        raise error

    async def _search(
        self, piece: Slice, suspicion: Suspicion, *, is_part: bool
    ) -> list[tuple[Slice, SliceReply]]:
        """Return the replies to the parts of a slice that failed, one of whose inputs may be at fault.

        Halves go one after the other, so that the search costs two requests for each halving, however many
        inputs are at fault. The parts of a slice that timed out go together: each may cost a timeout.
        is_part: the slice is a part itself. Raises: InvalidWork, with the input at fault.
        """
        if is_part:
            return await self._search_parts(piece, suspicion, is_part=True)
        # The first input at fault ends the call: what all searches at once would send is of no use.
        self._searches = self._searches or asyncio.Semaphore(SEARCHES_MAX)
        async with self._searches:
            return await self._search_parts(piece, suspicion, is_part=False)

    async def _search_parts(
        self, piece: Slice, suspicion: Suspicion, *, is_part: bool
    ) -> list[tuple[Slice, SliceReply]]:
        tokens = self._tokens[piece.start : piece.start + piece.inputs]
        computed: list[tuple[Slice, SliceReply]] = []
        try:
            if suspicion is Suspicion.HUNG:
                return await self.submit_all(parts_of(piece, tokens, PARTS_MAX), suspicion)
            for half in halves(piece, tokens):
                computed += await self._submit(half, suspicion)
        except errors.InvalidWork as error:
            # If an input before it was computed, the fault is its own. Else it may be in what all share.
            is_named = is_part or error.input_index != piece.start
            if is_named or not await self._is_refused(piece, 1, tokens, suspicion):
                raise
            raise errors.InvalidWork(error.message, empty=error.empty) from error
        return computed

    async def _is_refused(
        self, piece: Slice, place: int, tokens: Sequence[int], suspicion: Suspicion
    ) -> bool:
        """Return whether one input of a slice is refused alone."""
        parts = separated(piece, tokens, [place])
        (single,) = [part for part in parts if part.start == piece.start + place]
        try:
            await self._submit(single, suspicion)
        except errors.InvalidWork:
            return True
        except (errors.BackendError, GatewayError):
            return False
        return False

    def _count_unanswered(self, piece: Slice) -> None:
        # Tokenizing is free.
        if not piece.work.is_free:
            self.grant.count_unanswered(piece.tokens)


def _named(error: errors.InvalidWork, piece: Slice, *, is_single: bool) -> errors.InvalidWork:
    """Return the error of a slice with the input's place in the whole work, if that is known.

    is_single: the slice has one input of several of its call.
    """
    index = error.input_index
    if index is None and is_single and FIELD.match(error.message) is None:
        index = 0
    if index is None:
        return error
    return errors.InvalidWork(error.message, empty=error.empty, input_index=piece.start + index)


def _hides_input(piece: Slice, error: errors.InvalidWork) -> bool:
    """Return whether a refusal may be of one of several inputs of a slice, and does not say of which."""
    if error.input_index is not None or piece.inputs == 1:
        return False
    return FIELD.match(error.message) is None


def _single_input_error(piece: Slice, error: errors.BackendError) -> errors.BackendError:
    """Return the error of a call whose input a replica refuses for its size, or for want of a permit."""
    sent_bytes = piece.work.request_bytes
    if isinstance(error, errors.PermitsTaken) or sent_bytes < REFUSED_BYTES_MIN:
        return error
    message = f"the upstream refuses its {sent_bytes} bytes, which are too many for one request"
    return errors.InvalidWork(message, input_index=piece.start)


def _counts_of(reply: Reply, part: WorkPart) -> tuple[int, ...] | None:
    """Return the tokens of each input: the reply's, or the gateway's own if they have the same sum."""
    if reply.input_tokens is not None:
        return reply.input_tokens
    if len(part.tokens) == 1:
        return (reply.tokens,)
    return tuple(part.tokens) if part.is_exact and sum(part.tokens) == reply.tokens else None


def _of_whole(error: errors.InvalidWork, part: WorkPart) -> errors.InvalidWork:
    """Return the error of a part of a call with the input's place in the whole work."""
    if part.places is None or error.input_index is None:
        return error
    return errors.InvalidWork(error.message, empty=error.empty, input_index=part.places[error.input_index])


def _index_in_call(error: errors.BackendError, prepared: PreparedWork) -> int | None:
    """Return the first input at fault, as an index into the call's inputs; None if no input is at fault."""
    if prepared.places is None or error.input_index is None:
        return error.input_index
    return prepared.places.index(error.input_index)


def _place_of(error: errors.BackendError, prepared: PreparedWork) -> str:
    """Return the input at fault as its caller counts inputs, as the beginning of a message."""
    index = _index_in_call(error, prepared)
    if index is None:
        return ""
    return f"input {index}: " if prepared.by_vectors is None else prepared.by_vectors.place_of(index)


def _retry_after_s(error: errors.BackendError) -> int | None:
    """Return the whole seconds for which an upstream asks for no requests, None if it does not."""
    return None if error.retry_after_s is None else max(1, math.ceil(error.retry_after_s))


def translated(error: errors.BackendError, place: str = "") -> GatewayError:
    """Return the caller's error for a failure of a backend. place: of the input at fault."""
    match error:
        case errors.InvalidWork(empty=True):
            return EmptyInput(place + error.message)
        case errors.InvalidWork():
            field = FIELD.match(error.message)
            return InvalidInput(place + error.message, param=field["name"] if field else None)
        case errors.UnsupportedWork():
            return OperationUnsupported(error.message)
        case errors.ReplicaOverloaded():
            return Overloaded(error.message, retry_after_s=_retry_after_s(error) or OVERLOADED_RETRY_S)
        case errors.ModelNotLoaded():
            return ModelLoading(error.message, retry_after_s=LOADING_RETRY_S)
        case errors.ReplicaUnavailable():
            return NoReplica(error.message, retry_after_s=_retry_after_s(error))
        case errors.AttemptTimedOut():
            return ReplicaTimedOut(error.message)
    return UpstreamFailed(error.message)
