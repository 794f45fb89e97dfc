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
from gateway.batches.jobs import Jobs
from gateway.batches.line_server import LineServer
from gateway.batches.objects import Objects
from gateway.batches.redis_store import RedisStore
from gateway.batches.runner import Runner
from gateway.batches.sqlite_store import SqliteStore
from gateway.batches.upkeep import Upkeep
from gateway.config.boot import AppBoot
from gateway.config.schema import BatchesSettings
from gateway.config.state_folder import JOBS_FILE
from gateway.events import Observe
from gateway.store.redis_client import RedisClient

# Folder of the journals of chunks that run.
JOURNALS = "journals"
# No caller waits for a chunk, and a caller that lists its jobs can wait for a busy Redis.
STORE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Batches:
    """Files and jobs of one process."""

    settings: BatchesSettings
    files: Files
    jobs: Jobs
    upkeep: Upkeep
    folder: Path

    def tasks(self, server: LineServer) -> list[Coroutine[Any, Any, None]]:
        """Return the background tasks, which run until they are cancelled."""
        parts = RunParts(
            self.jobs,
            server,
            asyncio.Semaphore(self.settings.lines_in_flight),
            self.folder,
            self.files.bounds,
            asyncio.Event(),
        )
        return [self._run(Runner(self.settings, parts))]

    async def _run(self, runner: Runner) -> None:
        """Run jobs, and look after what they leave, until cancelled."""
        upkeep = asyncio.create_task(self.upkeep.run())
        try:
            await self.upkeep.ready.wait()
            await runner.run()
        finally:
            upkeep.cancel()
            await asyncio.gather(upkeep, return_exceptions=True)
            await self.files.store.aclose()


def open_batches(boot: AppBoot, observe: Observe) -> Batches | None:
    """Return files and jobs, None if the configuration has none. Raises: OSError."""
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
    files = Files(settings, objects, _open_store(boot, folder))
    jobs = Jobs(files, observe)
    journals = folder / JOURNALS
    return Batches(settings, files, jobs, Upkeep(files, jobs, journals), journals)


def _open_store(boot: AppBoot, folder: Path) -> JobStore:
    url = boot.config.quotas.store
    if url != "memory":
        return RedisStore(RedisClient(url, STORE_TIMEOUT_S))
    return SqliteStore(Path(boot.jobs_file) if boot.jobs_file else folder / JOBS_FILE)
