"""Lines and tables on the terminal."""

import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gateway.cli.printable import plain, printable
from gateway.config.problems import ConfigError, count_of

# A pipe has no width, and a cell must not be cut there.
PIPE_WIDTH = 1000
Row: TypeAlias = Sequence[str | Text]


class CleanConsole(Console):
    """Console for texts of servers and files: what a terminal could take for a command becomes a space."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as it is printed; tables and lines ask for it."""
        return super().render_str(printable(text), **options)


def show_line(text: str) -> None:
    """Print one line on standard error, without the commands of a terminal that it may contain."""
    CleanConsole(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False, emoji=False)


def print_json(value: object) -> None:
    """Print a value as one JSON document, the whole output of a command for scripts."""
    print(msgspec.json.encode(value).decode())


def print_result(value: object, text: str, *, as_json: bool) -> None:
    """Print the result of a command: a JSON document for scripts, or a text for people."""
    if as_json:
        print_json(value)
    else:
        print(text)


def write_document(text: str) -> None:
    """Write a document to standard output in UTF-8, which its format asks for, also on other terminals."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def show_table(table: Table) -> None:
    """Print a table without cutting cells or interpreting them as markup; cells fold on a terminal."""
    for column in table.columns:
        column.overflow = "fold"
    if Console().is_terminal:
        CleanConsole(markup=False, emoji=False).print(table)
        return
    console = CleanConsole(width=PIPE_WIDTH, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    # A cell that is long pads no other line.
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def table_of(columns: Iterable[str], rows: Iterable[Row], hidden: Collection[str] = ()) -> Table:
    """Return a table. A column whose name begins with `#` has numbers. hidden: columns to leave out."""
    names, table = list(columns), Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    shown = [index for index, name in enumerate(names) if name not in hidden]
    for index in shown:
        name = names[index].removeprefix("#")
        if name == names[index]:
            # A header is never broken inside a word.
            table.add_column(name, overflow="fold", min_width=len(name))
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [row[index] for index in shown]
        table.add_row(*(Text(plain(cell)) if isinstance(cell, str) else cell for cell in cells))
    return table


NONE = "–"


def short(value: float | None) -> str:
    """Format a number with about three digits."""
    if value is None:
        return NONE
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:,.0f} {unit}"
    return f"{value:.3g}"


def size(number: float) -> str:
    """Format a number of bytes with about three digits."""
    return f"{short(number / 1e9)} GB" if number >= 1e9 else f"{short(number / 1e6)} MB"


def milliseconds(seconds: float | None) -> str:
    """Format a duration with about three digits."""
    if seconds is None:
        return NONE
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def span(seconds: float) -> str:
    """Format a duration in its largest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def show_problems(path: Path, error: ConfigError) -> None:
    """Print one line per problem on standard error."""
    console = CleanConsole(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    console.print(f"[red]{escape(str(path))} has {count_of(error.problems, 'problem')}[/]")
    for problem in error.problems:
        line = "" if problem.line is None else f"line {problem.line}: "
        console.print(f"  {line}[bold]{escape(problem.path)}[/]: {escape(problem.message)}")
