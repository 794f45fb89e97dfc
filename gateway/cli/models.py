"""`gateway models`, and its action `inspect`: what the engine would do with a checkpoint.

A process of its own inspects the checkpoint, because that needs torch.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import msgspec
from rich.table import Table

from backends.contract import Capabilities
from backends.recipe.options import DTypeName, Pooling, Task
from backends.torch import wire
from backends.torch.kind import ENGINE
from gateway.cli.check import show_problems
from gateway.cli.model_registry import add_registry_actions, model_registry
from gateway.cli.output import show_line, show_table
from gateway.config.load import load_config
from gateway.config.local_files import resolve_model
from gateway.config.problems import ConfigError
from gateway.config.yaml_parser import format_yaml
from gateway.processes.engine_process import child_environment, model_boots
from gateway.prompts import Role, prompt_of

MODULE = "backends.torch.load.inspection"
NO_ENGINE = (
    "the built-in engine is not installed: it needs torch and transformers. `make install` installs them; "
    "see requirements/torch.txt"
)
NONE = "–"
# Start of a note of the inspection that configured prompts answer.
NO_PROMPTS = "the checkpoint brings no prompts"
ROLES: dict[Role, str] = {"query": "queries", "document": "documents"}


class CannotInspect(Exception):
    """The command line names nothing to inspect, or the inspection did not end; the message says why."""


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
        "--timeout", type=float, default=300.0, metavar="S", help="timeout of the inspection (default: 300)"
    )
    inspect.add_argument("--json", action="store_true", help="for scripts")
    add_registry_actions(actions)


def models(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run one action; return 1 if the engine would not load the inspected checkpoint, or the action fails."""
    if options.action != "inspect":
        return model_registry(options, environment)
    try:
        boot, prompts = _boot(options, environment)
        inspection = _inspect(boot, options.timeout, environment)
    except ConfigError as error:
        show_problems(options.config, error)
        return 1
    except CannotInspect as error:
        show_line(str(error))
        return 1
    if options.json:
        print(msgspec.json.encode(inspection).decode())
    else:
        show_table(_table(inspection, prompts))
        if inspection.refusal is None and options.config is None:
            print(f"\n{_snippet(boot)}", end="")
    return 0 if inspection.refusal is None else 1


def _boot(
    options: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[wire.ModelBoot, dict[str, str]]:
    """Return the settings of the model that the options describe, and its configured prompts.

    Raises: CannotInspect, ConfigError.
    """
    if options.config is None:
        boot = wire.ModelBoot(
            name=_upstream_name(options.model),
            model=resolve_model(options.model, Path.cwd()),
            revision=options.revision,
            dtype=options.dtype,
            task=options.task,
            pooling=options.pooling,
            adapter=options.adapter,
            trust_remote_code=options.trust_remote_code,
            code_revision=options.code_revision,
        )
        return boot, {}
    upstreams = load_config(options.config, environment).upstreams
    engines = {name: settings for name, settings in upstreams.items() if settings.is_local}
    if options.model not in engines:
        known = ", ".join(engines) or "none"
        raise CannotInspect(f"{options.config} has no torch upstream {options.model!r}; it has: {known}")
    return model_boots(engines)[options.model], engines[options.model].prompts


def _upstream_name(model: str) -> str:
    """Return a name for an upstream of this model."""
    name = re.sub(r"[^a-z0-9]+", "-", model.rstrip("/").rpartition("/")[2].lower()).strip("-")
    return name or "model"


def _inspect(boot: wire.ModelBoot, timeout_s: float, environment: Mapping[str, str]) -> wire.Inspection:
    """Run the inspection in a process of its own. Raises: CannotInspect."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise CannotInspect(NO_ENGINE)
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", MODULE],
            input=msgspec.json.encode(boot),
            capture_output=True,
            timeout=timeout_s,
            env=child_environment(environment),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotInspect(f"no result within {timeout_s:.0f} s; give more with --timeout") from error
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").splitlines() or [f"exit status {ended.returncode}"]
        raise CannotInspect(f"the inspection failed: {lines[-1]}")
    return msgspec.json.decode(ended.stdout, type=wire.Inspection)


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
    settings = {
        "backend": ENGINE.name,
        "model": boot.model,
        "revision": boot.revision,
        "dtype": boot.dtype,
        "task": boot.task,
        "pooling": boot.pooling,
        "adapter": boot.adapter,
        "trust_remote_code": boot.trust_remote_code or None,
        "code_revision": boot.code_revision,
    }
    upstream = {name: value for name, value in settings.items() if value is not None}
    return format_yaml({"upstreams": {boot.name: upstream}, "models": {boot.name: {"upstream": boot.name}}})
