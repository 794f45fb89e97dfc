"""Command line of `gateway embed`, and the plan that it describes. It loads nothing heavy."""

import argparse
import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import get_args
from urllib.parse import unquote

from gateway.cli.bench_load import target_of
from gateway.cli.embed.plan import (
    DType,
    EmbedFailed,
    InputFormat,
    OnBad,
    OnEmpty,
    OutputFormat,
    Plan,
    Settings,
    Source,
)
from gateway.cli.operator_options import add_address_options, add_config_option
from gateway.client.request import Request

# Value of null in the name of a folder.
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
INPUT_SUFFIXES: dict[str, InputFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
INPUT_ENDINGS = ", ".join(INPUT_SUFFIXES)
OUTPUT_SUFFIXES: dict[str, OutputFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".lance": "lance",
}
# Encodings of names and of literals.
NO_TEXT = ("idna", "raw-unicode-escape", "raw_unicode_escape")
# What rows consist of, apart from their values.
SYNTAX = '{"a": [0]},;\t\r\n'


def add_embed_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gateway embed`."""
    add = parser.add_argument
    files = "JSONL, CSV, TSV (also .gz) or Parquet, or a folder"
    add("files", nargs="+", type=Path, metavar="FILE", help=files)
    add("--to", type=Path, required=True, metavar="OUT", help=".parquet, .jsonl, .jsonl.gz, .arrow or .lance")
    add = parser.add_argument_group("rows").add_argument
    add("--field", metavar="NAME", help="column of texts (default: `text`, or the only one with texts)")
    add("--id", metavar="NAME", help="column that identifies a row: a row without a value in it is bad")
    add("--delimiter", metavar="C", help="between columns of CSV (default: a comma; a tab in .tsv)")
    add("--encoding", metavar="NAME", help="of JSONL and CSV, such as cp1252 or utf-16 (default: utf-8)")
    add("--on-empty", choices=get_args(OnEmpty), default="error", help="rows without text (default: error)")
    add("--on-bad", choices=get_args(OnBad), default="error", help="rows that cannot be read or are refused")
    _add_call_options(parser)
    add = parser.add_argument
    add("--overwrite", action="store_true", help="replace OUT, and what an unfinished run has left of it")
    add("--json", action="store_true", help="print the summary as JSON")


def _add_call_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server", "a gateway, or a server of OpenAI's or TEI's API")
    add_config_option(group, "for the gateway's address (default: router.yaml)")
    add_address_options(group, "`listen`", "the API key")
    add = group.add_argument
    add("--model", help="model (default: the first that the server lists)")
    add("--key", help="API key; other users of this machine can see it")
    group = parser.add_argument_group("vectors")
    add = group.add_argument
    add("--column", default="embedding", metavar="NAME", help="column of the vectors (default: embedding)")
    add("--dtype", choices=get_args(DType), default="float32", help="of the vectors in OUT")
    add("--dimensions", type=int, metavar="N", help="width of the vectors (default: the model's)")
    roles = group.add_mutually_exclusive_group()
    roles.add_argument("--input-type", choices=("query", "document"), help="purpose of the texts")
    roles.add_argument("--prompt-name", metavar="NAME", help="prompt of the model, through TEI's API")
    sides = ("error", "left", "right")
    add("--truncate", choices=sides, help="texts that are too long (default: the model's)")
    add = parser.add_argument_group("calls").add_argument
    add("--batch-inputs", type=int, default=256, metavar="N", help="texts of a call at most (default: 256)")
    add("--concurrency", type=int, default=8, metavar="N", help="calls at once (default: 8)")
    add("--timeout", type=float, default=120.0, metavar="S", help="of one call (default: 120)")
    longest = "longest time without success (default: 600)"
    add("--deadline", type=float, default=600.0, metavar="S", help=longest)


def plan_of(options: argparse.Namespace, url: str) -> Plan:
    """Return the plan of a command line. url: of the server. Raises: EmbedFailed."""
    _check_bounds(options)
    suffix = ".jsonl.gz" if options.to.name.lower().endswith(".jsonl.gz") else options.to.suffix.lower()
    sources = sources_of(options.files)
    encoding = None if options.encoding is None else encoding_of(options.encoding)
    settings = Settings(
        sources,
        options.field,
        options.id,
        options.delimiter,
        options.on_empty,
        _request_of(options, url),
        options.column,
        encoding=encoding,
    )
    if suffix not in OUTPUT_SUFFIXES:
        endings = ", ".join(OUTPUT_SUFFIXES)
        raise EmbedFailed(f"{options.to}: the name of the output ends with one of {endings}")
    return Plan(
        settings,
        options.on_bad,
        options.batch_inputs,
        options.concurrency,
        options.timeout,
        options.deadline,
        options.to,
        OUTPUT_SUFFIXES[suffix],
        options.dtype,
        options.overwrite,
    )


def _check_bounds(options: argparse.Namespace) -> None:
    bounds: dict[str, tuple[float, float]] = {
        "--dimensions": (1 if options.dimensions is None else options.dimensions, 65_536),
        "--batch-inputs": (options.batch_inputs, 100_000),
        "--concurrency": (options.concurrency, 1024),
        "--timeout": (options.timeout, 86_400),
        "--deadline": (options.deadline, 31 * 86_400),
    }
    for name, (value, most) in bounds.items():
        if not 0 < value <= most:
            raise EmbedFailed(f"{name}: more than 0 and at most {most:,}, not {value:g}")
    if options.delimiter is not None and (len(options.delimiter) != 1 or options.delimiter in '\r\n"'):
        raise EmbedFailed(
            f"--delimiter is one character, and no quote or end of line; not {options.delimiter!r}"
        )
    if not options.column:
        raise EmbedFailed("--column is empty")


def _request_of(options: argparse.Namespace, url: str) -> Request:
    """Return the request of a command line. Raises: EmbedFailed."""
    try:
        target = target_of(url, "tei" if options.prompt_name else None)
    except ValueError as error:
        raise EmbedFailed(f"{url.rpartition('@')[2]} {error}") from error
    if target.api not in ("openai", "tei"):
        raise EmbedFailed(f"{target.path} does not embed; give the address of the server alone")
    if target.api == "tei" and options.input_type is not None:
        raise EmbedFailed("--input-type is not for TEI's API; see --prompt-name")
    if options.prompt_name and not target.path.endswith("/embed"):
        raise EmbedFailed(
            "--prompt-name needs TEI's API: give the address of the server alone, or its /embed"
        )
    return Request(
        target.base,
        target.path,
        options.model,
        options.dimensions,
        options.input_type,
        options.prompt_name,
        options.truncate,
    )


def encoding_of(name: str) -> str | None:
    """Return an encoding by its name in Python, None for UTF-8. Raises: EmbedFailed if it cannot be read."""
    found = ""
    try:
        found = codecs.lookup(name).name
        is_ascii = found == "utf-8-sig" or SYNTAX.encode(found) == SYNTAX.encode()
        is_readable = (is_ascii or found.startswith(("utf-16", "utf-32"))) and found not in NO_TEXT
    except (LookupError, ValueError):
        is_readable = False
    if not is_readable:
        raise EmbedFailed(f"--encoding: {name!r} is no encoding of lines of text, such as cp1252 or utf-16")
    return None if found in ("utf-8", "utf-8-sig") else found


def sources_of(paths: Sequence[Path]) -> tuple[Source, ...]:
    """Return the input files; a folder stands for its files, in the order of their names.

    Raises: EmbedFailed.
    """
    sources: list[Source] = []
    for path in paths:
        if path.is_dir():
            sources += _sources_in(path)
        else:
            sources.append(_source_of(path, path.parent.parts if _format_of(path) == "parquet" else ()))
    if len({source.format for source in sources}) > 1:
        raise EmbedFailed("the files have different formats; embed those of each format on their own")
    if len({Path(source.path).resolve() for source in sources}) < len(sources):
        raise EmbedFailed("a file is given twice")
    return tuple(sources)


def _sources_in(folder: Path) -> list[Source]:
    """Return the files in a folder, in the order of their names. Raises: EmbedFailed."""
    found = [path for path in sorted(folder.rglob("*")) if not path.name.startswith((".", "_"))]
    inside = folder.resolve()
    for path in found:
        # The owner of the folder may have no right to what a link leads to. A folder may be a link too.
        if not path.resolve().is_relative_to(inside):
            raise EmbedFailed(
                f"{path}: is a symbolic link that leads out of the folder; name what it points to as an "
                "input of its own, or remove it"
            )
    files = [path for path in found if _format_of(path) is not None and path.is_file()]
    if not files:
        raise EmbedFailed(f"{folder}: the folder has no file that ends with {INPUT_ENDINGS}")
    return [_source_of(file, file.relative_to(folder).parts[:-1]) for file in files]


def _format_of(path: Path) -> InputFormat | None:
    name = path.name.lower()
    found = INPUT_SUFFIXES.get(Path(name.removesuffix(".gz")).suffix)
    return None if found == "parquet" and name.endswith(".gz") else found


def _source_of(path: Path, folders: Sequence[str]) -> Source:
    """Return an input. folders: those that lead to it, from the place that was given. Raises: EmbedFailed."""
    kind = _format_of(path)
    if kind is None:
        raise EmbedFailed(
            f"{path}: the name of an input ends with {INPUT_ENDINGS}; texts also with .gz behind it"
        )
    try:
        facts = path.stat()
    except OSError as error:
        raise EmbedFailed(f"{path}: {error.strerror or error}") from error
    if not path.is_file():
        raise EmbedFailed(f"{path}: is no file; a run that can be continued needs one")
    pairs = [folder.split("=", 1) for folder in folders if "=" in folder[1:]]
    if pairs and kind != "parquet":
        raise EmbedFailed(
            f"{path}: its folder has the form of a partition, whose column `{pairs[0][0]}` is not in the "
            "rows; such columns are kept for Parquet only: name the files in place of the folder to go on "
            "without it"
        )
    partitions = {unquote(name): None if value == NO_VALUE else unquote(value) for name, value in pairs}
    if len(partitions) < len(pairs):
        raise EmbedFailed(f"{path}: two of its folders have one name")
    is_gzip = path.name.lower().endswith(".gz")
    return Source(str(path), kind, is_gzip, facts.st_size, facts.st_mtime_ns, tuple(partitions.items()))
