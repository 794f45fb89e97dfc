"""Rows to rows with vectors: chunks are read ahead, embedded at once, and stored as parts in their order.

Memory is bounded: the chunks in flight and those that wait for a part are counted, and reading waits.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from gateway.cli.embed.parquet_rows import ParquetRows
from gateway.cli.embed.parts import Parts
from gateway.cli.embed.plan import (
    Counts,
    EmbedFailed,
    OnBad,
    PartFacts,
    Plan,
    Position,
    Source,
)
from gateway.cli.embed.text_rows import CsvRows, JsonLines, Row
from gateway.client.errors import Refused
from gateway.client.isolation import Embedder
from gateway.client.replies import Reply, Vectors
from gateway.client.request import Space, same_space

# Bytes of the texts of a call, and of its whole rows, whose other columns wait for the reply in memory.
TEXT_BYTES, ROW_BYTES = 1024 * 1024, 4 * 1024 * 1024
# Rows without a text cost no input; this many are one chunk.
ROWS_MAX = 4096
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


class Interrupted(Exception):
    """A signal ended the run. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Chunk:
    """Consecutive rows, and the replies to their texts so far.

    batch, texts: of rows that are kept; None is a row without text. facts: of all its rows. size: bytes
    of the rows, and of their vectors.
    """

    def __init__(
        self, source: Source, rows: Sequence[Row], batch: pa.RecordBatch, facts: PartFacts, on_bad: OnBad
    ) -> None:
        self.batch = batch
        self.texts = [row.text or None for row in rows]
        self.facts = facts
        self.size = sum(row.size for row in rows)
        self._source = source
        self._on_bad = on_bad
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
        """Add the vectors of texts. Raises: CallFailed if they are of another space."""
        self._replies.append((indices, reply.vectors))
        self._space = same_space(self._space, Space(reply.vectors.shape[1], reply.fingerprint, reply.model))
        self._cut += [indices[place] for place in reply.truncated or ()]
        self._unknown_cuts += reply.truncated is None
        self._tokens += reply.tokens

    def refuse(self, index: int, error: Refused) -> None:
        """Leave a row out. Raises: EmbedFailed if none may be."""
        problem = f"{self.place(index)}: {error}"
        if self._on_bad == "error":
            raise EmbedFailed(f"{problem}; --on-bad skip leaves such rows out")
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
    return Chunk(plan.settings.sources[facts.end.file], kept, reader.batch(kept), facts, plan.on_bad)


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

        What is complete is stored before an error is raised. Raises: EmbedFailed, CallFailed, CallStopped,
        Interrupted, OSError.
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
        chunk.complete()
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
