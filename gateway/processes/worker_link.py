"""The worker's end of the pipes to its parent: another config and news come in, answers and signs of life
go out.
"""

import asyncio
import os
import select
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, TypeAlias, TypeVar

import msgspec

from gateway.additions.entries import Edit, Listing
from gateway.config.diff import ReloadOutcome
from gateway.config.schema import Config
from gateway.events import Observe, ProcessRestarted
from gateway.processes import messages as pipes

# An engine may have to load a model first.
RELOAD_TIMEOUT_S = 600.0
LISTING_TIMEOUT_S = 10.0
# The parent ends a worker of which it has heard nothing for several times as long.
ALIVE_EVERY_S = 1.0

# Serve another config with the engines of its upstreams; the task ends once everything it left out is closed.
ServeConfig: TypeAlias = Callable[[Config, Mapping[str, str]], "asyncio.Task[None]"]
_Answer = TypeVar("_Answer", ReloadOutcome, Listing)


class ParentLink:
    """status_fd: where the parent listens. Runs on the worker's event loop."""

    def __init__(self, status_fd: int) -> None:
        self._status_fd = status_fd
        self._follow: ServeConfig | None = None
        self._observe: Observe | None = None
        # Each is answered by what it asked for.
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()

    def listen(self, follow: ServeConfig, observe: Observe) -> None:
        """What serves another config, and who is told news; before this, nothing has been heard."""
        self._follow, self._observe = follow, observe

    def tell(self, report: pipes.ToParent) -> None:
        """One line to the parent."""
        line = msgspec.json.encode(report) + b"\n"
        while line:
            # A signal may cut a long one short.
            line = line[os.write(self._status_fd, line) :]

    async def tell_alive(self) -> None:
        """Say again and again that this loop turns; runs until cancelled."""
        room = select.poll()
        room.register(self._status_fd, select.POLLOUT)
        while True:
            # A parent that is stopped reads nothing: to wait for it would stop the calls too.
            if room.poll(0):
                self.tell(pipes.Heartbeat())
            await asyncio.sleep(ALIVE_EVERY_S)

    async def ask_reload(self) -> ReloadOutcome:
        """Have the parent read the file again. Raises: TimeoutError."""
        return await self._answer(pipes.ReloadRequest, RELOAD_TIMEOUT_S, ReloadOutcome)

    async def ask_edit(self, edit: Edit) -> ReloadOutcome:
        """Have the parent add or remove something. Raises: TimeoutError."""
        return await self._answer(
            lambda number: pipes.ReloadRequest(number, edit), RELOAD_TIMEOUT_S, ReloadOutcome
        )

    async def ask_listing(self) -> Listing:
        """What was added. Raises: TimeoutError."""
        return await self._answer(pipes.AskedListing, LISTING_TIMEOUT_S, Listing)

    async def _answer(
        self, question: Callable[[int], pipes.ToParent], timeout_s: float, kind: type[_Answer]
    ) -> _Answer:
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.tell(question(number))
            async with asyncio.timeout(timeout_s):
                told = await answer
        finally:
            del self._asked[number]
        assert isinstance(told, kind)
        return told

    def hear(self, line: bytes) -> None:
        """One line from the parent."""
        match msgspec.json.decode(line, type=pipes.ToWorker):
            case pipes.Follow() as wanted:
                self._serve(wanted)
            case pipes.ReloadReply(number, outcome):
                self._heard(number, outcome)
            case pipes.ListingReply(number, listing):
                self._heard(number, listing)
            case ProcessRestarted() as news:
                assert self._observe is not None
                self._observe(news)

    def _heard(self, number: int, told: ReloadOutcome | Listing) -> None:
        answer = self._asked.get(number)
        if answer is not None and not answer.done():
            answer.set_result(told)

    def _serve(self, wanted: pipes.Follow) -> None:
        assert self._follow is not None
        try:
            drained = self._follow(wanted.config, wanted.engines)
        except OSError as error:
            self.tell(pipes.ConfigAck(wanted.number, str(error)))
            return
        self.tell(pipes.ConfigAck(wanted.number))
        drained.add_done_callback(lambda _: self.tell(pipes.Drained(wanted.number)))
