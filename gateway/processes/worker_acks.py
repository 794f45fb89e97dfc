"""Confirmations by workers of the config updates in progress, each identified by its number."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import TypeAlias

Waiters: TypeAlias = dict[int, "asyncio.Future[str | None]"]


class WorkerAcks:
    """Confirmations that each worker has applied an update, and has drained everything that it removed.

    A worker that exits delays neither, because it restarts with the current config.
    """

    def __init__(self) -> None:
        self._applying: dict[int, Waiters] = {}
        self._draining: dict[int, Waiters] = {}

    async def wait_until_applied(
        self, number: int, workers: Iterable[int], timeout_s: float
    ) -> dict[int, str]:
        """Wait for these workers to apply an update, and return why some did not, by worker."""
        loop = asyncio.get_running_loop()
        workers = tuple(workers)
        self._draining[number] = {worker: loop.create_future() for worker in workers}
        waiters = self._applying[number] = {worker: loop.create_future() for worker in workers}
        if waiters:
            await asyncio.wait(waiters.values(), timeout=timeout_s)
        del self._applying[number]
        problems = {
            worker: waiter.result() if waiter.done() else "it does not answer"
            for worker, waiter in waiters.items()
        }
        return {worker: problem for worker, problem in problems.items() if problem is not None}

    async def wait_until_drained(self, number: int, timeout_s: float) -> None:
        """Wait until no request uses anything that an update removed, for at most this time."""
        try:
            if waiters := self._draining[number]:
                await asyncio.wait(waiters.values(), timeout=timeout_s)
        finally:
            self.ignore_drain(number)

    def ignore_drain(self, number: int) -> None:
        """Drop the drain of an update that nothing waits for."""
        del self._draining[number]

    def record_applied(self, number: int, worker: int, problem: str | None) -> None:
        """Record that a worker has applied an update; problem: why it has not."""
        _resolve(self._applying, number, worker, problem)

    def record_drained(self, number: int, worker: int) -> None:
        """Record that a worker has drained everything that an update removed."""
        _resolve(self._draining, number, worker, None)

    def record_exit(self, worker: int) -> None:
        """Stop waiting for a worker that has exited."""
        for pending in (self._applying, self._draining):
            for number in pending:
                _resolve(pending, number, worker, None)


def _resolve(pending: Mapping[int, Waiters], number: int, worker: int, problem: str | None) -> None:
    waiter = pending.get(number, {}).get(worker)
    if waiter is not None and not waiter.done():
        waiter.set_result(problem)
