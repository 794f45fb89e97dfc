"""`gateway bench`: a load on any URL, with percentiles and a picture."""

import argparse
import asyncio
import signal
import ssl
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import httpx
from rich.markup import escape
from rich.table import Table

from gateway.cli.bench_load import (
    SHARES,
    Api,
    Arrivals,
    Load,
    LoadPlan,
    Measured,
    bodies,
    made_texts,
    only_model,
    open_client,
    target_of,
)
from gateway.cli.bench_picture import draw
from gateway.cli.gateway_client import RequestRefused
from gateway.cli.operator_options import add_key_options, find_gateway, operator_key
from gateway.cli.output import print_json, show_line, show_problems, show_table
from gateway.cli.printable import printable
from gateway.config.problems import ConfigError

SECONDS_MAX = 3600
FILE_BYTES_MAX = 64 * 1024 * 1024
# Above these the figures may be those of the generator and not of the server.
BUSY_CORES = 0.8
LATE_S = 0.01


class UnusableOptions(Exception):
    """The command line asks for what cannot be done. The message is for a person."""


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gateway bench`."""
    add = parser.add_argument
    text = "the server, such as http://127.0.0.1:8080; a path such as /embed chooses its API"
    add("server", nargs="?", metavar="URL", help=f"{text} (default: as --url)")
    add_key_options(parser)
    add("--api", choices=get_args(Api), help="API of the calls (default: by the path, else openai)")
    add("--model", help="model of the calls (default: the first that the server lists)")
    add("--callers", type=int, metavar="N", help="callers that wait for each reply (default: 1)")
    add("--rate", type=float, metavar="R", help="calls per second, whether or not the server keeps up")
    add("--arrivals", choices=get_args(Arrivals), default="poisson", help="times of the calls with --rate")
    add("--seconds", type=float, default=10.0, metavar="S", help="measured time (default: 10)")
    add("--warmup", type=float, default=2.0, metavar="S", help="time before it (default: 2)")
    add("--texts", type=int, default=1, metavar="N", help="texts or documents of a call (default: 1)")
    add("--words", type=int, default=32, metavar="N", help="words of a text on average (default: 32)")
    add("--file", type=Path, help="texts to send instead, one on each line")
    add("--timeout", type=float, default=30.0, metavar="S", help="of one call (default: 30)")
    add("--picture", type=Path, metavar="FILE", help="write latencies over time and by percentile as SVG")
    add("--json", action="store_true", help="print the figures as JSON")


def run_bench(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run a load and print its figures; return 1 if no call succeeded."""
    url = ""
    try:
        url, key = _server_of(options, environment)
        plan = plan_of(options, url)
        texts = texts_of(options)
        measured, model = asyncio.run(_run(plan, options, texts, key))
    except ConfigError as error:
        show_problems(options.config, error)
        return 1
    except (UnusableOptions, RequestRefused) as error:
        show_line(str(error))
        return 1
    except (httpx.HTTPError, OSError, ssl.SSLError) as error:
        show_line(f"{url}: {str(error) or type(error).__name__}")
        return 1
    summary = summary_of(plan, model, measured)
    if options.json:
        print_json(summary)
    else:
        show_summary(summary)
    if options.picture is not None:
        title = f"{plan.target.path} · {summary['load']}"
        try:
            options.picture.write_text(draw(measured.figures, title), encoding="utf-8")
        except OSError as error:
            show_line(f"{options.picture}: {error.strerror or error}")
            return 1
    return 0 if measured.figures.good else 1


def _server_of(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the address of a server, and its key. Raises: UnusableOptions, RequestRefused, ConfigError."""
    if options.server is None:
        found = find_gateway(options, environment, for_operators=False)
        return found.url, found.key
    if options.url is not None:
        raise UnusableOptions("name the server once: as URL, or with --url")
    return options.server, operator_key(options.key_file, environment)


def plan_of(options: argparse.Namespace, url: str) -> LoadPlan:
    """Return the plan of a command line. url: of the server. Raises: UnusableOptions."""
    if options.rate is not None and options.callers is not None:
        raise UnusableOptions("--rate and --callers exclude each other: calls at their times, or callers")
    bounds = {
        "--seconds": (options.seconds, SECONDS_MAX),
        "--timeout": (options.timeout, SECONDS_MAX),
        "--rate": (1.0 if options.rate is None else options.rate, 100_000),
        "--callers": (1 if options.callers is None else options.callers, 1024),
        "--texts": (options.texts, 10_000),
        "--words": (options.words, 100_000),
    }
    for name, (value, most) in bounds.items():
        if not 0 < value <= most:
            raise UnusableOptions(f"{name}: more than 0 and at most {most}, not {value:g}")
    if not 0 <= options.warmup <= SECONDS_MAX:
        raise UnusableOptions(f"--warmup: from 0 to {SECONDS_MAX}, not {options.warmup:g}")
    try:
        target = target_of(url, options.api)
    except ValueError as error:
        raise UnusableOptions(f"{url.rpartition('@')[2]} {error}") from error
    return LoadPlan(
        target,
        options.seconds,
        options.warmup,
        options.texts,
        options.timeout,
        options.callers or 1,
        options.rate,
        options.arrivals,
    )


def texts_of(options: argparse.Namespace) -> Sequence[str]:
    """Return the texts that are sent. Raises: UnusableOptions."""
    if options.file is None:
        return made_texts(options.words)
    try:
        with options.file.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        texts = [line.strip() for line in content.decode().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableOptions(f"{options.file} cannot be read: {error}") from error
    if len(content) > FILE_BYTES_MAX:
        raise UnusableOptions(f"{options.file} has more than {FILE_BYTES_MAX} bytes")
    if not texts:
        raise UnusableOptions(f"{options.file} has no texts")
    return texts


async def _run(
    plan: LoadPlan, options: argparse.Namespace, texts: Sequence[str], key: str | None
) -> tuple[Measured, str | None]:
    async with open_client(key, options.ca, plan.timeout_s) as client:
        try:
            model = options.model or await only_model(client, plan.target)
        except ValueError as error:
            raise UnusableOptions(f"{plan.target.base}: {error}") from error
        load = Load(client, plan, bodies(plan.target, model, texts, plan.texts))
        loop = asyncio.get_running_loop()
        # Ctrl-C ends the load, and what was measured is shown.
        with suppress(NotImplementedError, RuntimeError):
            loop.add_signal_handler(signal.SIGINT, load.stop.set)
        if sys.stderr.isatty():
            show_line(f"{plan.warmup_s:g} s to warm up, then {plan.seconds:g} s; Ctrl-C ends it early")
        return await load.run(), model


def summary_of(plan: LoadPlan, model: str | None, measured: Measured) -> dict[str, Any]:
    """Return the figures of a load, with units in their names."""
    figures, seconds = measured.figures, max(measured.seconds, 1e-9)
    load = f"callers: {plan.callers}" if plan.rate is None else f"{plan.rate:g} calls/s, {plan.arrivals}"
    quantiles = {f"p{share * 100:g}": figures.latencies.quantile_s(share) for share in SHARES}
    latency = {name: None if value is None else round(value * 1000, 3) for name, value in quantiles.items()}
    late_s = figures.late.quantile_s(0.99) or 0.0
    return {
        "url": plan.target.base + plan.target.path,
        "model": model,
        "load": f"{load}, texts in each call: {plan.texts}",
        "seconds": round(measured.seconds, 3),
        "calls": figures.good,
        "failed": sum(figures.statuses.values()) - figures.good,
        "unanswered": figures.unanswered,
        "calls_per_s": round(figures.good / seconds, 2),
        "texts_per_s": round(figures.texts / seconds, 2),
        "tokens_per_s": round(figures.tokens / seconds, 1) if figures.tokens else None,
        "latency_ms": latency | {"max": round(figures.latencies.most_s * 1000, 3)},
        "stages_ms": {name: round(total / figures.good, 3) for name, total in figures.stage_ms.items()}
        if figures.good
        else {},
        "statuses": dict(sorted(figures.statuses.items())),
        "examples": figures.examples,
        "generator": {
            "late_p99_ms": round(late_s * 1000, 3),
            "cores": round(measured.cpu_s / seconds, 2),
            "is_limit": late_s > LATE_S or measured.cpu_s / seconds > BUSY_CORES,
        },
    }


def show_summary(summary: Mapping[str, Any]) -> None:
    """Print the figures as a table, and what may be wrong with them."""
    title = printable(f"{summary['url']}  {summary['model'] or ''}")
    table = Table(title=escape(title), title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("load", f"{summary['load']}, {summary['seconds']:g} s")
    table.add_row("calls/s", f"{summary['calls_per_s']:,.1f}")
    table.add_row("texts/s", f"{summary['texts_per_s']:,.1f}")
    if summary["tokens_per_s"] is not None:
        table.add_row("tokens/s", f"{summary['tokens_per_s']:,.0f}")
    for name, value in summary["latency_ms"].items():
        table.add_row(f"latency {name}, ms", "–" if value is None else f"{value:,.2f}")
    for name, value in summary["stages_ms"].items():
        table.add_row(f"of which {printable(name)}, mean ms", f"{value:,.3f}")
    for status, count in summary["statuses"].items():
        table.add_row(f"replies {status}", f"{count:,}")
    if summary["unanswered"]:
        table.add_row("unanswered at the end", f"{summary['unanswered']:,}")
    show_table(table)
    for status, example in summary["examples"].items():
        show_line(f"{status}: {example}")
    generator = summary["generator"]
    if generator["is_limit"]:
        show_line(
            f"the generator itself may be the limit: it took {generator['cores']:g} of a core and sent calls "
            f"up to {generator['late_p99_ms']:g} ms late (p99); use a lower rate, or several processes"
        )
