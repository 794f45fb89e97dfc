"""Texts of servers and files on the terminal: they are neither commands for it nor markup."""

from pathlib import Path

import numpy as np
import pytest
from rich.table import Table

from backends.reference_texts import REFERENCE_TEXTS
from gateway.cli.batch import Batch, BatchPage, Counts, show_batches
from gateway.cli.output import show_line, show_problems, show_table
from gateway.cli.verify import show_report
from gateway.config.problems import ConfigError, Problem
from gateway.vector_spaces.comparison import ReplicaVectors, report_on
from gateway.vector_spaces.fingerprint import Fingerprint

EVIL = "\x1b[31mevil\x9b2J[/x]:smile:"
SHOWN = " [31mevil 2J[/x]:smile:"


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> "Printed":
    return Printed(capsys)


class Printed:
    """What a test has printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def is_clean(self) -> bool:
        captured = self._capsys.readouterr()
        text = captured.out + captured.err
        return SHOWN in text and not {"\x1b", "\x9b"} & set(text)


def test_lines_are_clean(printed: Printed) -> None:
    show_line(EVIL)
    assert printed.is_clean()


def test_tables_are_clean(printed: Printed) -> None:
    table = Table("name")
    table.add_row(EVIL)
    show_table(table)
    assert printed.is_clean()


def test_problems_of_a_file_are_clean(printed: Printed) -> None:
    show_problems(Path("router.yaml"), ConfigError([Problem(f"models.{EVIL}", "wrong")]))
    assert printed.is_clean()


def test_reports_on_servers_are_clean(printed: Printed) -> None:
    vectors = np.ones((len(REFERENCE_TEXTS), 4), np.float32)
    fingerprint = Fingerprint("0123456789abcdef", "tei", EVIL, None, 4, vectors.tobytes())
    show_report(report_on([ReplicaVectors("one", "one", fingerprint, vectors, 2)], {}))
    assert printed.is_clean()


REASON = "the budget of the day is spent, and starts again at midnight; " * 3
PAGE = BatchPage(
    [
        Batch("batch_one", "cancelled", Counts(40_000, 768, 39_232, 39_232), 1, "minilm"),
        Batch("batch_two", "in_progress", Counts(10, 3, 2), 1, "minilm", wait_reason=REASON),
    ],
    has_more=False,
)


def test_batches_show_the_lines_that_were_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    show_batches(PAGE)
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.endswith("  waits for")
    assert ["batch_one", "cancelled", "768", "of", "40000", "0", "39232", "minilm"] == first.split()[:8]
    assert first.endswith("  –")
    assert ["batch_two", "in_progress", "5", "of", "10", "2", "0", "minilm"] == second.split()[:8]
    assert second.endswith(REASON.rstrip())


def test_reasons_of_batches_are_cut_at_the_width_of_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": "120", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    show_batches(PAGE)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "the budget of the day" in lines[2]
    assert lines[2].rstrip().endswith("…")
