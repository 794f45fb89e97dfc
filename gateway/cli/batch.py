"""`gateway batch submit | status | fetch | cancel`: batches of a running gateway, over its API."""

import argparse
import re
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.cli.batch_results import BYTES_MAX, check_targets, fetch_file
from gateway.cli.check import show_problems
from gateway.cli.gateway_client import GatewayClient, GatewayUnavailable, RequestRefused
from gateway.cli.operator_options import add_key_options, caller_url, operator_key
from gateway.cli.output import show_line
from gateway.cli.printable import printable
from gateway.config.problems import ConfigError

Endpoint = Literal["/v1/embeddings", "/v2/rerank", "/score"]
TIMEOUT_S = 60.0
POLL_S = 1.0
# A gateway that restarts is back by then.
PATIENCE_S = 120.0
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
PROBLEMS_SHOWN = 20
ID = re.compile(r"batch_[A-Za-z0-9_-]{1,200}")
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Counts(msgspec.Struct):
    """Lines of a batch. unexecuted: of those that failed, the ones that were never run."""

    total: Count
    completed: Count
    failed: Count
    unexecuted: Count = 0


class LineProblem(msgspec.Struct):
    """Reason why a batch failed."""

    message: str
    line: Count | None = None


class LineProblems(msgspec.Struct):
    """Reasons why a batch failed."""

    data: list[LineProblem]


class Batch(msgspec.Struct):
    """A batch, as far as it is shown."""

    id: str
    status: str
    request_counts: Counts
    errors: LineProblems | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None


class File(msgspec.Struct):
    """A file that was uploaded."""

    id: str


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `gateway batch` and their options to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    submit = _with_gateway(actions.add_parser("submit", help="upload a file of requests and run it"))
    submit.add_argument("file", type=Path, help="JSON Lines, one request in each line")
    submit.add_argument(
        "--endpoint", choices=get_args(Endpoint), default="/v1/embeddings", help="default: /v1/embeddings"
    )
    submit.add_argument("--wait", action="store_true", help="show the progress until the batch has ended")
    status = _with_gateway(actions.add_parser("status", help="show the progress of a batch"))
    status.add_argument("batch", type=_batch_id, help="its id")
    status.add_argument("--wait", action="store_true", help="show the progress until the batch has ended")
    fetch = _with_gateway(actions.add_parser("fetch", help="write the results of a batch that has ended"))
    fetch.add_argument("batch", type=_batch_id, help="its id")
    fetch.add_argument("--to", type=Path, metavar="FILE", help="of the results (default: BATCH.jsonl)")
    fetch.add_argument(
        "--errors", type=Path, metavar="FILE", help="of the failed lines (default: BATCH.errors.jsonl)"
    )
    fetch.add_argument(
        "--max-bytes",
        type=int,
        default=BYTES_MAX,
        metavar="N",
        help="of each file; a larger one is refused (default: 10 GiB)",
    )
    cancel = _with_gateway(actions.add_parser("cancel", help="cancel a batch; its results so far are kept"))
    cancel.add_argument("batch", type=_batch_id, help="its id")


def batch(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run an action; return 1 if the gateway refuses it, or the batch has not completed."""
    try:
        key = operator_key(options.key_file, environment)
        url = caller_url(options, environment)
        with closing(GatewayClient(url, key, options.ca, TIMEOUT_S)) as client:
            return _run(options, client)
    except ConfigError as error:
        show_problems(options.config, error)
    except (RequestRefused, GatewayUnavailable, OSError) as error:
        show_line(str(error))
    return 1


def _run(options: argparse.Namespace, client: GatewayClient) -> int:
    """Run an action and return its exit status. Raises: RequestRefused, GatewayUnavailable, OSError."""
    match options.action:
        case "submit":
            found = _submit(client, options.file, options.endpoint)
            print(found.id)
            return _finish(_wait(client, found.id)) if options.wait else 0
        case "fetch":
            return _fetch(client, options)
        case "cancel":
            found = _checked(client.post(f"{_path(options.batch)}/cancel", None, Batch), options.batch)
            print(f"{found.id} is {found.status}")
            return 0
    found = _state(client, options.batch)
    return _finish(_wait(client, found.id) if options.wait else found)


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
    with path.open("rb") as file, _progress() as progress:
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
    """Show the progress of a batch until it has ended; a gateway that is away is asked again for a while."""
    seen_s = time.monotonic()
    with _progress() as progress:
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
                progress.update(task, description=found.status, completed=done, total=counts.total or None)
                if found.status in ENDED:
                    return found
            time.sleep(POLL_S)


def _finish(found: Batch) -> int:
    """Print the state of a batch, and return 1 if it has ended otherwise than completed."""
    counts = found.request_counts
    unexecuted = f", {counts.unexecuted} not run" if counts.unexecuted else ""
    print(
        f"{found.id} is {found.status}: {counts.completed} of {counts.total} lines completed, "
        f"{max(0, counts.failed - counts.unexecuted)} failed{unexecuted}"
    )
    for problem in (found.errors.data if found.errors else [])[:PROBLEMS_SHOWN]:
        place = "" if problem.line is None else f"line {problem.line}: "
        show_line(f"{place}{problem.message}")
    return int(found.status in ENDED and found.status != "completed")


def _fetch(client: GatewayClient, options: argparse.Namespace) -> int:
    id_: str = options.batch
    to, errors = options.to or Path(f"{id_}.jsonl"), options.errors or Path(f"{id_}.errors.jsonl")
    check_targets(to, errors)
    found = _state(client, id_)
    if found.status not in ENDED:
        show_line(f"{id_} is {found.status}; its results can be fetched when it has ended")
        return 1
    for file_id, path in ((found.output_file_id, to), (found.error_file_id, errors)):
        if file_id is not None:
            _fetch_file(client, file_id, path, options.max_bytes)
            print(path)
    return _finish(found)


def _fetch_file(client: GatewayClient, file_id: str, path: Path, bytes_max: int) -> None:
    with _progress() as progress:
        task = progress.add_task("fetching", total=None)
        fetch_file(
            client,
            file_id,
            path,
            bytes_max,
            lambda done, size: progress.update(task, completed=done, total=size),
        )


def _path(batch_id: str) -> str:
    return f"/v1/batches/{batch_id}"


def _batch_id(text: str) -> str:
    if not ID.fullmatch(text):
        raise argparse.ArgumentTypeError("an id is `batch_` with letters, digits, `_` and `-` behind it")
    return text


def _progress() -> Progress:
    """Return a progress bar on standard error, which is drawn on terminals only."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, disable=not sys.stderr.isatty())


def _with_gateway(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that find the gateway, and return the parser."""
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        default=Path("router.yaml"),
        metavar="FILE",
        help="the configuration, for the gateway's address",
    )
    add_key_options(parser)
    return parser
