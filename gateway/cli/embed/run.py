"""`gateway embed`: the order of a run, its output, its messages and its exit status.

An output is written from the parts of the run and appears by one rename. A note next to it says that it is
complete, so that the same command changes nothing then.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from gateway.cli.embed.embedding import Interrupted, Run, open_reader
from gateway.cli.embed.options import plan_of
from gateway.cli.embed.outputs import Writer, check_output
from gateway.cli.embed.parts import (
    REPLACED,
    UNFINISHED,
    Note,
    Parts,
    check_replaced,
    delete_note,
    identity_of,
    note_path,
    read_note,
    sync,
    write_whole,
)
from gateway.cli.embed.plan import Counts, EmbedFailed, PartFacts, Plan, Position, Source
from gateway.cli.gateway_client import RequestRefused
from gateway.cli.operator_options import checked_key, find_gateway
from gateway.cli.output import show_line, show_problems, show_table
from gateway.client.calls import Bounds, Caller, Words, open_http
from gateway.client.errors import CallFailed, CallStopped
from gateway.client.isolation import Embedder
from gateway.config.problems import ConfigError

FAILED, STOPPED = 1, 3
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Between two lines where there is no terminal.
LINE_S = 30.0
WORDS = Words(
    {
        401: "; set the key in GATEWAY_API_KEY, or pass a file with --key-file",
        404: "; see --model, and the models of the server at /v1/models",
    },
    deadline="--deadline",
)
FIGURES = {
    "rows": "rows read",
    "embedded": "texts embedded",
    "empty": "rows without text, vector null",
    "skipped": "rows without text, left out",
    "bad": "bad rows, left out",
    "truncated": "texts cut by the server",
    "unknown_cuts": "replies that leave open which texts were cut",
    "tokens": "tokens",
}


def embed_files(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run the command; return its exit status."""
    try:
        named = checked_key(options.key or "", "--key")
        found = find_gateway(options, environment, for_operators=False)
        key, plan = named or found.key, plan_of(options, found.url)
        check_output(plan)
        note, is_new = asyncio.run(_embed(plan, key, options.ca))
    except ConfigError as error:
        show_problems(options.config, error)
        return FAILED
    except (EmbedFailed, CallFailed, RequestRefused) as error:
        show_line(str(error))
        return FAILED
    except CallStopped as error:
        return _stopped(str(error), options.to, STOPPED)
    except Interrupted as error:
        return _stopped("stopped by a signal", options.to, 128 + error.number)
    except OSError as error:
        return _stopped(f"{error.filename or options.to}: {error.strerror or error}", options.to, STOPPED)
    except KeyboardInterrupt:
        # Before the run handles signals: while it opens files, or asks for the model.
        return _stopped("stopped by a signal", options.to, 128 + signal.SIGINT)
    summary = summary_of(note, options.to, is_new=is_new)
    if options.json:
        print(msgspec.json.encode(summary).decode())
    else:
        show_summary(summary)
    return 0


def _stopped(reason: str, output: Path, status: int) -> int:
    """Print why a run has stopped and how it goes on; return its exit status."""
    way = (
        "run the same command again to continue"
        if Parts(output).have_rows()
        else "nothing was kept, and the same command starts from the beginning"
    )
    show_line(f"{reason}; {way}")
    return status


async def _embed(plan: Plan, key: str | None, ca: Path | None) -> tuple[Note, bool]:
    """Return the note on the output, and whether this run made it. Raises: as `embed_files` catches."""
    reader = await asyncio.to_thread(open_reader, plan)
    bounds = Bounds(plan.concurrency, plan.timeout_s, plan.deadline_s)
    async with open_http(bounds, key, ca) as http:
        caller = Caller(http, bounds, show_line, WORDS)
        request = plan.settings.request
        if request.model is None:
            request = await caller.first_model(request)
        settings = msgspec.structs.replace(plan.settings, field=reader.field, request=request)
        plan = msgspec.structs.replace(plan, settings=settings)
        parts = Parts(plan.output)
        if (note := _complete_note(plan, parts)) is not None:
            return note, False
        with closing(parts):
            _open_parts(plan, parts)
            _show_start(plan, parts.facts)
            meter = Meter(settings.sources, await asyncio.to_thread(reader.ends), parts.facts)
            has_terminal = sys.stderr.isatty()
            with shown_progress(meter, parts.facts.end, has_terminal=has_terminal) as report:
                run = Run(plan, parts, Embedder(caller, settings.request), report)
                _stop_on_signals(run.stop)
                await run.run(reader)
            with (
                shown_writing(parts.facts.counts, has_terminal=has_terminal) as written,
                _default_signals(),
            ):
                return await asyncio.to_thread(_finish, plan, parts, written), True


