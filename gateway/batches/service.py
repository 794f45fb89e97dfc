"""Files and jobs of one process, as the API uses them."""

import asyncio
from dataclasses import dataclass, field

from gateway.batches.files import Files
from gateway.batches.jobs import Jobs


@dataclass(slots=True)
class Readiness:
    """State of files and jobs in this process.

    problem: why they cannot be served, None if they can. ready: set once they could be.
    """

    problem: str | None = "files and batches are being read; try again"
    ready: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Batches:
    """Files and jobs, and whether they can be served."""

    files: Files
    jobs: Jobs
    readiness: Readiness
