"""`gateway models list|pull|verify|rm`: the models of this host."""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from backends.torch import wire
from gateway.cli.check import show_problems
from gateway.cli.output import show_line, show_table
from gateway.config.load import load_config
from gateway.config.problems import ConfigError
from gateway.config.schema import RegistrySettings, UpstreamSettings
from gateway.config.state_folder import state_folder
from gateway.processes.engine_process import smoke_load
from gateway.registry.models import ListedModel, Registry, RegistryError, Report, used_models
from gateway.registry.records import Record, Records, RegistryBusy

DEFAULT_CONFIG = Path("router.yaml")
NO_FOLDER = "the registry keeps its file in a folder, and none is known; set `state_dir`"
# Share of a download between two lines, where the output is no terminal.
LINE_STEP = 0.1


def add_registry_actions(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the actions and their options to the parser of `gateway models`."""
    listing = _with_config(actions.add_parser("list", help="models of the configuration and of the cache"))
    listing.add_argument("--json", action="store_true", help="for scripts")
    text = "download a model, as far as it is missing"
    pull = _with_config(actions.add_parser("pull", help=text, description=text))
    pull.add_argument("model", help="hub id")
    pull.add_argument("--revision", metavar="REVISION", help="branch, tag or commit at the Hub")
    pull.add_argument("--verify", action="store_true", help="check it afterwards")
    text = "compare a model's files with their hashes, load it, and compute one text"
    verify = _with_config(actions.add_parser("verify", help=text, description=text))
    verify.add_argument("model", help="hub id")
    verify.add_argument("--json", action="store_true", help="for scripts")
    for parser in (pull, verify):
        parser.add_argument(
            "--timeout", type=float, default=600.0, metavar="S", help="of the load (default: 600)"
        )
    text = "remove a model from the cache; refused while an upstream of the configuration uses it"
    remove = _with_config(actions.add_parser("rm", help=text, description=text))
    remove.add_argument("model", help="hub id")


def _with_config(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        metavar="FILE",
        help="the configuration (default: router.yaml, if there is one)",
    )
    return parser


def model_registry(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run one action; return the exit status."""
    try:
        registry = _registry(options.config, environment)
        match options.action:
            case "list":
                _list(registry.models(), as_json=options.json)
            case "pull":
                _pull(registry, options, environment)
            case "verify":
                _verify(registry, options, environment)
            case "rm":
                size = registry.remove(options.model)
                print(f"removed {options.model}: {_megabytes(size)}")
    except ConfigError as error:
        show_problems(options.config or DEFAULT_CONFIG, error)
        return 1
    except (RegistryError, RegistryBusy, OSError) as error:
        show_line(str(error))
        return 1
    return 0


def _registry(path: Path | None, environment: Mapping[str, str]) -> Registry:
    """Return the registry of a configuration, if there is one. Raises: ConfigError, RegistryError."""
    settings, state_dir = RegistrySettings(), None
    upstreams: Mapping[str, UpstreamSettings] = {}
    if path is not None or DEFAULT_CONFIG.is_file():
        config = load_config(path or DEFAULT_CONFIG, environment)
        settings, state_dir = config.registry, config.state_dir
        upstreams = config.upstreams
    folder = state_folder(state_dir, environment)
    if folder is None:
        raise RegistryError(NO_FOLDER)
    return Registry(Records(folder), used_models(upstreams), settings.disk_bytes)


def _list(models: list[ListedModel], *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(models).decode())
        return
    if not models:
        show_line("no models: the cache is empty, and the configuration names none for the built-in engine")
        return
    table = Table(box=None)
    for name in ("model", "state", "size", "last used", "upstreams", "note"):
        table.add_column(name)
    for model in models:
        used = "–" if model.used_s is None else f"{datetime.fromtimestamp(model.used_s, UTC):%Y-%m-%d}"
        table.add_row(
            model.model,
            model.state,
            _megabytes(size) if (size := model.stored_bytes or model.packaged_bytes) else "–",
            used,
            ", ".join(model.configured) or "–",
            _note_of(model),
        )
    show_table(table)


def _note_of(model: ListedModel) -> str:
    record = model.record or Record(model.state)
    if record.error is not None and model.state == "failed":
        return record.error
    if model.state == "downloading" and record.done_bytes is not None:
        return f"{_megabytes(record.done_bytes)} so far"
    if model.state == "verified" and record.load_s is not None:
        width = "" if record.dimensions is None else f", {record.dimensions} dimensions"
        return f"loaded in {record.load_s:.1f} s{width}"
    return "in an installed package, not in the cache" if model.packaged_bytes else ""


def _pull(registry: Registry, options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    with _progress(options.model) as report:
        folder = registry.pull(options.model, options.revision, report)
    print(folder)
    if options.verify:
        _verify(registry, options, environment)


def _verify(registry: Registry, options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    def load(model: str, commit: str | None) -> wire.SmokeLoad:
        return smoke_load(wire.ModelBoot("model", model, commit), options.timeout, environment)

    found = registry.verify(options.model, load)
    if getattr(options, "json", False):
        print(msgspec.json.encode(found).decode())
        return
    width = "" if found.dimensions is None else f", {found.dimensions} dimensions"
    print(f"{options.model} is verified: {', '.join(found.operations)}{width}, loaded in {found.load_s} s")


@contextmanager
def _progress(model: str) -> Iterator[Report]:
    """Return a reporter that draws a bar on a terminal, and prints lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _LineReport(model)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(model, total=None)
        yield lambda done, total, _: bar.update(task, completed=done, total=total)


class _LineReport:
    """Reporter that prints a line for every tenth of a download."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._next = 0.0

    def __call__(self, done: int, total: int | None, rate: float) -> None:
        share = done / total if total else 0.0
        if share >= self._next:
            self._next = share + LINE_STEP
            of_all = "" if total is None else f" of {_megabytes(total)}"
            show_line(f"{self._model}: {_megabytes(done)}{of_all}, {rate / 1e6:.1f} MB/s")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