def _complete_note(plan: Plan, parts: Parts) -> Note | None:
    """Return the note if the output is complete. Raises: EmbedFailed, OSError."""
    note = read_note(plan.output)
    is_unfinished = parts.are_left()
    reason = "" if note is None else note.difference(plan.manifest(), plan.dtype)
    if reason and not plan.overwrite:
        raise EmbedFailed(
            f"{plan.output} was made from other input or with other options: {reason}; "
            "--overwrite replaces it"
        )
    if note is not None and not reason and (is_unfinished or not plan.overwrite):
        if is_unfinished:
            # The run that made the output was killed while it deleted its parts.
            with closing(parts):
                parts.open()
                parts.remove()
        return note
    parts.check()
    check_replaced(plan)
    # A note that stays would make a run that replaces the output look complete.
    delete_note(plan.output)
    return None


def _open_parts(plan: Plan, parts: Parts) -> None:
    """Open the parts of an unfinished run of these settings, or none. Raises: EmbedFailed, OSError."""
    if not plan.output.parent.is_dir():
        raise EmbedFailed(f"{plan.output.parent}: there is no such folder")
    before, manifest = parts.open(), plan.manifest()
    # Where nothing is stored yet, any settings may begin.
    if before is not None and parts.count and (reason := before.difference(manifest)):
        if not plan.overwrite:
            raise EmbedFailed(
                f"{plan.output}: an unfinished run cannot be continued: {reason}; "
                "--overwrite starts from the beginning"
            )
        parts.clear()
    if before != manifest:
        parts.write_manifest(manifest)


def _show_start(plan: Plan, before: PartFacts) -> None:
    settings = plan.settings
    count, done = len(settings.sources), before.counts.rows
    files = settings.sources[0].path if count == 1 else f"{count} files"
    words = f"texts: `{settings.field}` of {files}; model: {settings.request.model or 'of the server'}"
    show_line(f"{words}; continuing after {done:,} rows" if done else words)


