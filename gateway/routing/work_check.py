"""Checks whether a replica works: a plain text that it computes after it has failed a batch.

A batch may fail because of one of its inputs. The failure counts against the replica only if it fails plain
work too, and against the input only if the replica completes plain work.
"""

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

from backends.contract import Capabilities, Embed, Operation, Rerank, Work
from backends.contract.errors import BackendError, InvalidWork, UnsupportedWork
from gateway.routing.replica import Replica

CHECK_TIMEOUT_S = 5.0
# A replica that failed a check is not asked again for this long.
FAILED_FOR_S = 0.5
PLAIN_TEXT = "A plain sentence shows whether a model server still works."


class WorkChecks:
    """Checks of the replicas of one lane, at most one of each at a time. clock: the event loop's."""

    def __init__(self, clock: Callable[[], float], timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = min(CHECK_TIMEOUT_S, timeout_s)
        self._running: dict[Replica, asyncio.Task[BackendError | None]] = {}
        # The last failure of each replica, and its moment.
        self._failures: WeakKeyDictionary[Replica, tuple[BackendError, float]] = WeakKeyDictionary()

    async def fault_of(self, replica: Replica, since_s: float) -> BackendError | None:
        """Return why a replica does not work; None if it has completed work since a moment, or does now."""
        if replica.answered_s is not None and replica.answered_s >= since_s:
            return None
        failure = self._failures.get(replica)
        if failure is not None and self._clock() - failure[1] < FAILED_FOR_S:
            return failure[0]
        task = self._running.get(replica)
        if task is None:
            task = self._running[replica] = asyncio.create_task(self._check(replica))
        return await asyncio.shield(task)

    async def _check(self, replica: Replica) -> BackendError | None:
        started_s = self._clock()
        try:
            await self._compute(replica)
        except (InvalidWork, UnsupportedWork):
            # A refusal is a response too.
            pass
        except BackendError as error:
            self._failures[replica] = (error, self._clock())
            return error
        finally:
            del self._running[replica]
        self._failures.pop(replica, None)
        now_s = self._clock()
        replica.plain_s = now_s - started_s
        replica.record_answer(now_s)
        return None

    async def _compute(self, replica: Replica) -> None:
        work = None if replica.capabilities is None else _plain_work(replica.capabilities)
        if work is None:
            await replica.backend.describe(self._timeout_s)
            return
        replica.check_width(work, await replica.backend.run(work, self._timeout_s))


def _plain_work(capabilities: Capabilities) -> Work | None:
    if Operation.EMBED in capabilities.operations:
        return Embed((PLAIN_TEXT,))
    return Rerank(PLAIN_TEXT, (PLAIN_TEXT,)) if Operation.RERANK in capabilities.operations else None
