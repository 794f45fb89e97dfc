"""Composition of files, jobs and their runner from a configuration."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.batches.chunk_run import RunParts
from gateway.batches.files import Files
from gateway.batches.folder import FolderObjects
from gateway.batches.job_store import JobStore
from gateway.batches.jobs import Jobs, OnChange
from gateway.batches.lifecycle import Lifecycle
from gateway.batches.line_server import LineServer
from gateway.batches.objects import Objects
from gateway.batches.permits import LinePermits
from gateway.batches.redis_store import open_redis
from gateway.batches.runner import Runner
from gateway.batches.service import Batches, Readiness
from gateway.batches.sqlite_store import open_sqlite
from gateway.batches.upkeep import Upkeep
from gateway.config.boot import AppBoot
from gateway.config.schema import BatchesSettings
from gateway.config.state_folder import JOBS_FILE
from gateway.store.redis_client import RedisClient

# Folder of the journals of chunks that run.
JOURNALS = "journals"
# No caller waits for a chunk, and a caller that lists its jobs can wait for a busy Redis.
STORE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class RunningBatches:
    """Files and jobs with what runs them. folder: of the journals."""

    service: Batches
    settings: BatchesSettings
    lifecycle: Lifecycle
    upkeep: Upkeep
    folder: Path

    def tasks(self, server: LineServer) -> list[Coroutine[Any, Any, None]]:
        """Return the background tasks, which run until they are cancelled."""
        parts = RunParts(
            self.lifecycle,
            server,
            LinePermits(self.settings.lines_in_flight, server.calls),
            self.folder,
            self.service.files.bounds,
            asyncio.Event(),
        )
        return [self._run(Runner(self.settings, parts))]

    async def _run(self, runner: Runner) -> None:
        """Run jobs, and look after what they leave, until cancelled."""
        upkeep = asyncio.create_task(self.upkeep.run())
        try:
            await self.service.readiness.ready.wait()
            await runner.run()
        finally:
            upkeep.cancel()
            await asyncio.gather(upkeep, return_exceptions=True)
            await self.lifecycle.table.aclose()


def open_batches(boot: AppBoot, on_change: OnChange) -> RunningBatches | None:
    """Return files and jobs, None if the configuration has none. on_change: as of `Jobs`. Raises: OSError."""
    settings = boot.config.batches
    if settings is None:
        return None
    folder = Path(settings.dir)
    objects: Objects
    if settings.bucket is None:
        objects = FolderObjects(folder)
    else:
        # An optional package.
        from gateway.batches.bucket import BucketObjects

        objects = BucketObjects(settings.bucket)
    store = _open_store(boot, folder)
    files = Files(settings, objects, store.table)
    jobs = Jobs(files, store, on_change)
    lifecycle = Lifecycle(files, jobs, store)
    journals = folder / JOURNALS
    readiness = Readiness()
    upkeep = Upkeep(files, lifecycle, journals, readiness)
    return RunningBatches(Batches(files, jobs, readiness), settings, lifecycle, upkeep, journals)


def _open_store(boot: AppBoot, folder: Path) -> JobStore:
    url = boot.config.quotas.store
    if url != "memory":
        return open_redis(RedisClient(url, STORE_TIMEOUT_S))
    return open_sqlite(Path(boot.jobs_file) if boot.jobs_file else folder / JOBS_FILE)
