"""The reload queue runs one job after another, and merges equal reloads."""

import asyncio

from gateway.config.diff import ReloadOutcome
from gateway.processes.reload_queue import ReloadJob, ReloadQueue
from tests.unit.test_config_applier import MORE, TWO


async def test_who_asks_for_the_same_is_answered_by_one_and_each_edit_is_done() -> None:
    done: list[ReloadJob] = []
    told: list[ReloadJob] = []

    async def do(work: ReloadJob) -> ReloadOutcome:
        done.append(work)
        return ReloadOutcome()

    reloads = ReloadQueue(do)
    asked: list[ReloadJob] = ["file", TWO, "file", "added", TWO, "added"]
    for work in asked:
        reloads.enqueue(work, lambda _, work=work: told.append(work))  # type: ignore[misc]
    keeping = asyncio.create_task(reloads.run_jobs())
    await reloads.run(MORE)
    keeping.cancel()

    assert ["file", TWO, "added", TWO, MORE] == done
    assert sorted(map(str, asked)) == sorted(map(str, told))
