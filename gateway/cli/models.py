"""`gateway models`: the models of this host, and what the engine would do with a checkpoint.

A process of its own inspects or loads a checkpoint, because that needs torch.
"""

import argparse
import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from backends.contract import Capabilities
from backends.recipe.options import DTypeName, Pooling, Task
from backends.torch import wire
from backends.torch.kind import ENGINE
from gateway.audit.records import AuditRecord, command_actor, new_record
from gateway.audit.trail import AuditTrail
from gateway.cli.context import MEMORY, TIMEOUT_S
from gateway.cli.operator_options import add_json_option, seconds
from gateway.cli.output import NONE, print_json, print_result, show_line, show_problems, show_table
from gateway.config.load import load_config
from gateway.config.local_files import resolve_model
from gateway.config.problems import ConfigError
from gateway.config.schema import AuditSettings, RegistrySettings, UpstreamSettings
from gateway.config.state_folder import state_folder
from gateway.config.yaml_parser import format_yaml
from gateway.declared.checkpoints import (
    ListedModel,
    Records,
    Registry,
    RegistryBusy,
    RegistryError,
    Report,
    used_models,
)
from gateway.declared.host import CheckpointRecord
from gateway.processes.engine_process import NoResult, model_boots, run_on_model
from gateway.processes.model_requests import smoke_load
from gateway.prompts import Role, prompt_of
from gateway.store.redis_client import RedisClient

MODULE = "backends.torch.load.inspection"
DEFAULT_CONFIG = Path("router.yaml")
NO_FOLDER = "the registry keeps its file in a folder, and none is known; set `state_dir`"
# Share of a download between two lines, where the output is no terminal.
LINE_STEP = 0.1
# Start of a note of the inspection that configured prompts answer.
NO_PROMPTS = "the checkpoint brings no prompts"
# Options of an inspection that are settings of an upstream.
STATED = ("revision", "dtype", "task", "pooling", "adapter", "trust_remote_code", "code_revision")
ROLES: dict[Role, str] = {"query": "queries", "document": "documents"}


class NothingToInspect(Exception):
    """The command line names nothing to inspect; the message says why."""


