"""Scenarios of callers, faults and features.

Each measures its baseline in the same run.

    .venv/bin/python -m loadtest.scenarios    # all of them, about six minutes
    .venv/bin/python -m loadtest.scenarios --only bulk,hung_replica --repeats 3
"""

import argparse
import asyncio
import inspect
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import uvloop
from rich.console import Console

from loadtest import results, servers, tables
from loadtest.overheads import OVERHEADS
from loadtest.processes import process_group
from loadtest.results import Measure, spread
from loadtest.testbed import Finding, Scenario, Testbed
from loadtest.traffic import TRAFFIC
from loadtest.troubles import TROUBLES

SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario for scenario in (*TRAFFIC, *TROUBLES, *OVERHEADS)
}


async def play(name: str, seconds: float) -> list[Finding]:
    """Run one scenario on fresh servers."""
    with tempfile.TemporaryDirectory() as folder, process_group() as processes:
        return await SCENARIOS[name](Testbed(Path(folder), processes, seconds))


def measures(scenario: str, findings: Iterable[Finding]) -> list[Measure]:
    """Return medians and spreads over the repeats of one scenario; ratios are paired within each repeat."""
    by_measure: dict[str, list[Finding]] = {}
    for finding in findings:
        by_measure.setdefault(finding.measure, []).append(finding)
    found = []
    for name, repeats in by_measure.items():
        baselines = [finding.baseline for finding in repeats if finding.baseline is not None]
        ratios = [finding.value / finding.baseline for finding in repeats if finding.baseline]
        found.append(
            Measure(
                scenario,
                name,
                spread(finding.value for finding in repeats),
                spread(baselines) if baselines else None,
                spread(ratios) if ratios else None,
                repeats[-1].note,
            )
        )
    return found


def main() -> None:
    """Run the scenarios in turn, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SCENARIOS))
    parser.add_argument("--seconds", type=float, default=4, help="measured period of each sample")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the JSON result")
    options = parser.parse_args()
    if unknown := set(options.only) - SCENARIOS.keys():
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    os.sched_setaffinity(0, {servers.LOAD_CORE})
    findings: dict[str, list[Finding]] = {name: [] for name in options.only}
    for repeat in range(options.repeats):
        for name in options.only:
            print(f"repeat {repeat + 1}, {name}: {inspect.getdoc(SCENARIOS[name])}", flush=True)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                findings[name] += runner.run(play(name, options.seconds))
    found = [measure for name in options.only for measure in measures(name, findings[name])]
    Console(width=170).print(tables.listed(found))
    print(f"result: {results.write(results.new_result('scenarios', found), options.out)}")


if __name__ == "__main__":
    main()
