"""Progress of a run: texts and tokens per second, and on a terminal the time left."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from gateway.cli.embed.manifest import Counts, PartFacts
from gateway.cli.embed.packing import Position
from gateway.cli.embed.plan import Source
from gateway.cli.output import show_line

# Between two lines where there is no terminal.
LINE_S = 30.0

Share: TypeAlias = Callable[[Position], float]


def share_of(sources: Sequence[Source], ends: Sequence[int]) -> Share:
    """Return the function that estimates which share of the input lies before a position.

    ends: the offset behind each file; 0 where it is unknown, as in a gzip file.
    """
    total = sum(source.size for source in sources) or 1
    before = [sum(source.size for source in sources[:number]) for number in range(len(sources) + 1)]

    def share(position: Position) -> float:
        number = min(position.file, len(sources) - 1)
        inside = min(1.0, position.offset / ends[number]) if ends[number] else 0.0
        return (before[number] + inside * sources[number].size) / total

    return share


class Meter:
    """Rates of a run since it was started. before: what an earlier run had done."""

    def __init__(self, before: PartFacts) -> None:
        self._before = before

    def words(self, facts: PartFacts) -> str:
        """Return the rates in words."""
        seconds = max(1e-3, facts.seconds - self._before.seconds)
        texts = facts.counts.embedded - self._before.counts.embedded
        tokens = facts.counts.tokens - self._before.counts.tokens
        return f"{facts.counts.rows:,} rows  {texts / seconds:,.0f} texts/s  {tokens / seconds:,.0f} tokens/s"


def _line_reporter(share: Share, meter: Meter) -> Callable[[PartFacts], None]:
    """Return what prints a line about the state of a run, but not more often than every LINE_S."""
    printed_s = time.monotonic()

    def report(facts: PartFacts) -> None:
        nonlocal printed_s
        if time.monotonic() - printed_s >= LINE_S:
            printed_s = time.monotonic()
            show_line(f"{share(facts.end):.0%}  {meter.words(facts)}")

    return report


@contextmanager
def shown_progress(
    share: Share, before: PartFacts, *, has_terminal: bool
) -> Iterator[Callable[[PartFacts], None]]:
    """Show a bar on a terminal, or else a line now and then, while the block runs; yield what moves it."""
    meter = Meter(before)
    if not has_terminal:
        yield _line_reporter(share, meter)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=60) as progress:
        task = progress.add_task("waiting for the first vectors", total=1.0)
        progress.update(task, completed=share(before.end))

        def report(facts: PartFacts) -> None:
            progress.update(task, completed=share(facts.end), description=meter.words(facts))

        yield report


@contextmanager
def shown_writing(counts: Counts, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar while the output is written; yield what moves it by a number of rows."""
    if not is_shown:
        yield lambda _: None
        return
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("writing", total=counts.embedded + counts.empty)
        yield lambda rows: progress.advance(task, rows)