def add_models_options(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `gateway models` and their options to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    text = "show kind, pooling, prompts, lengths and memory, or why the engine refuses it"
    inspect = actions.add_parser("inspect", help=text, description=text)
    inspect.add_argument("model", help="hub id, path of a folder, or with -c the name of an upstream")
    inspect.add_argument(
        "-c", "--config", type=Path, metavar="FILE", help="the configuration of the upstream"
    )
    inspect.add_argument("--task", choices=get_args(Task), help="as `task` of an upstream")
    inspect.add_argument("--pooling", choices=get_args(Pooling), help="as `pooling` of an upstream")
    inspect.add_argument("--adapter", metavar="NAME", help="as `adapter` of an upstream")
    inspect.add_argument("--dtype", choices=get_args(DTypeName), help="as `dtype`")
    inspect.add_argument("--revision", metavar="REVISION", help="branch, tag or commit at the Hub")
    inspect.add_argument("--trust-remote-code", action="store_true", help="code of the checkpoint may run")
    inspect.add_argument("--code-revision", metavar="COMMIT", help="commit of code in another repository")
    inspect.add_argument(
        "--timeout", type=seconds, default=300.0, metavar="S", help="timeout of the inspection (default: 300)"
    )
    add_json_option(inspect)
    _add_registry_actions(actions)


def run_models(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run one action; return 1 if the engine would not load the inspected checkpoint, or the action fails."""
    if options.action != "inspect":
        return _run_on_registry(options, environment)
    try:
        boot, prompts = _boot(options, environment)
        inspection = run_on_model(MODULE, boot, wire.Inspection, options.timeout, environment)
    except ConfigError as error:
        show_problems(options.config, error)
        return 1
    except (NothingToInspect, NoResult) as error:
        show_line(str(error))
        return 1
    if options.json:
        print_json(inspection)
    else:
        show_table(_table(inspection, prompts))
        if inspection.refusal is None and options.config is None:
            print(f"\n{_snippet(boot)}", end="")
    return 0 if inspection.refusal is None else 1


def _boot(
    options: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[wire.ModelBoot, dict[str, str]]:
    """Return the settings of the model that the options describe, and its configured prompts.

    Raises: NothingToInspect, ConfigError.
    """
    if options.config is None:
        stated: dict[str, Any] = {name: getattr(options, name) for name in STATED}
        model = resolve_model(options.model, Path.cwd())
        boot = wire.ModelBoot(name=_upstream_name(options.model), model=model, **stated)
        return boot, {}
    upstreams = load_config(options.config, environment).upstreams
    engines = {name: settings for name, settings in upstreams.items() if settings.is_local}
    if options.model not in engines:
        known = ", ".join(engines) or "none"
        raise NothingToInspect(f"{options.config} has no torch upstream {options.model!r}; it has: {known}")
    return model_boots(engines)[options.model], engines[options.model].prompts


def _upstream_name(model: str) -> str:
    """Return a name for an upstream of this model."""
    name = re.sub(r"[^a-z0-9]+", "-", model.rstrip("/").rpartition("/")[2].lower()).strip("-")
    return name or "model"


def _table(inspection: wire.Inspection, prompts: Mapping[str, str]) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _rows(inspection, prompts):
        table.add_row(name, value)
    return table


def _rows(inspection: wire.Inspection, prompts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "model", inspection.model
    yield "state", "served" if inspection.refusal is None else f"refused: {inspection.refusal}"
    if inspection.checkpoint is not None:
        yield "files", inspection.checkpoint
        yield "architecture", ", ".join(inspection.architectures) or NONE
    if inspection.capabilities is None:
        return
    yield "kind", inspection.kind or NONE
    yield from _capability_rows(inspection)
    yield from _prompt_rows(inspection.capabilities, prompts)
    yield "packed", {True: "yes", False: "no", None: "known after the load"}[inspection.packed]
    yield "weights", _weights_text(inspection.weights)
    for note in inspection.notes:
        if not (prompts and note.startswith(NO_PROMPTS)):
            yield "note", note


def _capability_rows(inspection: wire.Inspection) -> Iterator[tuple[str, str]]:
    found = inspection.capabilities
    assert found is not None
    yield "operations", ", ".join(sorted(found.operations))
    yield "outputs", ", ".join(sorted(found.outputs)) or NONE
    yield "pooling", found.pooling or NONE
    yield "dimensions", NONE if found.dimensions is None else str(found.dimensions)
    yield "maximum tokens", str(found.max_input_tokens)
    yield "labels", ", ".join(found.labels) or NONE
    if inspection.template is not None:
        yield "template", msgspec.json.encode(inspection.template).decode()
    yield "number format", found.dtype or NONE


def _prompt_rows(found: Capabilities, configured: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each prompt, and those of queries and documents. configured: they take precedence."""
    prompts = {**found.prompts, **configured}
    for name, text in prompts.items():
        origin = " (configured)" if name in configured else ""
        default = " (default)" if name == found.default_prompt else ""
        yield f"prompt {name}{origin}{default}", msgspec.json.encode(text).decode()
    for role, inputs in ROLES.items() if prompts else ():
        chosen = prompt_of(role, configured, found.prompts)
        yield f"prompt of {inputs}", NONE if chosen is None else chosen


def _weights_text(weights: wire.WeightSizes) -> str:
    if weights.file_bytes is None:
        return "sizes unknown"
    text = f"{weights.file_bytes / 1e6:,.0f} MB of files"
    if weights.elements is None or weights.memory_bytes is None:
        return text
    memory = f"about {weights.memory_bytes / 1e6:,.0f} MB in memory"
    return f"{weights.elements / 1e6:,.0f} million parameters, {text}, {memory}"


def _snippet(boot: wire.ModelBoot) -> str:
    """Return the lines of router.yaml that serve the model as it was inspected."""
    stated = {name: getattr(boot, name) for name in STATED}
    settings = {"backend": ENGINE.name, "model": boot.model, **stated}
    settings["trust_remote_code"] = boot.trust_remote_code or None
    upstream = {name: value for name, value in settings.items() if value is not None}
    return format_yaml({"upstreams": {boot.name: upstream}, "models": {boot.name: {"upstream": boot.name}}})


def _add_registry_actions(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the actions and their options to the parser of `gateway models`."""
    listing = _with_config(actions.add_parser("list", help="models of the configuration and of the cache"))
    text = "download a model, as far as it is missing"
    pull = _with_config(actions.add_parser("pull", help=text, description=text))
    pull.add_argument("model", help="hub id")
    pull.add_argument("--revision", metavar="REVISION", help="branch, tag or commit at the Hub")
    pull.add_argument("--verify", action="store_true", help="check it afterwards")
    text = "compare a model's files with their hashes, load it, and compute one text"
    verify = _with_config(actions.add_parser("verify", help=text, description=text))
    verify.add_argument("model", help="hub id")
    for parser in (pull, verify):
        parser.add_argument(
            "--timeout", type=seconds, default=600.0, metavar="S", help="of the load (default: 600)"
        )
    text = "remove a model from the cache; refused while an upstream of the configuration uses it"
    remove = _with_config(actions.add_parser("rm", help=text, description=text))
    remove.add_argument("model", help="hub id")
    for parser in (listing, pull, verify, remove):
        add_json_option(parser)


def _with_config(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        metavar="FILE",
        help="the configuration (default: router.yaml, if there is one)",
    )
    return parser


def _run_on_registry(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run one action; return the exit status."""
    try:
        registry, record = _registry(options.config, environment)
        match options.action:
            case "list":
                _list(registry.models(), as_json=options.json)
            case "pull":
                _pull(registry, options, environment)
                record("download", options.model)
            case "verify":
                found = _verified(registry, options, environment)
                record("load", options.model)
                print_result(found, _words_of(options.model, found), as_json=options.json)
            case "rm":
                size = registry.remove(options.model)
                record("remove", options.model)
                fields = {"removed": options.model, "bytes": size}
                print_result(fields, f"removed {options.model}: {_megabytes(size)}", as_json=options.json)
    except ConfigError as error:
        show_problems(options.config or DEFAULT_CONFIG, error)
        return 1
    except (RegistryError, RegistryBusy, OSError) as error:
        show_line(str(error))
        return 1
    return 0


def _registry(
    path: Path | None, environment: Mapping[str, str]
) -> tuple[Registry, Callable[[str, str], None]]:
    """Return the registry of a configuration, if there is one, and what records an action on a model.

    Raises: ConfigError, RegistryError.
    """
    settings, state_dir = RegistrySettings(), None
    audit, store = AuditSettings(), MEMORY
    upstreams: Mapping[str, UpstreamSettings] = {}
    if path is not None or DEFAULT_CONFIG.is_file():
        config = load_config(path or DEFAULT_CONFIG, environment)
        settings, state_dir = config.registry, config.state_dir
        audit, store = config.audit, config.quotas.store
        upstreams = config.upstreams
    folder = state_folder(state_dir, environment)
    if folder is None:
        raise RegistryError(NO_FOLDER)

    def record(action: str, model: str) -> None:
        made = new_record(command_actor(), action, f"checkpoint/{model}")
        asyncio.run(_record(store, folder, audit, made))

    return Registry(Records(folder), used_models(upstreams), settings.disk_bytes), record


async def _record(store: str, folder: Path, audit: AuditSettings, record: AuditRecord) -> None:
    """Write a record into Redis, or into a file until Redis answers."""
    trail = AuditTrail(
        None if store == MEMORY else RedisClient(store, TIMEOUT_S), folder, audit, lambda _: None
    )
    try:
        await trail.record(record)
    finally:
        await trail.aclose()


def _list(models: list[ListedModel], *, as_json: bool) -> None:
    if as_json:
        print_json(models)
        return
    if not models:
        show_line("no models: the cache is empty, and the configuration names none for the built-in engine")
        return
    table = Table(box=None)
    for name in ("model", "state", "size", "last used", "upstreams", "note"):
        table.add_column(name)
    for model in models:
        used = NONE if model.used_s is None else f"{datetime.fromtimestamp(model.used_s, UTC):%Y-%m-%d}"
        table.add_row(
            model.model,
            model.state,
            _megabytes(size) if (size := model.stored_bytes or model.packaged_bytes) else NONE,
            used,
            ", ".join(model.configured) or NONE,
            _note_of(model),
        )
    show_table(table)


def _note_of(model: ListedModel) -> str:
    record = model.record or CheckpointRecord(model.state)
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
    found = _verified(registry, options, environment) if options.verify else None
    text = "" if found is None else f"\n{_words_of(options.model, found)}"
    fields = {"model": options.model, "folder": str(folder), "verified": found}
    print_result(fields, f"{folder}{text}", as_json=options.json)


def _verified(
    registry: Registry, options: argparse.Namespace, environment: Mapping[str, str]
) -> wire.SmokeLoad:
    def load(model: str, commit: str | None) -> wire.SmokeLoad:
        return smoke_load(wire.ModelBoot("model", model, commit), options.timeout, environment)

    return registry.verify(options.model, load)


def _words_of(model: str, found: wire.SmokeLoad) -> str:
    width = "" if found.dimensions is None else f", {found.dimensions} dimensions"
    return f"{model} is verified: {', '.join(found.operations)}{width}, loaded in {found.load_s} s"


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
