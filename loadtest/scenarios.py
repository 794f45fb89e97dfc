"""Scenarios of callers, faults, features and attacks.

Each measures its baseline in the same run.

    .venv/bin/python -m loadtest.scenarios    # all of them, about nine minutes
    .venv/bin/python -m loadtest.scenarios --only bulk,hung_replica --repeats 3
"""

import asyncio
import inspect
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import uvloop
from rich.console import Console

from loadtest import attacks, overheads, results, servers, tables, traffic, troubles
from loadtest.processes import process_group
from loadtest.results import Measure, spread
from loadtest.testbed import Finding, Scenario, Testbed

# The public coroutines of these modules, in their order.
SCENARIOS: dict[str, Scenario] = {
    name: function
    for module in (traffic, troubles, overheads, attacks)
    for name, function in vars(module).items()
    if inspect.iscoroutinefunction(function) and function.__module__ == module.__name__ and name[0] != "_"
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
    parser = results.argument_parser(__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SCENARIOS))
    parser.add_argument("--seconds", type=float, default=4, help="measured period of each sample")
    parser.add_argument("--repeats", type=int, default=1)
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
    results.write(results.new_result("scenarios", found), options.out)


if __name__ == "__main__":
    main()
