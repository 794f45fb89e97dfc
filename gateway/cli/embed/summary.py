"""Summary of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from gateway.cli.embed.finish import Note
from gateway.cli.output import show_line, show_table

ROWS = {
    "rows": "rows read",
    "embedded": "texts embedded",
    "empty": "rows without text, vector null",
    "skipped": "rows without text, left out",
    "bad": "bad rows, left out",
    "truncated": "texts cut by the server",
    "unknown_cuts": "replies that leave open which texts were cut",
    "tokens": "tokens",
}


def summary_of(note: Note, output: Path, *, is_new: bool) -> dict[str, Any]:
    """Return the figures of an output. is_new: whether this run finished it."""
    facts, space = note.facts, note.facts.space
    assert space is not None
    seconds = max(facts.seconds, 1e-3)
    return {
        "output": str(output),
        "finished_now": is_new,
        **msgspec.structs.asdict(facts.counts),
        "model": note.manifest.request.model or space.model,
        "dimensions": space.dimensions,
        "fingerprint": space.fingerprint,
        "field": note.manifest.field,
        "seconds": round(facts.seconds, 3),
        "texts_per_s": round(facts.counts.embedded / seconds, 1),
        "tokens_per_s": round(facts.counts.tokens / seconds, 1),
        "bad_rows": list(facts.problems),
        "truncated_rows": list(facts.cuts),
        "columns_as_json": list(note.as_json),
    }


def show_summary(summary: Mapping[str, Any]) -> None:
    """Print the figures as a table, and what the reader must know about rows and columns."""
    state = "" if summary["finished_now"] else " (it was complete already)"
    table = Table(title=f"{summary['output']}{state}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, words in ROWS.items():
        if summary[name] or name in ("rows", "embedded"):
            table.add_row(words, f"{summary[name]:,}")
    table.add_row("texts/s", f"{summary['texts_per_s']:,.1f}")
    if summary["tokens"]:
        table.add_row("tokens/s", f"{summary['tokens_per_s']:,.0f}")
    table.add_row("dimensions", str(summary["dimensions"]))
    table.add_row("model", str(summary["model"]))
    table.add_row("fingerprint", summary["fingerprint"] or "not reported by the server")
    show_table(table)
    for problem in summary["bad_rows"]:
        show_line(problem)
    if summary["truncated_rows"]:
        show_line(f"cut: {', '.join(summary['truncated_rows'])}")
    if summary["columns_as_json"]:
        columns = ", ".join(summary["columns_as_json"])
        show_line(f"written as the text of JSON, because their values have no type in common: {columns}")
