"""Chunks of rows: what one call embeds, with the rows around it."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gateway.cli.embed.manifest import Counts
from gateway.cli.embed.packing import Bounds, Position, Row, pack
from gateway.cli.embed.plan import EmbedFailed, Plan, Reading, Source
from gateway.cli.embed.text_rows import CsvRows, JsonLines, RowReader


class Chunk(NamedTuple):
    """Consecutive rows. batch, texts, lines: of rows that are kept; None is a row without text.

    counts, problems: of rows that are left out. size: bytes of the rows.
    """

    batch: Any
    texts: list[str | None]
    lines: list[int]
    end: Position
    counts: Counts
    problems: tuple[str, ...]
    size: int


def open_reader(plan: Plan) -> RowReader:
    """Return the reader of the input. Raises: EmbedFailed."""
    match plan.sources[0].format:
        case "jsonl":
            return JsonLines(plan.sources, plan.reading, plan.output.column)
        case "csv":
            reader: RowReader = CsvRows(plan.sources, plan.reading)
        case _:
            from gateway.cli.embed.parquet_rows import ParquetRows

            reader = ParquetRows(plan.sources, plan.reading, to_json=plan.output.format == "jsonl")
    if plan.output.column in reader.names:
        raise EmbedFailed(
            f"{plan.sources[0].path}: a column `{plan.output.column}` is there already; name another one for "
            "the vectors with --column"
        )
    return reader


def read_chunks(reader: RowReader, plan: Plan, start: Position) -> Iterator[Chunk]:
    """Yield the chunks from a position on. Raises: EmbedFailed at a row that may not be left out."""
    bounds = Bounds(plan.pace.batch_inputs, plan.pace.batch_bytes)
    for rows in pack(reader.rows(start), bounds):
        yield _chunk(reader, plan.sources, plan.reading, rows)


def _chunk(reader: RowReader, sources: Sequence[Source], reading: Reading, rows: Sequence[Row]) -> Chunk:
    kept, problems, empty, skipped = [], [], 0, 0
    for row in rows:
        place = sources[row.end.file].place(row.line)
        if row.problem:
            if reading.on_bad == "error":
                advice = row.advice or "--on-bad skip leaves such rows out"
                raise EmbedFailed(f"{place}: {row.problem}; {advice}")
            problems.append(f"{place}: {row.problem}")
        elif row.text:
            kept.append(row)
        elif reading.on_empty == "error":
            raise EmbedFailed(
                f"{place}: `{reader.field}` has no text; --on-empty skip leaves such rows out, and "
                "--on-empty null writes them with a null"
            )
        elif reading.on_empty == "skip":
            skipped += 1
        else:
            empty += 1
            kept.append(row)
    counts = Counts(rows=len(rows), empty=empty, skipped=skipped, bad=len(problems))
    texts = [row.text or None for row in kept]
    lines = [row.line for row in kept]
    size = sum(row.size for row in kept)
    return Chunk(reader.batch(kept), texts, lines, rows[-1].end, counts, tuple(problems), size)