@contextmanager
def _default_signals() -> Iterator[None]:
    """Have a signal end the process at once, as it may be killed at any moment, while the block runs."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        for number in SIGNALS:
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(number)
                stack.callback(signal.signal, number, signal.signal(number, signal.SIG_DFL))
        yield


def _stop_on_signals(stop: "asyncio.Future[int]") -> None:
    """Have the first SIGINT or SIGTERM end the run, and a second one the process."""
    loop = asyncio.get_running_loop()

    def stop_once(number: int) -> None:
        if not stop.done():
            stop.set_result(number)
        loop.remove_signal_handler(number)

    for number in SIGNALS:
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, stop_once, int(number))


def _finish(plan: Plan, parts: Parts, written: Callable[[int], None]) -> Note:
    """Write the output and delete the parts. Blocks; for a thread. Raises: EmbedFailed, OSError."""
    facts, manifest, output = parts.facts, plan.manifest(), plan.output
    _check_unchanged(plan)
    if facts.space is None:
        raise EmbedFailed("no row has a text, so there are no vectors to write")
    writer = Writer(plan, parts.batches, facts.space.dimensions, written)
    described = msgspec.json.encode({"space": facts.space, "request": manifest.request}).decode()
    unfinished = parts.folder / UNFINISHED
    as_json = writer.write(unfinished, {"gateway embed": described})
    for path in (unfinished, *unfinished.rglob("*")):
        if path.is_file():
            sync(path)
    # Another program may have written there meanwhile.
    check_replaced(plan)
    note = Note(*identity_of(unfinished), manifest, facts, as_json, plan.dtype)
    write_whole(note_path(output), msgspec.json.encode(note))
    if output.is_dir():
        # A folder cannot be replaced at once.
        output.rename(parts.folder / REPLACED)
    unfinished.replace(output)
    sync(output.parent)
    parts.remove()
    return note


def _check_unchanged(plan: Plan) -> None:
    """Check that no input has changed since the start. Raises: EmbedFailed."""
    for source in plan.settings.sources:
        try:
            found = Path(source.path).stat()
        except OSError as error:
            raise EmbedFailed(f"{source.path}: {error.strerror or error}") from error
        if (found.st_size, found.st_mtime_ns) != (source.size, source.mtime_ns):
            raise EmbedFailed(f"{source.path} has changed while it was read")


class Meter:
    """Share of the input that is embedded, and rates since the start.

    ends: the offset behind each file; 0 where it is unknown, as in a gzip file. before: what an earlier run
    had done.
    """

    def __init__(self, sources: Sequence[Source], ends: Sequence[int], before: PartFacts) -> None:
        self._sizes = [source.size for source in sources]
        self._ends = ends
        self._before = before

    def share(self, position: Position) -> float:
        """Return an estimate of the share of the input before a position."""
        number = min(position.file, len(self._sizes) - 1)
        inside = min(1.0, position.offset / self._ends[number]) if self._ends[number] else 0.0
        return (sum(self._sizes[:number]) + inside * self._sizes[number]) / (sum(self._sizes) or 1)

    def words(self, facts: PartFacts) -> str:
        """Return the rates in words."""
        seconds = max(1e-3, facts.seconds - self._before.seconds)
        texts = facts.counts.embedded - self._before.counts.embedded
        tokens = facts.counts.tokens - self._before.counts.tokens
        return f"{facts.counts.rows:,} rows  {texts / seconds:,.0f} texts/s  {tokens / seconds:,.0f} tokens/s"


@contextmanager
def shown_progress(
    meter: Meter, before: Position, *, has_terminal: bool
) -> Iterator[Callable[[PartFacts], None]]:
    """Show a bar on a terminal, or else a line now and then, while the block runs; yield what moves it."""
    if not has_terminal:
        printed_s = time.monotonic()

        def print_line(facts: PartFacts) -> None:
            nonlocal printed_s
            if time.monotonic() - printed_s >= LINE_S:
                printed_s = time.monotonic()
                show_line(f"{meter.share(facts.end):.0%}  {meter.words(facts)}")

        yield print_line
        return
    left = (TextColumn("left"), TimeRemainingColumn(compact=True))
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), *left)
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=60) as progress:
        task = progress.add_task("waiting for the first vectors", total=1.0)
        progress.update(task, completed=meter.share(before))

        def move_bar(facts: PartFacts) -> None:
            progress.update(task, completed=meter.share(facts.end), description=meter.words(facts))

        yield move_bar


@contextmanager
def shown_writing(counts: Counts, *, has_terminal: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar while the output is written; yield what moves it by a number of rows."""
    if not has_terminal:
        yield lambda _: None
        return
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("writing", total=counts.embedded + counts.empty)
        yield lambda rows: progress.advance(task, rows)


def summary_of(note: Note, output: Path, *, is_new: bool) -> dict[str, Any]:
    """Return the figures of an output. is_new: whether this run finished it."""
    facts, space = note.facts, note.facts.space
    assert space is not None
    seconds = max(facts.seconds, 1e-3)
    return {
        "output": str(output),
        "finished_now": is_new,
        **msgspec.structs.asdict(facts.counts),
        "model": note.manifest.request.model or space.model,
        "dimensions": space.dimensions,
        "fingerprint": space.fingerprint,
        "field": note.manifest.field,
        "seconds": round(facts.seconds, 3),
        "texts_per_s": round(facts.counts.embedded / seconds, 1),
        "tokens_per_s": round(facts.counts.tokens / seconds, 1),
        "bad_rows": list(facts.problems),
        "truncated_rows": list(facts.cuts),
        "columns_as_json": list(note.as_json),
    }


def show_summary(summary: Mapping[str, Any]) -> None:
    """Print the figures as a table, and what the reader must know about rows and columns."""
    state = "" if summary["finished_now"] else " (it was complete already)"
    table = Table(title=f"{summary['output']}{state}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, words in FIGURES.items():
        if summary[name] or name in ("rows", "embedded"):
            table.add_row(words, f"{summary[name]:,}")
    table.add_row("texts/s", f"{summary['texts_per_s']:,.1f}")
    if summary["tokens"]:
        table.add_row("tokens/s", f"{summary['tokens_per_s']:,.0f}")
    table.add_row("dimensions", str(summary["dimensions"]))
    table.add_row("model", str(summary["model"]))
    table.add_row("fingerprint", summary["fingerprint"] or "not reported by the server")
    show_table(table)
    for problem in summary["bad_rows"]:
        show_line(problem)
    if summary["truncated_rows"]:
        show_line(f"cut: {', '.join(summary['truncated_rows'])}")
    if summary["columns_as_json"]:
        columns = ", ".join(summary["columns_as_json"])
        show_line(f"written as the text of JSON, because their values have no type in common: {columns}")
