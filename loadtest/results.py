"""Schema of the measured results, and the folder where each run writes them as JSON.

A run writes `loadtest-results/RUN-DATE.json`. `loadtest.report` merges the latest figures into
`loadtest/results.json`, from which the table in the README is generated.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("loadtest-results")
SCHEMA = 1


class Spread(msgspec.Struct, frozen=True):
    """Median, least and greatest value over the repeats."""

    median: float
    min: float
    max: float

    def __str__(self) -> str:
        digits = 0 if abs(self.median) >= 1000 else 1 if abs(self.median) >= 10 else 2
        median, low, high = (f"{value:,.{digits}f}" for value in (self.median, self.min, self.max))
        return median if low == high else f"{median} ({low}-{high})"


def spread(values: Iterable[float]) -> Spread:
    """Return the spread of at least one value."""
    found = sorted(values)
    return Spread(*(round(value, 4) for value in (statistics.median(found), found[0], found[-1])))


class Measure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One figure of a run.

    subject: the measured server or scenario. baseline: the same figure without what is measured, and ratio
    the figure divided by it within each repeat.
    """

    subject: str
    name: str
    value: Spread
    baseline: Spread | None = None
    ratio: Spread | None = None
    note: str = ""


class Curve(msgspec.Struct, frozen=True):
    """A figure over a range of loads, for the pictures."""

    subject: str
    name: str
    x: list[float]
    y: list[Spread]


class RunResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run. run: compare, scenarios, engine, endurance, … date: in UTC. note: caveats of the whole run."""

    run: str
    date: str
    commit: str
    cpu: str
    platform: str
    command: str
    measures: list[Measure]
    curves: list[Curve] = []
    note: str = ""
    schema: int = SCHEMA


def new_result(run: str, measures: Sequence[Measure], curves: Sequence[Curve] = ()) -> RunResult:
    """Return the result of a run of this process, with date, commit, machine and command line."""
    return RunResult(
        run=run,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
        commit=commit_of(ROOT),
        cpu=cpu_model(),
        platform=f"Linux {platform.release()}, Python {platform.python_version()}",
        command=" ".join(["python -m", f"loadtest.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        measures=list(measures),
        curves=list(curves),
    )


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option that all runs have."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=kind)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the JSON result")
    return parser


def write(result: RunResult, folder: Path) -> None:
    """Write a result as JSON and print its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.run}-{result.date.translate({ord(c): None for c in '-: '})}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    print(f"{result.cpu}, {result.platform}\nresult: {path}")


def read(folder: Path) -> list[RunResult]:
    """Return all results of a folder, oldest first."""
    results = [msgspec.json.decode(path.read_bytes(), type=RunResult) for path in folder.glob("*-*.json")]
    return sorted(results, key=lambda result: result.date)


def commit_of(tree: Path) -> str:
    """Return the short commit of a checkout, with `+` where files have been changed since."""
    revision = _git(tree, "rev-parse", "--short", "HEAD")
    return revision + ("+" if revision and _git(tree, "status", "--porcelain") else "")


def _git(tree: Path, *words: str) -> str:
    command = ["git", "-C", str(tree), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def cpu_model() -> str:
    """Return the number of cores and the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
    return f"{os.cpu_count()} cores of {model}"
