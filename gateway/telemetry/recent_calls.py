"""Recent calls with their outcome, for the console: never content, as events contain none.

Each worker keeps its own. If there are several, each writes its own to a file of the workers' folder once a
second, so that any of them can list all.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from gateway.events import CallFinished, Event, Stage
from gateway.telemetry.totals import is_monitoring

logger = logging.getLogger(__name__)

CALLS_MAX = 250
WRITE_INTERVAL_S = 1.0
FILE_PREFIX = "recent-calls-"


class RecentCall(msgspec.Struct, frozen=True):
    """One call that ended. at_s: its end, in seconds since 1970. The other fields are those of the event."""

    at_s: float
    request_id: str
    route: str
    status: int
    outcome: str
    duration_s: float
    tenant: str | None
    key_id: str | None
    model: str | None
    operation: str | None
    inputs: int
    tokens: int
    stages: Mapping[Stage, float]
    replicas: tuple[str, ...] = ()
    attempts: int = 0
    upstream_status: str | None = None
    upstream_words: str | None = None


class RecentCalls:
    """The last calls of this worker, and of the others by their files.

    folder: shared by the workers, None in a gateway of one worker. clock: seconds since 1970.
    """

    def __init__(
        self, folder: Path | None = None, worker: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._file = None if folder is None else folder / f"{FILE_PREFIX}{worker}.json"
        self._clock = clock
        # Events are kept as they are: most are dropped before anybody reads them.
        self._ended: deque[tuple[float, CallFinished]] = deque(maxlen=CALLS_MAX)
        self._written_s = 0.0

    def observe(self, event: Event) -> None:
        """Keep a call, unless it belongs to monitoring."""
        if isinstance(event, CallFinished) and not is_monitoring(event.route):
            self._ended.append((self._clock(), event))

    def calls(self) -> list[RecentCall]:
        """Return the last calls of all workers, the newest first."""
        own = [_recent(at_s, event) for at_s, event in reversed(self._ended)]
        found = own + [call for file in self._other_files() for call in _read(file)]
        return sorted(found, key=lambda call: call.at_s, reverse=True)[:CALLS_MAX]

    def write(self) -> None:
        """Write this worker's calls for the others, if there are new ones."""
        if self._file is None or not self._ended or self._ended[-1][0] == self._written_s:
            return
        self._written_s = self._ended[-1][0]
        partial = self._file.with_suffix(".partial")
        try:
            partial.write_bytes(msgspec.json.encode([_recent(at_s, event) for at_s, event in self._ended]))
            partial.replace(self._file)
        except OSError as error:
            logger.warning("the recent calls could not be written: %s", error)

    async def write_forever(self) -> None:
        """Write every `WRITE_INTERVAL_S`, until cancelled."""
        while True:
            self.write()
            await asyncio.sleep(WRITE_INTERVAL_S)

    def _other_files(self) -> list[Path]:
        if self._folder is None:
            return []
        return [file for file in self._folder.glob(f"{FILE_PREFIX}*.json") if file != self._file]


def _recent(at_s: float, event: CallFinished) -> RecentCall:
    return RecentCall(
        round(at_s, 3),
        event.request_id,
        event.route,
        event.status,
        event.outcome,
        event.duration_s,
        event.tenant,
        event.key_id,
        event.model,
        event.operation,
        event.inputs,
        event.tokens,
        event.stages,
        event.replicas,
        event.attempts,
        event.upstream_status,
        event.upstream_words,
    )


def _read(file: Path) -> list[RecentCall]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[RecentCall])
    except (OSError, msgspec.MsgspecError):
        return []
