"""`gateway serve`: load the config, create the first key if there is none, start, and print the banner."""

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway import __version__
from gateway.cli.first_key import (
    FirstKey,
    KeySources,
    create_first_key_later,
    first_key,
    key_sources,
    log_open_admin,
    warn_of_missing_keys,
    warn_of_missing_operator_key,
)
from gateway.cli.named_models import UnusableModel, add_server_key_option, config_of, server_key
from gateway.cli.operator_options import add_config_option
from gateway.cli.output import CleanConsole, show_line, show_problems, write_document
from gateway.config.boot import AppBoot, MetricNames
from gateway.config.host_users import people
from gateway.config.load import load_config
from gateway.config.notes import keyless_notes
from gateway.config.problems import ConfigError, count_of
from gateway.config.schema import Config, Logs
from gateway.config.state_folder import JOBS_FILE, folder_warning
from gateway.events import GatewayReady, ModelSummary
from gateway.processes.config_applier import ConfigSource
from gateway.processes.messages import WorkerReady
from gateway.processes.supervisor import StartError, Supervisor
from gateway.store.errors import StoreUnavailable
from gateway.telemetry.access_log import log_change
from gateway.telemetry.log_lines import is_text, write_lines
from gateway.tenants.file_store import FileTenantStore

logger = logging.getLogger("gateway")

SEMCONV_VARIABLE = "OTEL_SEMCONV_STABILITY_OPT_IN"
METRIC_NAMES: dict[str, MetricNames] = {
    "gen_ai_latest_experimental": "latest",
    "gen_ai/v1.41": "v1.41",
    "gen_ai/dup": "both",
}
# Where a gateway without a file listens.
HOST, PORT = "127.0.0.1", 8080


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `serve` to its parser."""
    add_config_option(parser)
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL|URL",
        help="hub id or folder for the built-in engine, or address of a TEI, vLLM, Infinity or OpenAI-like "
        "server; without any, the configuration is a file",
    )
    parser.add_argument("--host", help="address to listen on, with MODEL|URL (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on, with MODEL|URL (default: 8080)")
    parser.add_argument(
        "--print-config", action="store_true", help="with MODEL|URL: print the router.yaml, and start nothing"
    )
    add_server_key_option(parser)


def run_serve(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Serve a file, or the models that are named; return 1 if the gateway cannot start."""
    errors = CleanConsole(stderr=True, soft_wrap=True, highlight=False)
    if not options.models:
        if options.host or options.port is not None or options.print_config or options.upstream_key_env:
            errors.print(
                "--host, --port, --print-config and --upstream-key-env need MODEL|URL; a file has `listen` "
                "and `api_key`"
            )
            return 2
        if not options.config.exists():
            _report_failure(
                Logs(),
                f"{options.config}: there is no such file; write one with `gateway init`, "
                "or name a model: gateway serve BAAI/bge-m3",
            )
            return 1
        return serve(options.config, environment)
    host = f"[{options.host}]" if ":" in (options.host or "") else options.host
    try:
        listen = f"{host or HOST}:{PORT if options.port is None else options.port}"
        text = config_of(options.models, listen, key=server_key(options, environment))
    except UnusableModel as error:
        _report_failure(Logs(), f"cannot serve {error}")
        return 1
    if options.print_config:
        write_document(text)
        return 0
    with tempfile.TemporaryDirectory(prefix="gateway-") as folder:
        path = Path(folder) / "router.yaml"
        path.write_text(text)
        return serve(path, environment)


def serve(path: Path, environment: Mapping[str, str]) -> int:
    """Run the gateway until it is stopped; return 1 if it cannot start."""
    try:
        config = load_config(path, environment)
    except ConfigError as error:
        _report_problems(path, error)
        return 1
    write_lines(config.logs)
    try:
        sources = key_sources(config, environment, is_terminal=sys.stdout.isatty())
    except ValueError as error:
        _report_failure(config.logs, f"cannot start: {error}")
        return 1
    _make_tenants_folder(config, sources)
    if sources.file is not None and (warning := folder_warning(sources.file.parent)):
        logger.warning("%s", warning)
    key = first_key(config, sources)
    found = people()
    log_open_admin(config, found)
    for note in keyless_notes(config):
        logger.warning("%s", note)
    if key is None:
        warn_of_missing_operator_key(config, found)
        warn_of_missing_keys(config, sources)
    try:
        asyncio.run(
            _run(config, ConfigSource(path, environment), key, sources, is_shared_host=len(found) > 1)
        )
    except StartError as error:
        _report_failure(config.logs, f"cannot start: {error}")
        return 1
    return 0


def _report_failure(logs: Logs, text: str) -> None:
    """Print why the gateway does not start; where its lines are JSON, as one of them."""
    if is_text(logs):
        show_line(text)
    else:
        write_lines(logs)
        logger.error("%s", text)


def _report_problems(path: Path, error: ConfigError) -> None:
    """Print the problems of a file, of which the settings of `logs` are not known."""
    if is_text(Logs()):
        show_problems(path, error)
        return
    write_lines(Logs())
    logger.error("cannot start: %s has %s", path, count_of(error.problems, "problem"))
    for problem in error.problems:
        logger.error("%s", problem)


