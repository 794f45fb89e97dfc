"""Batches as a gateway describes them, and as the command line shows them."""

import sys
import time
from typing import Annotated, TypeAlias

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gateway.cli.formats import NONE, span
from gateway.cli.output import show_line, show_table
from gateway.cli.printable import printable

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
PROBLEMS_SHOWN = 20
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


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
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("batch", "status", "lines", "failed", "not run", "model", "created", "waits for"):
        table.add_column(column, justify="right" if column in {"lines", "failed", "not run"} else "left")
    for batch in page.data:
        counts = batch.request_counts
        done = f"{counts.completed + counts.failed_runs} of {counts.total}" if counts.total else NONE
        failed, unexecuted = (
            (str(counts.failed_runs), str(counts.unexecuted)) if counts.total else (NONE, NONE)
        )
        age = f"{span(time.time() - batch.created_at)} ago"
        table.add_row(
            batch.id,
            batch.status,
            done,
            failed,
            unexecuted,
            batch.model or NONE,
            age,
            # Cut on a terminal; `gateway batch status` shows the whole reason.
            Text(printable(batch.wait_reason or NONE), no_wrap=True, overflow="ellipsis"),
        )
    show_table(table)
    if page.has_more:
        show_line("there are older ones: pass a higher --limit")


def describe(batch: Batch) -> str:
    """Return the text next to the progress bar of a batch."""
    reason = "" if batch.wait_reason is None else f", waits: {batch.wait_reason}"
    return printable(f"{batch.status}{reason}")


def progress_bar() -> Progress:
    """Return a progress bar on standard error, which is drawn on terminals only."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, disable=not sys.stderr.isatty())
