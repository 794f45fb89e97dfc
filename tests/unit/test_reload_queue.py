"""The reload queue runs one job after another, and merges equal reloads."""

import asyncio

from gateway.config.diff import ReloadOutcome
from gateway.processes.config_applier import ReloadJob, ReloadQueue
from tests.unit.test_config_applier import MORE, TWO


async def test_merges_equal_reloads_and_runs_every_edit() -> None:
    done: list[ReloadJob] = []
    answered: list[ReloadJob] = []

    async def do(job: ReloadJob) -> ReloadOutcome:
        done.append(job)
        return ReloadOutcome()

    reloads = ReloadQueue(do)
    requested: list[ReloadJob] = ["file", TWO, "file", "added", TWO, "added"]
    for job in requested:
        reloads.enqueue(job, lambda _, job=job: answered.append(job))  # type: ignore[misc]
    keeping = asyncio.create_task(reloads.run_jobs())
    await reloads.run(MORE)
    keeping.cancel()

    assert ["file", TWO, "added", TWO, MORE] == done
    assert sorted(map(str, requested)) == sorted(map(str, answered))
