"""Vectors of one chunk: calls, and the search for the rows that the server refuses."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from gateway.cli.embed.calls import Caller, Refused, TooSlow
from gateway.cli.embed.chunks import Chunk
from gateway.cli.embed.manifest import Counts, PartFacts, Space
from gateway.cli.embed.packing import Position
from gateway.cli.embed.parts import VECTOR
from gateway.cli.embed.plan import EmbedFailed, EmbedStopped, Plan, Source
from gateway.cli.embed.replies import Reply

# Refusals without any success before them, after which the options are at fault and not the rows.
REFUSALS_MAX = 32
# Rows that are named in the summary; all are counted.
PLACES_KEPT = 20


class Embedded(NamedTuple):
    """A chunk with the bytes of its vectors as its last column. space: None if it has no text."""

    batch: Any
    end: Position
    counts: Counts
    space: Space | None
    problems: tuple[str, ...]
    cuts: tuple[str, ...]
    size: int


class Found(NamedTuple):
    """Outcome of some texts: their vectors by index, the replies' facts, and what was refused.

    slow: indices of texts that the server did not answer by its deadline, sent alone.
    """

    vectors: dict[int, bytes]
    tokens: int
    space: Space | None
    cut: list[int]
    unknown_cuts: int
    refused: dict[int, str]
    slow: tuple[int, ...] = ()


class Embedder:
    """Embedder of chunks."""

    def __init__(self, caller: Caller, plan: Plan) -> None:
        self._caller = caller
        self._request = plan.request
        self._sources = plan.sources
        self._reading = plan.reading
        self._successes = self._refusals = 0

    async def embed(self, chunk: Chunk) -> Embedded:
        """Return a chunk with its vectors. Raises: EmbedFailed, EmbedStopped."""
        source = self._sources[chunk.end.file]
        indices = [index for index, text in enumerate(chunk.texts) if text is not None]
        successes = self._successes
        found = await self._found(chunk, source, indices)
        for index in found.slow:
            found = _both(found, await self._found_again(chunk, source, index, successes))
        batch = chunk.batch
        vectors = [found.vectors.get(index) for index in range(len(batch))]
        if found.refused:
            kept = [index not in found.refused for index in range(len(batch))]
            batch = batch.filter(pa.array(kept))
            vectors = [vector for vector, is_kept in zip(vectors, kept, strict=True) if is_kept]
        column = pa.array(vectors, pa.binary())
        counts = chunk.counts.plus(
            Counts(
                embedded=len(found.vectors),
                bad=len(found.refused),
                truncated=len(found.cut),
                unknown_cuts=found.unknown_cuts,
                tokens=found.tokens,
            )
        )
        return Embedded(
            batch.append_column(pa.field(VECTOR, pa.binary()), column),
            chunk.end,
            counts,
            found.space,
            chunk.problems + tuple(found.refused.values()),
            tuple(source.place(chunk.lines[index]) for index in sorted(found.cut)),
            chunk.size + column.nbytes,
        )

    async def _found(self, chunk: Chunk, source: Source, indices: Sequence[int]) -> Found:
        """Return the outcome of some texts of a chunk; refused ones are searched by halves."""
        if not indices:
            return Found({}, 0, None, [], 0, {})
        try:
            reply = await self._caller.embed(self._request, [chunk.texts[index] or "" for index in indices])
        except Refused as error:
            if len(indices) == 1:
                return self._refused(indices[0], f"{source.place(chunk.lines[indices[0]])}: {error}")
        except TooSlow:
            if len(indices) == 1:
                return Found({}, 0, None, [], 0, {}, (indices[0],))
        except EmbedStopped as error:
            # One of these rows may be what the server cannot answer.
            place, last_line = source.place(chunk.lines[indices[0]]), chunk.lines[indices[-1]]
            raise EmbedStopped(f"{place} to {last_line}: {error}") from error
        else:
            self._successes += 1
            return _found_in(reply, indices)
        middle = len(indices) // 2
        first = await self._found(chunk, source, indices[:middle])
        second = await self._found(chunk, source, indices[middle:])
        return _both(first, second)

    async def _found_again(self, chunk: Chunk, source: Source, index: int, successes: int) -> Found:
        """Return the outcome of a text that the server did not answer by its deadline, sent alone again.

        It is at fault if the server answered other calls meanwhile; otherwise the server is busy, and the
        call is repeated. successes: before the first call with it.
        """
        place = source.place(chunk.lines[index])
        try:
            text = chunk.texts[index] or ""
            reply = await self._caller.embed(self._request, [text], lambda: self._successes > successes)
        except (Refused, TooSlow) as error:
            return self._refused(index, f"{place}: {error}")
        except EmbedStopped as error:
            raise EmbedStopped(f"{place}: {error}") from error
        self._successes += 1
        return _found_in(reply, [index])

    def _refused(self, index: int, problem: str) -> Found:
        self._refusals += 1
        if self._reading.on_bad == "error":
            raise EmbedFailed(f"{problem}; --on-bad skip leaves such rows out")
        if not self._successes and self._refusals >= REFUSALS_MAX:
            raise EmbedFailed(f"{problem}; the server refuses every row")
        return Found({}, 0, None, [], 0, {index: problem})


def _found_in(reply: Reply, indices: Sequence[int]) -> Found:
    width = reply.vectors.shape[1]
    packed = memoryview(reply.vectors.astype("<f4", copy=False).tobytes())
    vectors = {
        index: bytes(packed[place * width * 4 : (place + 1) * width * 4])
        for place, index in enumerate(indices)
    }
    cut = [indices[place] for place in reply.truncated or ()]
    space = Space(width, reply.fingerprint, reply.model)
    return Found(vectors, reply.tokens, space, cut, int(reply.truncated is None), {})


def _both(first: Found, second: Found) -> Found:
    return Found(
        first.vectors | second.vectors,
        first.tokens + second.tokens,
        same_space(first.space, second.space),
        first.cut + second.cut,
        first.unknown_cuts + second.unknown_cuts,
        first.refused | second.refused,
        first.slow + second.slow,
    )


def same_space(first: Space | None, second: Space | None) -> Space | None:
    """Return the vector space of both replies; None if neither has vectors. Raises: EmbedFailed."""
    if second is not None and second.fingerprint == "mixed":
        raise EmbedFailed(
            "the gateway reports the fingerprint `mixed`: replicas with different vectors serve this model; "
            "see `gateway verify`"
        )
    if first is None or second is None:
        return first or second
    if difference := first.difference(second):
        raise EmbedFailed(
            f"the server's vectors are of another space than those of this output: {difference}; "
            "vectors of two spaces cannot be compared, so the output must be made again from its beginning"
        )
    return first


def facts_behind(before: PartFacts, embedded: Embedded) -> PartFacts:
    """Return the state of the run behind a chunk. Raises: EmbedFailed if its vectors are of another space."""
    return PartFacts(
        embedded.end,
        before.counts.plus(embedded.counts),
        same_space(before.space, embedded.space),
        (before.problems + embedded.problems)[:PLACES_KEPT],
        (before.cuts + embedded.cuts)[:PLACES_KEPT],
        before.seconds,
    )
