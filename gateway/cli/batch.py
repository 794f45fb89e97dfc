"""`gateway batch submit | list | status | fetch | cancel`: batches of a running gateway, over its API.

Files with results get their names when they are complete, and nothing else is written: `fetch` neither
follows nor replaces links, and replaces files only with --force.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal, TypeAlias, get_args
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from gateway.cli.gateway_client import GatewayClient, GatewayUnavailable, RequestRefused
from gateway.cli.operator_options import add_json_option, add_key_options, find_gateway
from gateway.cli.output import (
    NONE,
    print_json,
    print_result,
    show_line,
    show_problems,
    show_table,
    span,
    table_of,
)
from gateway.cli.printable import printable
from gateway.config.problems import ConfigError

Endpoint = Literal["/v1/embeddings", "/v2/rerank", "/score"]
# Of one file, if no other bound is given: what a gateway keeps of one tenant, if no other is configured.
BYTES_MAX = 10 * 1024 * 1024 * 1024
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
PROBLEMS_SHOWN = 20
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
TIMEOUT_S = 60.0
POLL_S = 1.0
# A gateway that restarts is back by then.
PATIENCE_S = 120.0
# Of a shell for a command that Ctrl-C has ended.
INTERRUPTED = 130
# Some lines were completed, and others not.
PARTLY = 3
LIST_MAX = 100
# Read of the file of failed lines to show reasons, and shown of each.
REASON_BYTES_MAX = 256 * 1024
REASON_CHARACTERS_MAX = 300
ID = re.compile(r"batch_[A-Za-z0-9_-]{1,200}")


class Counts(msgspec.Struct):
    """Lines of a batch. unexecuted: of those that failed, the ones that were never run."""

    total: Count
    completed: Count
    failed: Count
    unexecuted: Count = 0

    @property
    def failed_runs(self) -> int:
        """Number of lines that were run and failed."""
        return max(0, self.failed - self.unexecuted)


class LineProblem(msgspec.Struct):
    """Reason why a batch failed."""

    message: str
    line: Count | None = None


class LineProblems(msgspec.Struct):
    """Reasons why a batch failed."""

    data: list[LineProblem]


class Batch(msgspec.Struct):
    """A batch, as far as it is shown. wait_reason: why its lines wait."""

    id: str
    status: str
    request_counts: Counts
    created_at: Count = 0
    model: str | None = None
    errors: LineProblems | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    wait_reason: str | None = None

    @property
    def has_ended(self) -> bool:
        """Return whether no state follows."""
        return self.status in ENDED


class BatchPage(msgspec.Struct):
    """Batches, newest first."""

    data: list[Batch]
    has_more: bool


class File(msgspec.Struct):
    """A file that was uploaded."""

    id: str


class LineReply(msgspec.Struct):
    """Reply to a line that failed."""

    status_code: int
    body: Any = None


class LineError(msgspec.Struct):
    """Reason why a line was never run, or has no reply."""

    code: str = ""
    message: str = ""


class FailedLine(msgspec.Struct):
    """Line of the file of failed lines."""

    custom_id: str | None = None
    response: LineReply | None = None
    error: LineError | None = None


class LineFailure(msgspec.Struct):
    """Line that failed, and why."""

    custom_id: str
    message: str


class BatchReport(msgspec.Struct):
    """State of a batch for scripts. failures: of the first lines that failed."""

    batch: Batch
    failures: list[LineFailure]


class FetchReport(msgspec.Struct):
    """State of a batch, and the files that were written."""

    batch: Batch
    results: str | None
    errors: str | None


@dataclass(frozen=True, slots=True)
class Target:
    """File that is written. replaces: also if there is one of that name."""

    path: Path
    replaces: bool

    def check(self) -> None:
        """Check that the file may be written now. Raises: RequestRefused."""
        path = self.path
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise RequestRefused(f"{path} is a link or no file, and is not replaced")
        if path.exists() and not self.replaces:
            raise RequestRefused(f"{path} exists: choose another name, or replace it with --force")


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `gateway batch` and their options to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    submit = add_key_options(actions.add_parser("submit", help="upload a file of requests and run it"))
    submit.add_argument("file", type=Path, help="JSON Lines, one request in each line")
    submit.add_argument(
        "--endpoint", choices=get_args(Endpoint), default="/v1/embeddings", help="default: /v1/embeddings"
    )
    submit.add_argument("--wait", action="store_true", help="show the progress until the batch has ended")
    listing = add_key_options(actions.add_parser("list", help="show the newest batches of the key's tenant"))
    listing.add_argument("--limit", type=_limit, default=20, metavar="N", help="at most 100 (default: 20)")
    status = add_key_options(actions.add_parser("status", help="show the progress of a batch"))
    status.add_argument("batch", type=_batch_id, help="its id")
    status.add_argument("--wait", action="store_true", help="show the progress until the batch has ended")
    fetch = add_key_options(actions.add_parser("fetch", help="write the results of a batch that has ended"))
    fetch.add_argument("batch", type=_batch_id, help="its id")
    fetch.add_argument("--to", type=Path, metavar="FILE", help="of the results (default: BATCH.jsonl)")
    fetch.add_argument(
        "--errors", type=Path, metavar="FILE", help="of the failed lines (default: FILE of --to.errors.jsonl)"
    )
    fetch.add_argument("--force", action="store_true", help="replace files of these names")
    fetch.add_argument(
        "--max-bytes",
        type=int,
        default=BYTES_MAX,
        metavar="N",
        help="of each file; a larger one is refused (default: 10 GiB)",
    )
    for action in (submit, status):
        action.add_argument(
            "--reasons", type=_reasons, default=5, metavar="N", help="lines that failed to show (default: 5)"
        )
    cancel = add_key_options(actions.add_parser("cancel", help="cancel a batch; its results so far are kept"))
    cancel.add_argument("batch", type=_batch_id, help="its id")
    for action in (submit, listing, status, fetch, cancel):
        add_json_option(action)


def run_batch(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run an action and return its exit status.

    It is 1 if the gateway refuses it or the batch has failed, 3 if some of its lines have, 130 after Ctrl-C.
    """
    try:
        found = find_gateway(options, environment, for_operators=False)
        with closing(found.client(options.ca, TIMEOUT_S)) as client:
            return _run(options, client)
    except ConfigError as error:
        show_problems(options.config, error)
    except (RequestRefused, GatewayUnavailable) as error:
        show_line(str(error))
    except OSError as error:
        show_line(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt as interrupt:
        show_line(str(interrupt) or "interrupted")
        return INTERRUPTED
    return 1


def _run(options: argparse.Namespace, client: GatewayClient) -> int:
    """Run an action and return its exit status. Raises: RequestRefused, GatewayUnavailable, OSError."""
    match options.action:
        case "submit":
            return _submit_and_wait(client, options)
        case "list":
            page = client.get(f"/v1/batches?limit={options.limit}", BatchPage)
            if options.json:
                print_json(page)
            else:
                show_batches(page)
            return 0
        case "fetch":
            return _fetch(client, options)
        case "cancel":
            found = _checked(client.post(f"{_path(options.batch)}/cancel", None, Batch), options.batch)
            print_result(found, f"{found.id} is {found.status}", as_json=options.json)
            return 0
    found = _state(client, options.batch)
    return _finish(client, _wait(client, found.id) if options.wait else found, options)


def _submit_and_wait(client: GatewayClient, options: argparse.Namespace) -> int:
    """Submit a batch, and wait for its end if asked for; return the exit status."""
    found = _submit(client, options.file, options.endpoint)
    if options.json and not options.wait:
        print_json(found)
    elif options.json:
        show_line(found.id)
    else:
        # Now, also into a pipe: an interrupt must not lose it.
        print(found.id, flush=True)
    return _finish(client, _wait(client, found.id), options) if options.wait else 0


def _state(client: GatewayClient, id_: str) -> Batch:
    """Return the state of a batch. Raises: RequestRefused, GatewayUnavailable."""
    return _checked(client.get(_path(id_), Batch), id_)


def _checked(reply: Batch, id_: str) -> Batch:
    """Return a reply about a batch as it may be shown. Raises: RequestRefused if it is of another batch."""
    if reply.id != id_:
        raise RequestRefused(f"the reply is not of {id_}, but of {reply.id[:80]!r}")
    return msgspec.structs.replace(reply, status=printable(reply.status)[:80])


def _submit(client: GatewayClient, path: Path, endpoint: str) -> Batch:
    size = path.stat().st_size
    with path.open("rb") as file, progress_bar() as progress:
        task = progress.add_task("uploading", total=size)
        uploaded = client.upload(
            "/v1/files", {"purpose": "batch"}, file, lambda sent: progress.update(task, completed=sent), File
        )
    request = {"input_file_id": uploaded.id, "endpoint": endpoint, "completion_window": "24h"}
    found = client.post("/v1/batches", request, Batch)
    if not ID.fullmatch(found.id):
        raise RequestRefused(f"the reply names no batch, but {found.id[:80]!r}")
    return found


def _wait(client: GatewayClient, id_: str) -> Batch:
    """Show the progress of a batch until it has ended.

    A gateway that does not answer is asked again for a while. Raises: RequestRefused, GatewayUnavailable;
    KeyboardInterrupt with a message for a person.
    """
    try:
        return _follow(client, id_)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(
            f"{id_} goes on; follow it with `gateway batch status {id_} --wait`"
        ) from interrupt


def _follow(client: GatewayClient, id_: str) -> Batch:
    seen_s = time.monotonic()
    with progress_bar() as progress:
        task = progress.add_task("validating", total=None)
        while True:
            try:
                found = _state(client, id_)
            except GatewayUnavailable:
                if time.monotonic() - seen_s > PATIENCE_S:
                    raise
            else:
                seen_s, counts = time.monotonic(), found.request_counts
                done = counts.completed + counts.failed
                progress.update(task, description=describe(found), completed=done, total=counts.total or None)
                if found.has_ended:
                    return found
            time.sleep(POLL_S)


def _finish(client: GatewayClient, found: Batch, options: argparse.Namespace) -> int:
    """Print the state of a batch with reasons of lines that failed, and return the exit status."""
    failures: list[LineFailure] = []
    if found.has_ended and found.error_file_id is not None and options.reasons:
        failures = _failures(client, found.error_file_id, options.reasons)
    if options.json:
        print_json(BatchReport(found, failures))
    else:
        show_batch(found)
    for failure in failures:
        show_line(f"{failure.custom_id}: {failure.message}")
    if failures and found.request_counts.failed > len(failures):
        show_line(f"`gateway batch fetch {found.id}` writes all lines that failed")
    return exit_status(found)


def exit_status(found: Batch) -> int:
    """Return 0 if a batch goes on or has no line that failed, 3 if some lines failed, 1 if all or itself."""
    counts = found.request_counts
    if not found.has_ended or (found.status == "completed" and not counts.failed):
        return 0
    return PARTLY if found.status == "completed" and counts.completed else 1


def _failures(client: GatewayClient, file_id: str, count: int) -> list[LineFailure]:
    """Return why the first lines failed. Raises: RequestRefused, GatewayUnavailable."""
    # What follows the last line break is nothing, or a line that is cut.
    lines = client.start_of(_content_path(file_id), REASON_BYTES_MAX).split(b"\n")[:-1]
    failures = []
    for line in lines[:count]:
        try:
            failures.append(failure_of(msgspec.json.decode(line, type=FailedLine)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return failures


def failure_of(line: FailedLine) -> LineFailure:
    """Return the reason of a line, in the words of the gateway."""
    body = line.response.body if line.response is not None else None
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    if line.error is not None:
        message = line.error.message or line.error.code
    status = "" if line.response is None else f"{line.response.status_code}: "
    reason = f"{status}{message or 'no reason is given'}"[:REASON_CHARACTERS_MAX]
    return LineFailure((line.custom_id or NONE)[:80], reason)


def _fetch(client: GatewayClient, options: argparse.Namespace) -> int:
    id_: str = options.batch
    to = options.to or Path(f"{id_}.jsonl")
    errors = options.errors or to.with_name(f"{to.name.removesuffix('.jsonl')}.errors.jsonl")
    targets = Target(to, options.force), Target(errors, options.force)
    if to.absolute() == errors.absolute():
        raise RequestRefused(f"{to}: results and failed lines need a file each")
    for target in targets:
        target.check()
    found = _state(client, id_)
    if not found.has_ended:
        show_line(f"{id_} is {found.status}; its results can be fetched when it has ended")
        return 1
    files = (found.output_file_id, found.error_file_id)
    for file_id, target in zip(files, targets, strict=True):
        if file_id is not None:
            _fetch_file(client, file_id, target, options.max_bytes)
    pairs = zip(files, targets, strict=True)
    written = [None if file_id is None else str(target.path) for file_id, target in pairs]
    if options.json:
        print_json(FetchReport(found, *written))
    else:
        print("\n".join(filter(None, written)))
        show_batch(found)
    if found.output_file_id is None:
        show_line(f"{to} is not written: no line of the batch was completed")
    return exit_status(found)


def _fetch_file(client: GatewayClient, file_id: str, target: Target, bytes_max: int) -> None:
    path = _content_path(file_id)
    with progress_bar() as progress, _unfinished(target) as file:
        task = progress.add_task("fetching", total=None)

        def show(done: int, size: int) -> None:
            progress.update(task, completed=done, total=size)

        client.download(path, file, show, bytes_max)


def _content_path(file_id: str) -> str:
    return f"/v1/files/{quote(file_id, safe='')}/content"


def _path(batch_id: str) -> str:
    return f"/v1/batches/{batch_id}"


def _limit(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= LIST_MAX:
        raise argparse.ArgumentTypeError(f"a number from 1 to {LIST_MAX}")
    return int(text)


def _reasons(text: str) -> int:
    if not text.isdecimal() or int(text) > PROBLEMS_SHOWN:
        raise argparse.ArgumentTypeError(f"a number from 0 to {PROBLEMS_SHOWN}")
    return int(text)


def _batch_id(text: str) -> str:
    if not ID.fullmatch(text):
        raise argparse.ArgumentTypeError("an id is `batch_` with letters, digits, `_` and `-` behind it")
    return text


@contextmanager
def _unfinished(target: Target) -> Iterator[IO[bytes]]:
    """Open a new file that becomes the target if the block succeeds, and is deleted if not."""
    path = target.path
    part = path.with_name(f"{path.name}.part")
    try:
        # Follows no link either.
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError as error:
        raise RequestRefused(
            f"{part} exists: another command writes it, or one was killed; delete it in that case"
        ) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        target.check()
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def show_batch(batch: Batch) -> None:
    """Print the state of a batch, with its problems on standard error."""
    counts = batch.request_counts
    unexecuted = f", {counts.unexecuted} not run" if counts.unexecuted else ""
    print(
        f"{batch.id} is {batch.status}: {counts.completed} of {counts.total} lines completed, "
        f"{counts.failed_runs} failed{unexecuted}"
    )
    if batch.wait_reason is not None:
        show_line(f"it waits: {batch.wait_reason}")
    for problem in (batch.errors.data if batch.errors else [])[:PROBLEMS_SHOWN]:
        place = "" if problem.line is None else f"line {problem.line}: "
        show_line(f"{place}{problem.message}")


def show_batches(page: BatchPage) -> None:
    """Print a table of batches."""
    rows = []
    for batch in page.data:
        counts = batch.request_counts
        done = f"{counts.completed + counts.failed_runs} of {counts.total}" if counts.total else NONE
        failed, unexecuted = (
            (str(counts.failed_runs), str(counts.unexecuted)) if counts.total else (NONE, NONE)
        )
        age = f"{span(time.time() - batch.created_at)} ago"
        # Cut on a terminal; `gateway batch status` shows the whole reason.
        reason = Text(printable(batch.wait_reason or NONE), no_wrap=True, overflow="ellipsis")
        rows.append((batch.id, batch.status, done, failed, unexecuted, batch.model or NONE, age, reason))
    columns = ("batch", "status", "#lines", "#failed", "#not run", "model", "created", "waits for")
    show_table(table_of(columns, rows))
    if page.has_more:
        show_line("there are older ones: pass a higher --limit")


def describe(batch: Batch) -> str:
    """Return the text next to the progress bar of a batch."""
    reason = "" if batch.wait_reason is None else f", waits: {batch.wait_reason}"
    return printable(f"{batch.status}{reason}")


def progress_bar() -> Progress:
    """Return a progress bar on standard error, which is drawn on terminals only."""
    description = TextColumn("{task.description}", markup=False)
    columns = description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
