"""`gateway embed`: the order of a run, its messages, and its exit status."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from gateway.cli.check import show_problems
from gateway.cli.embed.calls import Caller, open_client
from gateway.cli.embed.chunks import open_reader
from gateway.cli.embed.embedding import Embedder
from gateway.cli.embed.finish import Note, delete_note, finish, read_note
from gateway.cli.embed.folder import check_folder, check_replaced, has_parts, is_of_run
from gateway.cli.embed.manifest import Manifest, manifest_of, refusal
from gateway.cli.embed.options import CONFIG, plan_of
from gateway.cli.embed.outputs import check_output
from gateway.cli.embed.parts import Parts
from gateway.cli.embed.plan import EmbedFailed, EmbedStopped, Plan
from gateway.cli.embed.progress import Share, share_of, shown_progress, shown_writing
from gateway.cli.embed.run import Interrupted, Run
from gateway.cli.embed.summary import show_summary, summary_of
from gateway.cli.embed.text_rows import RowReader
from gateway.cli.gateway_client import RequestRefused
from gateway.cli.operator_options import checked_key, operator_key
from gateway.cli.output import show_line
from gateway.config.problems import ConfigError

FAILED, STOPPED = 1, 3
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_embed(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run the command; return its exit status."""
    try:
        key = checked_key(options.key or "", "--key") or operator_key(options.key_file, environment)
        plan = plan_of(options, environment)
        check_output(plan.output)
        note, is_new = asyncio.run(_embed(plan, key, options.ca))
    except ConfigError as error:
        show_problems(options.config or CONFIG, error)
        return FAILED
    except (EmbedFailed, RequestRefused) as error:
        show_line(str(error))
        return FAILED
    except EmbedStopped as error:
        show_line(f"{error}; {_next_words(options.to)}")
        return 128 + error.number if isinstance(error, Interrupted) else STOPPED
    except OSError as error:
        show_line(f"{error.filename or options.to}: {error.strerror or error}; {_next_words(options.to)}")
        return STOPPED
    except KeyboardInterrupt:
        # Before the run handles signals: while it opens files, or asks for the model.
        show_line(f"stopped by a signal; {_next_words(options.to)}")
        return 128 + signal.SIGINT
    summary = summary_of(note, options.to, is_new=is_new)
    if options.json:
        print(msgspec.json.encode(summary).decode())
    else:
        show_summary(summary)
    return 0


def _next_words(output: Path) -> str:
    """Return how a run that has stopped goes on."""
    if has_parts(_parts_folder(output)):
        return "run the same command again to continue"
    return "nothing was kept, and the same command starts from the beginning"


async def _embed(plan: Plan, key: str | None, ca: Path | None) -> tuple[Note, bool]:
    """Return the note on the output, and whether this run made it. Raises: as `run_embed` catches."""
    reader = await asyncio.to_thread(open_reader, plan)
    async with open_client(plan.pace, key, ca) as client:
        caller = Caller(client, plan.pace, show_line)
        if plan.request.model is None:
            plan = msgspec.structs.replace(plan, request=await caller.first_model(plan.request))
        manifest = manifest_of(plan, reader.field)
        note = _complete_note(plan, manifest)
        if note is not None:
            return note, False
        with closing(Parts(_parts_folder(plan.output.path))) as parts:
            _open_parts(plan, parts, manifest)
            show_line(_opening_words(plan, reader, parts))
            share = await asyncio.to_thread(_share, plan)
            with shown_progress(share, parts.facts, has_terminal=sys.stderr.isatty()) as report:
                run = Run(plan, parts, Embedder(caller, plan), report)
                _stop_on_signals(run.stop)
                await run.run(reader)
            is_shown = sys.stderr.isatty()
            with shown_writing(parts.facts.counts, is_shown=is_shown) as written, _default_signals():
                return await asyncio.to_thread(finish, plan, parts, manifest, written), True


def _complete_note(plan: Plan, manifest: Manifest) -> Note | None:
    """Return the note if the output is complete. Raises: EmbedFailed, OSError."""
    path = plan.output.path
    folder, note = _parts_folder(path), read_note(path)
    is_unfinished = is_of_run(folder)
    reason = "" if note is None else note.refusal(manifest, plan.output.dtype)
    if reason and not plan.output.overwrite:
        raise EmbedFailed(
            f"{path} was made from other input or with other options: {reason}; --overwrite replaces it"
        )
    if note is not None and not reason and (is_unfinished or not plan.output.overwrite):
        if is_unfinished:
            # The run that made the output was killed while it deleted its parts.
            with closing(Parts(folder)) as parts:
                parts.open()
                parts.remove()
        return note
    check_folder(folder)
    check_replaced(plan.output)
    # A note that stays would make a run that replaces the output look complete.
    delete_note(path)
    return None


def _parts_folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.parts")


def _open_parts(plan: Plan, parts: Parts, manifest: Manifest) -> None:
    """Open the parts of an unfinished run of these settings, or none. Raises: EmbedFailed, OSError."""
    path = plan.output.path
    if not path.parent.is_dir():
        raise EmbedFailed(f"{path.parent}: there is no such folder")
    before = parts.open()
    # Where nothing is stored yet, any settings may begin.
    if before is not None and parts.count and (reason := refusal(before, manifest)):
        if not plan.output.overwrite:
            raise EmbedFailed(
                f"{path}: an unfinished run cannot be continued: {reason}; "
                "--overwrite starts from the beginning"
            )
        parts.clear()
    if before != manifest:
        parts.write_manifest(manifest)


def _opening_words(plan: Plan, reader: RowReader, parts: Parts) -> str:
    count = len(plan.sources)
    files = plan.sources[0].path if count == 1 else f"{count} files"
    words = f"texts: `{reader.field}` of {files}; model: {plan.request.model or 'of the server'}"
    done = parts.facts.counts.rows
    return f"{words}; continuing after {done:,} rows" if done else words


def _share(plan: Plan) -> Share:
    """Return the share of the input before a position."""
    if plan.sources[0].format != "parquet":
        return share_of(plan.sources, [0 if source.is_gzip else source.size for source in plan.sources])
    from gateway.cli.embed.parquet_rows import row_counts

    return share_of(plan.sources, row_counts(plan.sources))


@contextmanager
def _default_signals() -> Iterator[None]:
    """Have a signal end the process at once, as it may be killed at any moment, while the block runs."""
    loop = asyncio.get_running_loop()
    before = {}
    for number in SIGNALS:
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(number)
            before[number] = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
