"""Tables of measured figures, for the terminal and for the README."""

from collections.abc import Sequence

from rich.table import Table

from loadtest.results import Measure, RunResult, Spread

HEADER = (
    "| run | subject | measure | value | baseline | ratio | note | measured |",
    "|---|---|---|---|---|---|---|---|",
)


def pivoted(measures: Sequence[Measure]) -> Table:
    """Return a terminal table with a row per subject and a column per measure."""
    shown = Table(title="medians (least-greatest) of the repeats")
    subjects: dict[str, list[str]] = {}
    for measure in measures:
        subjects.setdefault(measure.subject, []).append(measure.name)
    # The longest row determines the order of the columns.
    ordered = sorted(subjects.values(), key=len, reverse=True)
    names = list(dict.fromkeys(name for row in ordered for name in row))
    for name in ("", *names):
        shown.add_column(name, justify="right" if name else "left")
    for subject in subjects:
        values = {measure.name: str(measure.value) for measure in measures if measure.subject == subject}
        shown.add_row(subject, *(values.get(name, "") for name in names))
    return shown


def listed(measures: Sequence[Measure], title: str = "") -> Table:
    """Return a terminal table with a row per measure."""
    shown = Table(title=title)
    for column in ("", "measure", "value", "baseline", "ratio", "note"):
        shown.add_column(column, justify="left" if column in {"", "measure", "note"} else "right")
    for measure in measures:
        shown.add_row(measure.subject, measure.name, *_figures(measure), measure.note)
    return shown


def markdown(results: Sequence[RunResult]) -> str:
    """Return one Markdown table of all results, grouped by run."""
    rows = list(HEADER)
    for run in dict.fromkeys(result.run for result in results):
        subjects: dict[str, list[str]] = {}
        for result in (result for result in results if result.run == run):
            measured = f"{result.date[:10]}, {result.commit}" + (f", {result.note}" if result.note else "")
            for measure in result.measures:
                cells = (run, measure.subject, measure.name, *_figures(measure), measure.note, measured)
                escaped = (cell.replace("|", "\\|") for cell in cells)
                subjects.setdefault(measure.subject, []).append(f"| {' | '.join(escaped)} |")
        rows += [row for subject_rows in subjects.values() for row in subject_rows]
    return "\n".join(rows) + "\n"


def _figures(measure: Measure) -> tuple[str, str, str]:
    return str(measure.value), _text(measure.baseline), _text(measure.ratio)


def _text(value: Spread | None) -> str:
    return "" if value is None else str(value)
