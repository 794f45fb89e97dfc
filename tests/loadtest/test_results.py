"""Figures become results with spreads, and results become the generated table."""

from pathlib import Path

import pytest

from loadtest import compare, report, results, scenarios, tables
from loadtest.compare import Round
from loadtest.recorder import Sample
from loadtest.results import Measure, RunResult, Spread, spread
from loadtest.testbed import Finding

RUN = {"commit": "abc1234", "cpu": "2 cores", "platform": "Linux", "command": "python -m loadtest.compare"}


def sample(per_s: float, p50_ms: float, cpu: dict[str, float]) -> Sample:
    return Sample(
        calls=100,
        sent=100,
        seconds=1,
        per_s=per_s,
        p50_ms=p50_ms,
        p95_ms=1,
        p99_ms=1,
        max_ms=1,
        statuses={"200": 100},
        wrong=0,
        unanswered=0,
        late_ms=0,
        cpu={"elsewhere": 0.0, **cpu},
        rss_mb={},
        histogram="",
    )


def rounds(names: tuple[str, str]) -> list[Round]:
    base, gateway = names
    return [
        Round(name, repeat, "callers", load, sample(per_s, p50_ms, {name: 0.5}))
        for name, repeat, load, per_s, p50_ms in [
            (base, 0, 32, 900.0, 1.0),
            (base, 1, 32, 1100.0, 1.0),
            (base, 0, 1, 100.0, 0.1),
            (base, 1, 1, 100.0, 0.3),
            (gateway, 0, 32, 400.0, 9.0),
            (gateway, 1, 32, 600.0, 9.0),
            (gateway, 0, 1, 100.0, 0.6),
            (gateway, 1, 1, 100.0, 0.7),
        ]
    ]


def test_summary_takes_medians_and_subtracts_the_direct_calls_of_the_same_repeat() -> None:
    found = compare.measures(rounds(("direct", "gateway")))
    direct, gateway = (
        {measure.name: measure.value for measure in found if measure.subject == subject}
        for subject in ("direct", "gateway")
    )

    per_s = gateway[compare.THROUGHPUT.name]
    assert (per_s.min, per_s.median, per_s.max) == (400, 500, 600)
    assert gateway[compare.ADDED_P50].median == pytest.approx(0.45)
    assert compare.ADDED_P50 not in direct
    assert gateway[compare.CPU.name].max == pytest.approx(1250)
    assert compare.P99.name not in gateway


def test_versions_are_compared_within_each_repeat() -> None:
    found = compare.version_measures(rounds(("gateway:before", "gateway")))
    ratios = {measure.name: measure.ratio for measure in found}

    assert ratios[compare.THROUGHPUT.name] == spread([400 / 900, 600 / 1100])
    assert ratios[compare.P50.name] == spread([0.6 / 0.1, 0.7 / 0.3])


def test_scenario_ratios_are_paired_within_each_repeat() -> None:
    findings = [Finding("p50 ms", 2.0, 1.0), Finding("failed", 0.0, 0.0), Finding("p50 ms", 30.0, 10.0, "n")]

    p50, failed = scenarios.measures("trickle", findings)

    assert (p50.value, p50.baseline, p50.ratio) == (Spread(16, 2, 30), Spread(5.5, 1, 10), Spread(2.5, 2, 3))
    assert p50.note == "n"
    assert failed.ratio is None


def test_written_result_is_read_back(tmp_path: Path) -> None:
    written = results.new_result("compare", [Measure("gateway", "requests/s", spread([1.0, 2.0]))])

    results.write(written, tmp_path)

    assert results.read(tmp_path) == [written]
    assert written.commit
    assert written.schema == results.SCHEMA


def test_newer_figures_replace_only_the_same_measure_of_the_same_run() -> None:
    def result(run: str, date: str, **figures: float) -> RunResult:
        measures = [Measure("gateway", name, spread([value])) for name, value in figures.items()]
        return RunResult(run=run, date=date, measures=measures, **RUN)

    latest = [result("compare", "2026-01-01", a=1, b=1), result("scenarios", "2026-01-01", a=1)]
    new = [
        result("compare", "2026-01-03", a=3),
        result("compare", "2026-01-02", a=2),
        result("versions", "2027", a=4),
    ]

    merged = report.merged(latest, new)

    figures = {
        (found.run, measure.name): measure.value.median for found in merged for measure in found.measures
    }
    assert figures == {("compare", "a"): 3, ("compare", "b"): 1, ("scenarios", "a"): 1}


def test_readme_holds_the_table_of_the_latest_results() -> None:
    readme = report.README.read_text()
    latest = report.read_latest()

    assert report.with_table(readme, latest) == readme
    assert tables.markdown(latest) in readme
    assert all(len(cell) <= 120 for row in tables.markdown(latest).splitlines() for cell in row.split("|"))


def test_document_without_markers_is_rejected() -> None:
    with pytest.raises(ValueError, match="results: begin"):
        report.with_table("no table here", [])


def test_spread_shows_digits_that_its_size_gives_meaning_to() -> None:
    assert str(spread([1234.5, 1300.2, 1400])) == "1,300 (1,234-1,400)"
    assert str(spread([12.34])) == "12.3"
    assert str(spread([0.123, 0.456])) == "0.29 (0.12-0.46)"
