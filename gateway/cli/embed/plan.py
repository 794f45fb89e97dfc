"""Plan of a run, positions in its input, and the state behind a position.

`Settings` and `PartFacts` are stored next to an unfinished output, with what they consist of.
"""

from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from gateway.client.request import Request, Space, same_space

InputFormat: TypeAlias = Literal["jsonl", "csv", "parquet"]
OutputFormat: TypeAlias = Literal["parquet", "jsonl", "arrow", "lance"]
OnEmpty: TypeAlias = Literal["error", "skip", "null"]
OnBad: TypeAlias = Literal["error", "skip"]
DType: TypeAlias = Literal["float32", "float16"]

# Rows that are named in the summary; all are counted.
PLACES_KEPT = 20


class EmbedFailed(Exception):
    """The run cannot go on, and running it again changes nothing. The message is for a person."""


class Source(msgspec.Struct, frozen=True):
    """An input file. size, mtime_ns: as it was at the start; a resumed run needs the same.

    partitions: columns that the names of its folders have, as in `lang=de`, with the value of all its rows.
    """

    path: str
    format: InputFormat
    is_gzip: bool
    size: int
    mtime_ns: int
    partitions: tuple[tuple[str, str | None], ...] = ()

    def place(self, line: int) -> str:
        """Return the words for a row: its line, or its number where a file has no lines."""
        return f"{self.path} row {line}" if self.format == "parquet" else f"{self.path}:{line}"


class Settings(msgspec.Struct, frozen=True):
    """Inputs and settings that decide the rows and vectors of an output. The manifest of a run stores them.

    field: column of texts, None to find it. id_field: column that no row may lack. column: of the vectors.
    encoding: of JSONL and CSV, None for UTF-8.
    """

    sources: tuple[Source, ...]
    field: str | None
    id_field: str | None
    delimiter: str | None
    on_empty: OnEmpty
    request: Request
    column: str
    version: int = 1
    encoding: str | None = None

    def difference(self, now: "Settings") -> str:
        """Return why a run of other settings cannot continue one of these; empty if it can.

        A run that stopped at the first row without text has left none out, and may continue in another way.
        """
        before = self if self.on_empty != "error" else msgspec.structs.replace(self, on_empty=now.on_empty)
        if before.sources != now.sources:
            if [source.path for source in before.sources] == [source.path for source in now.sources]:
                pairs = zip(before.sources, now.sources, strict=True)
                return f"{next(old for old, new in pairs if old != new).path} has changed"
            names = ", ".join(source.path for source in before.sources[:5])
            return f"the input was {names}{' …' if len(before.sources) > 5 else ''}"
        then, today = before.options(), now.options()
        changed = [name for name in then if then[name] != today[name]]
        return "; ".join(f"{name} was {then[name]!r} and is {today[name]!r}" for name in changed)

    def options(self) -> dict[str, Any]:
        """Return all settings but the inputs, by the names of their options."""
        fields = msgspec.to_builtins(self)
        fields |= fields.pop("request")
        del fields["sources"]
        return {f"--{name.replace('_', '-')}": value for name, value in fields.items()}


class Plan(msgspec.Struct, frozen=True):
    """One run. batch_inputs: texts of a call. deadline_s: time without success after which the run stops."""

    settings: Settings
    on_bad: OnBad
    batch_inputs: int
    concurrency: int
    timeout_s: float
    deadline_s: float
    output: Path
    output_format: OutputFormat
    dtype: DType
    overwrite: bool

    def manifest(self) -> Settings:
        """Return the settings without the address, which may change: another gateway may go on."""
        request = msgspec.structs.replace(self.settings.request, base="")
        return msgspec.structs.replace(self.settings, request=request)


class Position(msgspec.Struct, frozen=True):
    """Place between two rows. offset: bytes of the uncompressed file, or rows of a Parquet file."""

    file: int = 0
    offset: int = 0
    line: int = 0


class Counts(msgspec.Struct, frozen=True):
    """Sums over rows. skipped: without text and left out. empty: without text, with a null for the vector.

    bad: left out. truncated: texts that the server cut; unknown_cuts: replies that do not name them.
    """

    rows: int = 0
    embedded: int = 0
    empty: int = 0
    skipped: int = 0
    bad: int = 0
    truncated: int = 0
    unknown_cuts: int = 0
    tokens: int = 0

    def plus(self, other: "Counts") -> "Counts":
        """Return the sums of both."""
        mine, others = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Counts(*map(sum, zip(mine, others, strict=True)))


class PartFacts(msgspec.Struct, frozen=True):
    """State of a run behind a part, or what a chunk adds to it. seconds: of work.

    problems: the first rows that were left out, in words. cuts: the first texts that the server cut.
    """

    end: Position = Position()
    counts: Counts = Counts()
    space: Space | None = None
    problems: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    seconds: float = 0.0

    def plus(self, other: "PartFacts") -> "PartFacts":
        """Return the state behind the rows of `other`. Raises: CallFailed if its space is another one."""
        return PartFacts(
            other.end,
            self.counts.plus(other.counts),
            same_space(self.space, other.space),
            (self.problems + other.problems)[:PLACES_KEPT],
            (self.cuts + other.cuts)[:PLACES_KEPT],
            self.seconds + other.seconds,
        )
