"""Queue of reloads and edits in the parent, and the log lines about their outcomes.

Rule: one job runs at a time, in the order of requests. A request to read the file that arrives during a
reload is answered by the next one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sized
from pathlib import Path
from typing import Literal, TypeAlias

from gateway.config.diff import ReloadOutcome
from gateway.declared.additions import Edit
from gateway.telemetry.log_lines import WRITE_ALWAYS

logger = logging.getLogger("gateway")

# Read the file again, apply the additions of other gateways, apply the instances of this host, or apply an
# edit of our own.
ReloadJob: TypeAlias = Literal["file", "added", "instances"] | Edit
OnOutcome: TypeAlias = Callable[[ReloadOutcome], None]


class ReloadQueue:
    """Queue that runs one job at a time. reload: runs a job."""

    def __init__(self, reload: Callable[[ReloadJob], Awaitable[ReloadOutcome]]) -> None:
        self._reload = reload
        self._has_jobs = asyncio.Event()
        self._waiting: list[tuple[ReloadJob, OnOutcome]] = []

    def enqueue(self, job: ReloadJob = "file", on_outcome: OnOutcome = lambda _: None) -> None:
        """Add a job to the queue. on_outcome: called when it has finished."""
        self._waiting.append((job, on_outcome))
        self._has_jobs.set()

    async def run(self, job: ReloadJob) -> ReloadOutcome:
        """Add a job to the queue and wait for its outcome."""
        ended: asyncio.Future[ReloadOutcome] = asyncio.get_running_loop().create_future()
        self.enqueue(job, lambda outcome: None if ended.done() else ended.set_result(outcome))
        return await ended

    async def run_jobs(self) -> None:
        """Run jobs as they arrive, until cancelled."""
        while True:
            await self._has_jobs.wait()
            self._has_jobs.clear()
            waiting, self._waiting = self._waiting, []
            for job, callbacks in _merge_equal_jobs(waiting):
                outcome = await self._reload(job)
                for on_outcome in callbacks:
                    on_outcome(outcome)


def _merge_equal_jobs(
    waiting: Iterable[tuple[ReloadJob, OnOutcome]],
) -> list[tuple[ReloadJob, list[OnOutcome]]]:
    """Run equal reloads once and report to every requester; each edit is run by itself."""
    jobs: list[tuple[ReloadJob, list[OnOutcome]]] = []
    reloads: dict[str, list[OnOutcome]] = {}
    for job, on_outcome in waiting:
        if isinstance(job, str) and job in reloads:
            reloads[job].append(on_outcome)
            continue
        jobs.append((job, [on_outcome]))
        if isinstance(job, str):
            reloads[job] = jobs[-1][1]
    return jobs


# Log lines for success and failure, by kind of job. An edit's failure is reported to its operator as well; a
# file's only here.
LOG_LINES = {
    "file": ("%s was reloaded: %s", "%s was not reloaded: %s; nothing has changed"),
    "added": ("%s: applied additions from other gateways: %s", "%s: additions not applied: %s"),
    "instances": ("%s: instances joined or left: %s", "%s: instances not applied: %s"),
    "edit": ("%s was done: %s", "%s was not done: %s; nothing has changed"),
}


def log_outcome(path: Path, job: ReloadJob, outcome: ReloadOutcome) -> None:
    """Log the outcome of a job, with each difference but no text values. path: of router.yaml."""
    kind, subject = (job, path) if isinstance(job, str) else ("edit", job)
    success, failure = LOG_LINES[kind]
    if kind in ("added", "instances") and (outcome.kind == "unavailable" or outcome == ReloadOutcome()):
        # Repeated every second; the store itself logs unreadable additions.
        return
    if outcome.problems:
        level = logging.INFO if kind == "edit" else logging.ERROR
        logger.log(level, failure, subject, _count(outcome.problems, "problem"), extra=WRITE_ALWAYS)
        for problem in outcome.problems:
            logger.log(level, "%s", problem, extra=WRITE_ALWAYS)
        return
    logger.info(success, subject, _count(outcome.changes, "change"), extra=WRITE_ALWAYS)
    for change in outcome.changes:
        logger.info("%s", change, extra=WRITE_ALWAYS)
    for change in outcome.needs_restart:
        logger.warning("%s: needs a restart; it was not applied", change, extra=WRITE_ALWAYS)


def _count(items: Sized, noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
