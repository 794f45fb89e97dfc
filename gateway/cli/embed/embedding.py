"""Rows to rows with vectors: chunks are read ahead, embedded at once, and stored as parts in their order.

Memory is bounded: the chunks in flight and those that wait for a part are counted, and reading waits. A call
that is refused is repeated in smaller ones until the row at fault is alone. A row that the server does not
answer by its own deadline, sent alone, is at fault only if the server answers other calls meanwhile.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from gateway.cli.embed.calls import Caller, Refused, Reply, TooSlow, Vectors
from gateway.cli.embed.parquet_rows import ParquetRows
from gateway.cli.embed.parts import Parts
from gateway.cli.embed.plan import (
    Counts,
    EmbedFailed,
    EmbedStopped,
    PartFacts,
    Plan,
    Position,
    Source,
    Space,
    same_space,
)
from gateway.cli.embed.text_rows import CsvRows, JsonLines, Row

# Bytes of the texts of a call, and of its whole rows, whose other columns wait for the reply in memory.
TEXT_BYTES, ROW_BYTES = 1024 * 1024, 4 * 1024 * 1024
# Rows without a text cost no input; this many are one chunk.
ROWS_MAX = 4096
# Refusals without any success before them, after which the options are at fault and not the rows.
REFUSALS_MAX = 32
# Column of the bytes of the vectors.
VECTOR = "vector"
# A part is stored after the first of these. Its time grows with the run, so that a killed run loses a
# hundredth of its work at most, and a long one has few parts.
PART_BYTES = 32 * 1024 * 1024
PART_FIRST_S, PART_SHARE, PART_MAX_S = 1.0, 0.01, 30.0
# Chunks that are read ahead for each call that may be in flight, and bytes above which none is.
AHEAD = 3
AHEAD_BYTES = 64 * 1024 * 1024

RowReader: TypeAlias = JsonLines | CsvRows | ParquetRows


class Interrupted(EmbedStopped):
    """A signal ended the run. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped by a signal")
        self.number = number


class Chunk:
    """Consecutive rows, and the replies to their texts so far.

    batch, texts: of rows that are kept; None is a row without text. facts: of all its rows. size: bytes
    of the rows, and of their vectors. slow: indices of texts that the server did not answer by its deadline,
    alone.
    """

    def __init__(self, source: Source, rows: Sequence[Row], batch: pa.RecordBatch, facts: PartFacts) -> None:
        self.batch = batch
        self.texts = [row.text or None for row in rows]
        self.facts = facts
        self.size = sum(row.size for row in rows)
        self.slow: list[int] = []
        self._source = source
        self._lines = [row.line for row in rows]
        # Problems by index.
        self._refused: dict[int, str] = {}
        self._replies: list[tuple[Sequence[int], Vectors]] = []
        self._space: Space | None = None
        self._cut: list[int] = []
        self._tokens = self._unknown_cuts = 0

    def place(self, first: int, last: int | None = None) -> str:
        """Return the words for a row, or for the rows up to a last one."""
        place = self._source.place(self._lines[first])
        return place if last is None else f"{place} to {self._lines[last]}"

    def add(self, reply: Reply, indices: Sequence[int]) -> None:
        """Add the vectors of texts. Raises: EmbedFailed if they are of another space."""
        self._replies.append((indices, reply.vectors))
        self._space = same_space(self._space, Space(reply.vectors.shape[1], reply.fingerprint, reply.model))
        self._cut += [indices[place] for place in reply.truncated or ()]
        self._unknown_cuts += reply.truncated is None
        self._tokens += reply.tokens

    def refuse(self, index: int, problem: str) -> None:
        """Leave a row out."""
        self._refused[index] = problem

    def complete(self) -> None:
        """Append the bytes of the vectors as the last column, and leave out the rows that were refused."""
        column = self._column()
        self.size += column.nbytes
        self.batch = self.batch.append_column(pa.field(VECTOR, pa.binary()), column)
        if self._refused:
            keeps = [index not in self._refused for index in range(len(self.batch))]
            self.batch = self.batch.filter(pa.array(keeps))
        counts = Counts(
            embedded=sum(len(indices) for indices, _ in self._replies),
            bad=len(self._refused),
            truncated=len(self._cut),
            unknown_cuts=self._unknown_cuts,
            tokens=self._tokens,
        )
        problems, cuts = tuple(self._refused.values()), tuple(map(self.place, sorted(self._cut)))
        self.facts = self.facts.plus(PartFacts(self.facts.end, counts, self._space, problems, cuts))
        # It waits for those before it, and then for a part.
        self.texts, self._replies = [], []

    def _column(self) -> pa.Array:
        """Return the bytes of the vector of each row, little-endian; null where it has none."""
        rows = len(self.batch)
        if self._space is None:
            return pa.nulls(rows, pa.binary())
        is_embedded = np.zeros(rows, bool)
        for indices, _ in self._replies:
            is_embedded[indices] = True
        # Vectors before the end of each row.
        counts = np.cumsum(is_embedded)
        vectors = np.empty((counts[-1], self._space.dimensions), "<f4")
        for indices, found in self._replies:
            vectors[counts[indices] - 1] = found
        offsets = np.append(0, counts) * (vectors.itemsize * vectors.shape[1])
        buffers = [
            pa.array(is_embedded).buffers()[1],
            pa.py_buffer(offsets.astype(np.int32)),
            pa.py_buffer(vectors),
        ]
        return pa.Array.from_buffers(pa.binary(), rows, buffers)