def _make_tenants_folder(config: Config, sources: KeySources) -> None:
    """Make the folder in which commands find the keys and tenants of a gateway without Redis."""
    if config.quotas.store != "memory" or sources.tenants_file is None:
        return
    try:
        FileTenantStore(sources.tenants_file).make_folder()
    except StoreUnavailable as error:
        logger.warning("keys and tenants can be changed in router.yaml only: %s", error)


async def _run(
    config: Config, source: ConfigSource, key: FirstKey | None, sources: KeySources, *, is_shared_host: bool
) -> None:
    def show_progress(detail: str) -> None:
        # A line of its own, on a terminal too: lines of other processes would break into a spinner.
        logger.info("%s", detail)

    def on_ready(report: WorkerReady, address: str) -> None:
        # rich exits on a closed pipe, but the gateway serves even if its banner cannot be written.
        with suppress(BrokenPipeError, SystemExit):
            if sys.stdout.isatty() or is_text(config.logs):
                show_banner(report.models, address, config.admin.listen, key)
            else:
                url = _reachable(address)
                note = _note_on_key(key)
                log_change(
                    GatewayReady(
                        url, f"{url}/docs", _console(address, config.admin.listen), note, report.models
                    )
                )

    boot = AppBoot(
        config,
        metric_names=metric_names(source.environment),
        is_shared_host=is_shared_host,
        first_key_digest=key.digest if key else None,
        first_key_waits=key is not None and key.waits,
        first_key_is_kept=key is not None and key.is_kept,
        tenants_file=None if sources.tenants_file is None else str(sources.tenants_file),
        jobs_file=None if sources.tenants_file is None else str(sources.tenants_file.with_name(JOBS_FILE)),
    )
    show_progress("starting")
    async with _creating_missing_key(config, key, sources):
        await Supervisor(boot, source, show_progress, on_ready).run()


def metric_names(environment: Mapping[str, str]) -> MetricNames:
    """Return which names of GenAI metrics the environment asks for; an unknown request is logged.

    The variable is OpenTelemetry's own list for the transition between conventions of any category.
    """
    found: MetricNames = "latest"
    for entry in map(str.strip, environment.get(SEMCONV_VARIABLE, "").split(",")):
        if entry in METRIC_NAMES:
            found = METRIC_NAMES[entry]
        elif entry.startswith("gen_ai"):
            known = ", ".join(METRIC_NAMES)
            logger.warning("%s has %r, which is none of: %s", SEMCONV_VARIABLE, entry, known)
    return found


@asynccontextmanager
async def _creating_missing_key(
    config: Config, key: FirstKey | None, sources: KeySources
) -> AsyncIterator[None]:
    """Create the first key meanwhile, if it could not be created at start."""
    if key is None or key.digest:
        yield
        return
    task = asyncio.create_task(create_first_key_later(config.quotas.store, sources))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def show_banner(
    models: Sequence[ModelSummary], address: str, admin_listen: str | None, first_key: FirstKey | None
) -> None:
    """Print the banner. address: base URL of the listener. admin_listen: of the operators' own, if any."""
    url = _reachable(address)
    # A pipe has no width to fit into.
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(f"\n  [bold]Embedding gateway[/] {__version__}   [cyan]{url}[/]   docs at {url}/docs\n")
    console.print(_models_table(models))
    console.print()
    key = "$KEY" if first_key is None else first_key.shell_word
    console.print(f"  [bold]key[/]      {escape(_note_on_key(first_key))}")
    console.print(f"  [bold]console[/]  {_console(address, admin_listen)}")
    # Printed without rich, which would interpret the brackets as markup.
    print(f'\n  OpenAI(base_url="{url}/v1", api_key="<the key>")   # Python: from openai import OpenAI')
    print(_curl_command(models, url, key), flush=True)


def _reachable(address: str) -> str:
    """Return a base URL that works from here: by loopback, if the address means every interface."""
    return address.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")


def _console(address: str, admin_listen: str | None) -> str:
    """Return the URL of the console. admin_listen: of the operators' own listener, if any."""
    scheme = address.partition("//")[0]
    return f"{_reachable(address if admin_listen is None else f'{scheme}//{admin_listen}')}/ui"


def _note_on_key(first_key: FirstKey | None) -> str:
    if first_key is None:
        return "a tenant's key, in router.yaml or created by `gateway keys create`"
    when = ", once Redis is available, if it contains no tenants" if first_key.waits else ""
    return first_key.note + when


def _models_table(models: Sequence[ModelSummary]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    for model in models:
        facts = [
            model.backend,
            model.dtype or "",
            f"{model.dimensions} dimensions" if model.dimensions else "",
            f"{model.max_input_tokens} tokens" if model.max_input_tokens else "",
        ]
        operations = " ".join(model.operations) or "[red]not reached yet[/]"
        table.add_row(f"  [bold]{model.name}[/]", operations, ", ".join(filter(None, facts)))
    return table


def _curl_command(models: Sequence[ModelSummary], url: str, key: str) -> str:
    embedders = [model.name for model in models if "embed" in model.operations]
    header = f'-H "Authorization: Bearer {key}" -H "Content-Type: application/json"'
    if not embedders:
        return f"\n  curl {url}/v1/models {header}\n"
    body = f'{{"model": "{embedders[0]}", "input": "Hello, world"}}'
    return f"\n  curl {url}/v1/embeddings {header} -d '{body}'\n"
