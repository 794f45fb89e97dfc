"""Lines and tables on the terminal."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.cli.printable import printable

# A pipe has no width, and a cell must not be cut there.
PIPE_WIDTH = 1000


class CleanConsole(Console):
    """Console for texts of servers and files: what a terminal could take for a command becomes a space."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as it is printed; tables and lines ask for it."""
        return super().render_str(printable(text), **options)


def show_line(text: str) -> None:
    """Print one line on standard error, without the commands of a terminal that it may contain."""
    CleanConsole(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False, emoji=False)


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