def open_reader(plan: Plan) -> RowReader:
    """Return the reader of the input. Raises: EmbedFailed."""
    settings = plan.settings
    match settings.sources[0].format:
        case "jsonl":
            return JsonLines(settings)
        case "csv":
            reader: RowReader = CsvRows(settings)
        case _:
            reader = ParquetRows(settings, to_json=plan.output_format == "jsonl")
    if settings.column in reader.names:
        raise EmbedFailed(
            f"{settings.sources[0].path}: a column `{settings.column}` is there already; name another one "
            "for the vectors with --column"
        )
    return reader


def pack(
    rows: Iterable[Row], inputs_max: int, text_bytes: int = TEXT_BYTES, row_bytes: int = ROW_BYTES
) -> Iterator[list[Row]]:
    """Yield rows in lists that keep the bounds, in order; a row beyond them is a list of its own."""
    packed: list[Row] = []
    inputs = texts = size = 0
    for row in rows:
        text = row.text or ""
        own_text = len(text) if text.isascii() else len(text.encode())
        is_full = (
            inputs + bool(text) > inputs_max
            or texts + own_text > text_bytes
            or size + row.size > row_bytes
            or len(packed) >= ROWS_MAX
        )
        if packed and (is_full or packed[-1].group != row.group):
            yield packed
            packed, inputs, texts, size = [], 0, 0, 0
        packed.append(row)
        inputs += bool(text)
        texts += own_text
        size += row.size
    if packed:
        yield packed


def read_chunks(reader: RowReader, plan: Plan, start: Position) -> Iterator[Chunk]:
    """Yield the chunks from a position on. Raises: EmbedFailed at a row that may not be left out."""
    for rows in pack(reader.rows(start), plan.batch_inputs):
        yield _chunk(reader, plan, rows)


def _chunk(reader: RowReader, plan: Plan, rows: Sequence[Row]) -> Chunk:
    kept, problems, empty, skipped = [], [], 0, 0
    on_empty = plan.settings.on_empty
    for row in rows:
        if row.text:
            kept.append(row)
            continue
        place = plan.settings.sources[row.end.file].place(row.line)
        if row.problem:
            if plan.on_bad == "error":
                advice = row.advice or "--on-bad skip leaves such rows out"
                raise EmbedFailed(f"{place}: {row.problem}; {advice}")
            problems.append(f"{place}: {row.problem}")
        elif on_empty == "error":
            raise EmbedFailed(
                f"{place}: `{reader.field}` has no text; --on-empty skip leaves such rows out, and "
                "--on-empty null writes them with a null"
            )
        elif on_empty == "skip":
            skipped += 1
        else:
            empty += 1
            kept.append(row)
    counts = Counts(rows=len(rows), empty=empty, skipped=skipped, bad=len(problems))
    facts = PartFacts(rows[-1].end, counts, problems=tuple(problems))
    return Chunk(plan.settings.sources[facts.end.file], kept, reader.batch(kept), facts)


