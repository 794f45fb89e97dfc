"""Tables and findings of `gateway verify` on the terminal."""

from collections.abc import Mapping

from rich.table import Table

from gateway.cli.output import CleanConsole
from gateway.vector_spaces.comparison import Report, findings

COLUMNS = ("upstream", "backend", "model", "dtype", "dims", "norms", "tokens", "fingerprint", "stored")
# A pipe has no width, and a cell must not be cut there.
WIDTH = 1000


def show_report(report: Report) -> None:
    """Print the replicas, the cosine of every two, and the findings."""
    console = CleanConsole(width=WIDTH, highlight=False, markup=False, emoji=False)
    console.print(_replica_table(report))
    if report.pairs:
        console.print(f"\nleast cosine of {report.texts} texts, in the order above")
        console.print(_cosine_matrix(report))
    for line in findings(report):
        console.print(line)


def _replica_table(report: Report) -> Table:
    table = Table("", *COLUMNS, box=None)
    for number, member in enumerate(report.members, 1):
        stored = "–" if member.stored is None else f"{member.stored.id} {member.stored.cosine:.5f}"
        table.add_row(
            str(number),
            member.name,
            member.backend,
            member.model_id,
            member.dtype or "–",
            str(member.dimensions),
            f"{member.least_norm:.3f}–{member.greatest_norm:.3f}",
            str(member.tokens),
            member.fingerprint,
            stored,
        )
    return table


def _cosine_matrix(report: Report) -> Table:
    cosines = {(pair.one, pair.other): pair.cosine for pair in report.pairs}
    names = [member.name for member in report.members]
    table = Table("", *(str(number) for number in range(1, len(names) + 1)), box=None)
    for number, row in enumerate(names, 1):
        cells = [_cosine_cell(cosines, row, column) for column in names]
        table.add_row(str(number), *cells)
    return table


def _cosine_cell(cosines: Mapping[tuple[str, str], float | None], row: str, column: str) -> str:
    if row == column:
        return "1"
    cosine = cosines[row, column] if (row, column) in cosines else cosines[column, row]
    return "–" if cosine is None else f"{cosine:.5f}"
