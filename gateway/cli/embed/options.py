"""Options of `gateway embed`, and the plan that they describe."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args
from urllib.parse import unquote

from gateway.cli.bench_calls import target_of
from gateway.cli.embed.lines import encoding_of
from gateway.cli.embed.plan import (
    DType,
    EmbedFailed,
    InputFormat,
    OnBad,
    OnEmpty,
    Output,
    OutputFormat,
    Pace,
    Plan,
    Reading,
    Request,
    Source,
)
from gateway.cli.operator_options import caller_url

CONFIG, URL = Path("router.yaml"), "http://127.0.0.1:8080"
BATCH_BYTES = 1024 * 1024
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


def add_embed_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gateway embed`."""
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JSONL, CSV, TSV (also .gz) or Parquet, or a folder",
    )
    add("--to", type=Path, required=True, metavar="OUT", help=".parquet, .jsonl, .jsonl.gz, .arrow or .lance")
    _add_rows(parser)
    _add_server(parser)
    _add_vectors(parser)
    _add_pace(parser)
    add("--overwrite", action="store_true", help="replace OUT, and what an unfinished run has left of it")
    add("--json", action="store_true", help="print the summary as JSON")


def _add_rows(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("rows").add_argument
    add("--field", metavar="NAME", help="column of texts (default: `text`, or the only one with texts)")
    add("--id", metavar="NAME", help="column that identifies a row: a row without a value in it is bad")
    add("--delimiter", metavar="C", help="between columns of CSV (default: a comma; a tab in .tsv)")
    add("--encoding", metavar="NAME", help="of JSONL and CSV, such as cp1252 or utf-16 (default: utf-8)")
    add("--on-empty", choices=get_args(OnEmpty), default="error", help="rows without text (default: error)")
    add("--on-bad", choices=get_args(OnBad), default="error", help="rows that cannot be read or are refused")


def _add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("-c", "--config", type=Path, metavar="FILE", help=f"for the gateway's address (default: {CONFIG})")
    add(
        "--url",
        help="gateway, or a server of OpenAI's or TEI's API (default: `listen` of the configuration; without "
        f"one {URL})",
    )
    add("--model", help="model (default: the first that the server lists)")
    add("--key", help="API key; other users of this machine can see it (default: GATEWAY_API_KEY)")
    add("--key-file", type=Path, metavar="FILE", help="file with the API key")
    add("--ca", type=Path, metavar="FILE", help="authority that signed the server's certificate, in PEM")


def _add_vectors(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("vectors")
    add = group.add_argument
    add("--column", default="embedding", metavar="NAME", help="column of the vectors (default: embedding)")
    add("--dtype", choices=get_args(DType), default="float32", help="of the vectors in OUT")
    add("--dimensions", type=int, metavar="N", help="width of the vectors (default: the model's)")
    roles = group.add_mutually_exclusive_group()
    roles.add_argument("--input-type", choices=("query", "document"), help="purpose of the texts")
    roles.add_argument("--prompt-name", metavar="NAME", help="prompt of the model, through TEI's API")
    add(
        "--truncate",
        choices=("error", "left", "right"),
        help="texts that are too long (default: the model's)",
    )


def _add_pace(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("calls").add_argument
    add("--batch-inputs", type=int, default=256, metavar="N", help="texts of a call at most (default: 256)")
    add("--concurrency", type=int, default=8, metavar="N", help="calls at once (default: 8)")
    add("--timeout", type=float, default=120.0, metavar="S", help="of one call (default: 120)")
    add(
        "--deadline",
        type=float,
        default=600.0,
        metavar="S",
        help="longest time without success (default: 600)",
    )


def plan_of(options: argparse.Namespace, environment: Mapping[str, str]) -> Plan:
    """Return the plan of a command line. Raises: EmbedFailed, ConfigError, RequestRefused."""
    _check_bounds(options)
    return Plan(
        sources_of(options.files),
        _reading_of(options),
        _request_of(options, _url_of(options, environment)),
        Pace(options.batch_inputs, BATCH_BYTES, options.concurrency, options.timeout, options.deadline),
        Output(options.to, _output_format(options.to), options.column, options.dtype, options.overwrite),
    )


def _reading_of(options: argparse.Namespace) -> Reading:
    encoding = None if options.encoding is None else encoding_of(options.encoding)
    return Reading(options.field, options.id, options.delimiter, options.on_empty, options.on_bad, encoding)


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


def _url_of(options: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """Return the URL of the server. Raises: ConfigError, RequestRefused."""
    if options.url is None and options.config is None and not CONFIG.exists():
        return URL
    return caller_url(options.url, options.config or CONFIG, environment)


def _request_of(options: argparse.Namespace, url: str) -> Request:
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


def _output_format(path: Path) -> OutputFormat:
    suffix = ".jsonl.gz" if path.name.lower().endswith(".jsonl.gz") else path.suffix.lower()
    found = OUTPUT_SUFFIXES.get(suffix)
    if found is None:
        raise EmbedFailed(f"{path}: the name of the output ends with one of {', '.join(OUTPUT_SUFFIXES)}")
    return found


def sources_of(paths: Sequence[Path]) -> tuple[Source, ...]:
    """Return the input files; a folder stands for its files, in the order of their names.

    Raises: EmbedFailed.
    """
    sources = tuple(
        source
        for path in paths
        for source in (
            _sources_in(path)
            if path.is_dir()
            else [_source_of(path, path.parent.parts if _format_of(path) == "parquet" else ())]
        )
    )
    if len({source.format for source in sources}) > 1:
        raise EmbedFailed("the files have different formats; embed those of each format on their own")
    if len({Path(source.path).resolve() for source in sources}) < len(sources):
        raise EmbedFailed("a file is given twice")
    return sources


def _sources_in(folder: Path) -> list[Source]:
    """Return the files in a folder, in the order of their names. Raises: EmbedFailed."""
    found = [path for path in sorted(folder.rglob("*")) if not path.name.startswith((".", "_"))]
    _check_links(folder, found)
    files = [path for path in found if _format_of(path) is not None and path.is_file()]
    if not files:
        raise EmbedFailed(f"{folder}: the folder has no file that ends with {_endings()}")
    return [_source_of(file, file.relative_to(folder).parts[:-1]) for file in files]


def _check_links(folder: Path, found: Sequence[Path]) -> None:
    """Check that no link leads out of a folder, whose owner may have no right to that file.

    Raises: EmbedFailed.
    """
    inside = folder.resolve()
    for path in found:
        # A file may also be reached through a folder that is a link.
        if not path.resolve().is_relative_to(inside):
            raise EmbedFailed(
                f"{path}: is a symbolic link that leads out of the folder; name what it points to as an "
                "input of its own, or remove it"
            )


def _format_of(path: Path) -> InputFormat | None:
    name = path.name.lower()
    found = INPUT_SUFFIXES.get(Path(name.removesuffix(".gz")).suffix)
    return None if found == "parquet" and name.endswith(".gz") else found


def _endings() -> str:
    return ", ".join(INPUT_SUFFIXES)


def _partitions_of(
    path: Path, folders: Sequence[str], kind: InputFormat
) -> tuple[tuple[str, str | None], ...]:
    """Return the columns that the names of folders have, as in `lang=de`. Raises: EmbedFailed."""
    pairs = [folder.split("=", 1) for folder in folders if "=" in folder[1:]]
    if pairs and kind != "parquet":
        raise EmbedFailed(
            f"{path}: its folder has the form of a partition, whose column `{pairs[0][0]}` is not in the "
            "rows; such columns are kept for Parquet only: name the files in place of the folder to go on "
            "without it"
        )
    found = {unquote(name): None if value == NO_VALUE else unquote(value) for name, value in pairs}
    if len(found) < len(pairs):
        raise EmbedFailed(f"{path}: two of its folders have one name")
    return tuple(found.items())


def _source_of(path: Path, folders: Sequence[str]) -> Source:
    """Return an input. folders: those that lead to it, from the place that was given. Raises: EmbedFailed."""
    found = _format_of(path)
    if found is None:
        raise EmbedFailed(
            f"{path}: the name of an input ends with {_endings()}; texts also with .gz behind it"
        )
    try:
        facts = path.stat()
    except OSError as error:
        raise EmbedFailed(f"{path}: {error.strerror or error}") from error
    if not path.is_file():
        raise EmbedFailed(f"{path}: is no file; a run that can be continued needs one")
    partitions = _partitions_of(path, folders, found)
    is_gzip = path.name.lower().endswith(".gz")
    return Source(str(path), found, is_gzip, facts.st_size, facts.st_mtime_ns, partitions)