class Embedder:
    """Embedder of chunks."""

    def __init__(self, caller: Caller, plan: Plan) -> None:
        self._caller = caller
        self._request = plan.settings.request
        self._on_bad = plan.on_bad
        self._successes = self._refusals = 0

    async def embed(self, chunk: Chunk) -> None:
        """Complete a chunk. Raises: EmbedFailed, EmbedStopped."""
        successes = self._successes
        await self._send(chunk, [index for index, text in enumerate(chunk.texts) if text is not None])
        for index in chunk.slow:
            await self._send_again(chunk, index, successes)
        chunk.complete()

    async def _send(self, chunk: Chunk, indices: Sequence[int]) -> None:
        """Embed some texts of a chunk; refused ones are searched."""
        if not indices:
            return
        try:
            await self._call(chunk, indices, chunk.place(indices[0], indices[-1]), lambda: True)
        except Refused as error:
            if len(indices) > 1:
                at = error.place
                starts = [0, len(indices) // 2] if at is None else [0, at, at + 1]
                for start, end in pairwise([*starts, len(indices)]):
                    await self._send(chunk, indices[start:end])
            elif isinstance(error, TooSlow):
                chunk.slow.append(indices[0])
            else:
                self._refuse(chunk, indices[0], error)

    async def _send_again(self, chunk: Chunk, index: int, successes: int) -> None:
        """Embed a text that the server did not answer by its deadline, sent alone, once more.

        It is at fault if the server answered other calls meanwhile; otherwise the server is busy, and the
        call is repeated. successes: before the first call with it.
        """
        try:
            await self._call(chunk, [index], chunk.place(index), lambda: self._successes > successes)
        except Refused as error:
            self._refuse(chunk, index, error)

    async def _call(self, chunk: Chunk, indices: Sequence[int], place: str, ends: Callable[[], bool]) -> None:
        texts = [chunk.texts[index] or "" for index in indices]
        try:
            reply = await self._caller.embed(self._request, texts, ends)
        except EmbedStopped as error:
            # One of these rows may be what the server cannot answer.
            raise EmbedStopped(f"{place}: {error}") from error
        self._successes += 1
        chunk.add(reply, indices)

    def _refuse(self, chunk: Chunk, index: int, error: Refused) -> None:
        problem = f"{chunk.place(index)}: {error}"
        self._refusals += 1
        if self._on_bad == "error":
            raise EmbedFailed(f"{problem}; --on-bad skip leaves such rows out")
        if not self._successes and self._refusals >= REFUSALS_MAX:
            raise EmbedFailed(f"{problem}; the server refuses every row")
        chunk.refuse(index, problem)


class Run:
    """Run of a plan. report: takes the state behind each chunk, stored or not."""

    def __init__(
        self, plan: Plan, parts: Parts, embedder: Embedder, report: Callable[[PartFacts], None]
    ) -> None:
        self._plan = plan
        self._parts = parts
        self._embedder = embedder
        self._report = report
        self._in_flight = asyncio.Semaphore(plan.concurrency)
        # Chunks in their order, and the bytes of each.
        self._tasks: deque[tuple[asyncio.Task[Chunk], int]] = deque()
        self._facts = parts.facts
        self._unstored: list[Chunk] = []
        self._stored_s = self._started_s = time.monotonic()
        self.stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self, reader: RowReader) -> None:
        """Embed the rows that no part has.

        What is complete is stored before an error is raised. Raises: EmbedFailed, EmbedStopped, OSError.
        """
        try:
            await self._read_all(read_chunks(reader, self._plan, self._facts.end))
        finally:
            tasks = [task for task, _ in self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._store()

    async def _read_all(self, chunks: Iterator[Chunk]) -> None:
        failure: EmbedFailed | None = None
        is_open = True
        while is_open or self._tasks:
            if is_open and self._has_room():
                try:
                    chunk = await asyncio.to_thread(next, chunks, None)
                except EmbedFailed as error:
                    # Rows before it are complete first.
                    chunk, failure = None, error
                if chunk is None:
                    is_open = False
                else:
                    self._tasks.append((asyncio.create_task(self._embed(chunk)), chunk.size))
            else:
                waited: set[asyncio.Future[Any]] = {self._tasks[0][0], self.stop}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            await self._take_completed()
        if failure is not None:
            raise failure

    def _has_room(self) -> bool:
        """Return whether another chunk may be read. One may always be, so that no row is too large."""
        is_below = len(self._tasks) < AHEAD * self._plan.concurrency
        return not self._tasks or (is_below and sum(size for _, size in self._tasks) < AHEAD_BYTES)

    async def _embed(self, chunk: Chunk) -> Chunk:
        async with self._in_flight:
            await self._embedder.embed(chunk)
        return chunk

    async def _take_completed(self) -> None:
        """Take chunks that are complete, in order, and store a part if it is time. Raises: as `run`."""
        while self._tasks and self._tasks[0][0].done():
            chunk = self._tasks[0][0].result()
            self._tasks.popleft()
            facts = self._facts.plus(chunk.facts)
            seconds = self._parts.facts.seconds + time.monotonic() - self._stored_s
            self._facts = msgspec.structs.replace(facts, seconds=seconds)
            self._unstored.append(chunk)
            self._report(self._facts)
            if self._is_due():
                await self._store()
        if self.stop.done():
            raise Interrupted(self.stop.result())

    def _is_due(self) -> bool:
        now_s = time.monotonic()
        span_s = min(PART_MAX_S, max(PART_FIRST_S, PART_SHARE * (now_s - self._started_s)))
        return now_s - self._stored_s >= span_s or sum(item.size for item in self._unstored) >= PART_BYTES

    async def _store(self) -> None:
        """Store a part of the chunks that are complete. Raises: OSError."""
        if self._unstored:
            batches = [chunk.batch for chunk in self._unstored]
            await asyncio.to_thread(self._parts.add, batches, self._facts)
            self._unstored = []
            self._stored_s = time.monotonic()
