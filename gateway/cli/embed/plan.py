"""Plan of a run: what is read, sent and written. The command line becomes a plan in `options.py`."""

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

InputFormat: TypeAlias = Literal["jsonl", "csv", "parquet"]
OutputFormat: TypeAlias = Literal["parquet", "jsonl", "arrow", "lance"]
OnEmpty: TypeAlias = Literal["error", "skip", "null"]
OnBad: TypeAlias = Literal["error", "skip"]
DType: TypeAlias = Literal["float32", "float16"]


class EmbedFailed(Exception):
    """The run cannot go on, and running it again changes nothing. The message is for a person."""


class EmbedStopped(Exception):
    """The run ended early, and the same command continues it. The message is for a person."""


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


class Reading(msgspec.Struct, frozen=True):
    """Rules of reading rows.

    field: column of texts, None to find it. id_field: column that no row may lack. encoding: of JSONL and
    CSV, None for UTF-8.
    """

    field: str | None = None
    id_field: str | None = None
    delimiter: str | None = None
    on_empty: OnEmpty = "error"
    on_bad: OnBad = "error"
    encoding: str | None = None


class Request(msgspec.Struct, frozen=True):
    """Address and fields of a call, without its texts. path: decides the API, and so the fields of a body."""

    base: str
    path: str
    model: str | None = None
    dimensions: int | None = None
    input_type: str | None = None
    prompt_name: str | None = None
    truncate: Literal["error", "left", "right"] | None = None


class Pace(msgspec.Struct, frozen=True):
    """Sizes and times of calls. deadline_s: time without a reply after which a call is given up."""

    batch_inputs: int = 256
    batch_bytes: int = 1024 * 1024
    concurrency: int = 8
    timeout_s: float = 120.0
    deadline_s: float = 600.0


class Output(msgspec.Struct, frozen=True):
    """The file to write. column: of the vectors."""

    path: Path
    format: OutputFormat
    column: str = "embedding"
    dtype: DType = "float32"
    overwrite: bool = False


class Plan(msgspec.Struct, frozen=True):
    """One run."""

    sources: tuple[Source, ...]
    reading: Reading
    request: Request
    pace: Pace
    output: Output
