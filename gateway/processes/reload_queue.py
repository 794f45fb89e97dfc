"""Reloading in the parent: who may ask for what, the file itself, and how each end is told.

Rule: one at a time, in the order in which they were asked for; who asks for the file while a reload goes on
is answered by the next.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sized
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from gateway.additions.entries import Edit
from gateway.config.diff import ReloadOutcome
from gateway.config.load import load_config
from gateway.config.problems import Problem
from gateway.config.schema import Config

LOOK_EVERY_S = 1.0

logger = logging.getLogger("gateway")


class Source(msgspec.Struct, frozen=True):
    """Where the config comes from. environment: what its placeholders are filled from."""

    path: Path
    environment: Mapping[str, str]

    async def read(self) -> Config:
        """As `gateway check` reads it. Raises: ConfigError."""
        # A file system may be slow, and the parent has children to look after.
        return await asyncio.to_thread(load_config, self.path, self.environment)

    def look(self) -> tuple[int, int, int] | None:
        """What changes with the file, also where another is put in its place; None while there is none."""
        try:
            told = self.path.stat()
        except OSError:
            return None
        return told.st_mtime_ns, told.st_size, told.st_ino


# What may be asked for: that the file is read again, that others' additions are followed, or one of our own.
Work: TypeAlias = Literal["file", "added"] | Edit
Tell: TypeAlias = Callable[[ReloadOutcome], None]


class ReloadQueue:
    """Runs one reload after another, for whoever asks."""

    def __init__(self, reload: Callable[[Work], Awaitable[ReloadOutcome]]) -> None:
        self._reload = reload
        self._asked = asyncio.Event()
        self._waiting: list[tuple[Work, Tell]] = []

    def ask(self, work: Work = "file", tell: Tell = lambda _: None) -> None:
        """Have it done. tell: called with the outcome."""
        self._waiting.append((work, tell))
        self._asked.set()

    async def done(self, work: Work) -> ReloadOutcome:
        """Have it done, and wait."""
        ended: asyncio.Future[ReloadOutcome] = asyncio.get_running_loop().create_future()
        self.ask(work, lambda outcome: None if ended.done() else ended.set_result(outcome))
        return await ended

    async def keep(self) -> None:
        """Do what is asked for; runs until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            waiting, self._waiting = self._waiting, []
            for work, tells in _together(waiting):
                outcome = await self._reload(work)
                for tell in tells:
                    tell(outcome)


def _together(waiting: Iterable[tuple[Work, Tell]]) -> list[tuple[Work, list[Tell]]]:
    """Who asked for the same is answered by one; an edit is done for each who asked."""
    found: list[tuple[Work, list[Tell]]] = []
    shared: dict[str, list[Tell]] = {}
    for work, tell in waiting:
        if isinstance(work, str) and work in shared:
            shared[work].append(tell)
            continue
        found.append((work, [tell]))
        if isinstance(work, str):
            shared[work] = found[-1][1]
    return found


class WorkerAcks:
    """What workers said of the reloads that are going on, each by its number.

    A worker that ends is no hindrance: it is started again with what the others follow.
    """

    def __init__(self) -> None:
        self._following: dict[int, dict[int, asyncio.Future[str | None]]] = {}
        self._draining: dict[int, dict[int, asyncio.Future[str | None]]] = {}

    async def followed(self, number: int, workers: Iterable[int], timeout_s: float) -> dict[int, str]:
        """Wait until these have answered; why those did not follow that did not, by worker."""
        loop = asyncio.get_running_loop()
        self._draining[number] = {one: loop.create_future() for one in workers}
        waits = self._following[number] = {one: loop.create_future() for one in workers}
        if waits:
            await asyncio.wait(waits.values(), timeout=timeout_s)
        del self._following[number]
        told = {one: wait.result() if wait.done() else "it does not answer" for one, wait in waits.items()}
        return {one: problem for one, problem in told.items() if problem is not None}

    async def drained(self, number: int, timeout_s: float) -> None:
        """Wait until no call goes by what that reload left out, or until none can any more."""
        try:
            if waits := self._draining[number]:
                await asyncio.wait(waits.values(), timeout=timeout_s)
        finally:
            self.forget_drained(number)

    def forget_drained(self, number: int) -> None:
        """Nobody waits for what that reload left out."""
        del self._draining[number]

    def heard_followed(self, number: int, worker: int, problem: str | None) -> None:
        """A worker follows, or tells why not."""
        _resolve(self._following.get(number, {}).get(worker), problem)

    def heard_drained(self, number: int, worker: int) -> None:
        """A worker has drained what a reload left out."""
        _resolve(self._draining.get(number, {}).get(worker), None)

    def gone(self, worker: int) -> None:
        """A worker has ended."""
        for going_on in (*self._following.values(), *self._draining.values()):
            _resolve(going_on.get(worker), None)


def _resolve(waiter: "asyncio.Future[str | None] | None", problem: str | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(problem)


async def watch(source: Source, changed: Callable[[], None]) -> None:
    """Tell of each change of the file once it lies still; runs until cancelled."""
    known = seen = source.look()
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        now = source.look()
        # Half a file is not read: what was written to since the last look is looked at once more.
        if now is not None and now == seen and now != known:
            known = now
            changed()
        seen = now


def without_a_key(wanted: Config, *, has_first_key: bool) -> list[Problem]:
    """Nobody could call any more, and a key that is printed once cannot be made behind a banner."""
    if wanted.tenants or has_first_key or wanted.quotas.store != "memory":
        return []
    message = "without any tenant a first key stands in, and that is made at start: restart the gateway"
    return [Problem("tenants", message)]


# How the end of each kind of work is told. An edit has somebody who is answered; a file has nobody.
ENDS = {
    "file": ("%s was reloaded: %s", "%s was not reloaded: %s; nothing has changed"),
    "added": ("%s: what others added was taken: %s", "%s: what others added was not taken: %s"),
    "edit": ("%s was done: %s", "%s was not done: %s; nothing has changed"),
}


def tell(source: Source, work: Work, outcome: ReloadOutcome) -> None:
    """How it ended, for the log: each difference, and no value of a text."""
    kind, what = (work, source.path) if isinstance(work, str) else ("edit", work)
    done, not_done = ENDS[kind]
    if kind == "added" and (outcome.kind == "unavailable" or outcome == ReloadOutcome()):
        # It is looked for each second; the store itself tells what it cannot read.
        return
    if outcome.problems:
        level = logging.INFO if kind == "edit" else logging.ERROR
        logger.log(level, not_done, what, _counted(outcome.problems, "problem"))
        for problem in outcome.problems:
            logger.log(level, "%s: %s", problem.path, problem.message)
        return
    logger.info(done, what, _counted(outcome.changes, "change"))
    for change in outcome.changes:
        logger.info("%s", change)
    for change in outcome.needs_restart:
        logger.warning("%s: needs a restart; it is left as it was", change)


def _counted(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
