"""The worker's end of the pipes to its parent: another config and news come in, answers go out."""

import asyncio
import os
from itertools import count

import msgspec

from gateway import pipes
from gateway.app import Follow
from gateway.changes import Outcome
from gateway.events import Observe, ProcessRestarted

# An engine may have to load a model first.
RELOAD_TIMEOUT_S = 600.0


class ParentLink:
    """status_fd: where the parent listens. Runs on the worker's event loop."""

    def __init__(self, status_fd: int) -> None:
        self._status_fd = status_fd
        self._follow: Follow | None = None
        self._observe: Observe | None = None
        self._asked: dict[int, asyncio.Future[Outcome]] = {}
        self._numbers = count()

    def listen(self, follow: Follow, observe: Observe) -> None:
        """What serves another config, and who is told news; before this, nothing has been heard."""
        self._follow, self._observe = follow, observe

    def tell(self, report: pipes.ToParent) -> None:
        """One line to the parent."""
        os.write(self._status_fd, msgspec.json.encode(report) + b"\n")

    async def ask_reload(self) -> Outcome:
        """Have the parent read the file again. Raises: TimeoutError."""
        number = next(self._numbers)
        answer: asyncio.Future[Outcome]
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.tell(pipes.Asked(number))
            async with asyncio.timeout(RELOAD_TIMEOUT_S):
                return await answer
        finally:
            del self._asked[number]

    def hear(self, line: bytes) -> None:
        """One line from the parent."""
        match msgspec.json.decode(line, type=pipes.ToWorker):
            case pipes.Follow() as wanted:
                self._serve(wanted)
            case pipes.Answered(number, outcome):
                answer = self._asked.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(outcome)
            case pipes.Ping(number):
                self.tell(pipes.Pong(number))
            case ProcessRestarted() as news:
                assert self._observe is not None
                self._observe(news)

    def _serve(self, wanted: pipes.Follow) -> None:
        assert self._follow is not None
        try:
            drained = self._follow(wanted.config, wanted.engines)
        except OSError as error:
            self.tell(pipes.Followed(wanted.number, str(error)))
            return
        self.tell(pipes.Followed(wanted.number))
        drained.add_done_callback(lambda _: self.tell(pipes.Drained(wanted.number)))
