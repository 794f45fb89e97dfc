"""Lines and tables on the terminal."""

from rich.console import Console
from rich.table import Table

from gateway.cli.printable import printable

# A pipe has no width, and a cell must not be cut there.
PIPE_WIDTH = 1000


def show_line(text: str) -> None:
    """Print one line on standard error, without the commands of a terminal that it may contain."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(printable(text), markup=False)


def show_table(table: Table) -> None:
    """Print a table without cutting cells or interpreting them as markup; cells fold on a terminal."""
    for column in table.columns:
        column.overflow = "fold"
    width = None if Console().is_terminal else PIPE_WIDTH
    Console(width=width, markup=False, emoji=False).print(table)
