"""The threads that compute on a device, for all models there, in the order in which they are asked.

On a processor two passes beside each other, each with its share of the cores, do more than one after the
other with all of them: threads of a team wait for each other at the end of every operation, and for whatever
else takes a core from one of them. A pass that is alone has all cores but those that resting teams keep.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread, local
from typing import TypeAlias, TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Something to do there; True where it wants to be asked again, after all others.
Turn: TypeAlias = Callable[[], bool]

BESIDE_ON_CPU = 2


class ForwardThreads:
    """cores: how many there are for all of them; None is as many as torch takes by itself. count: how many
    turns are taken at once.

    OpenMP gives every thread that computes a team of its own. More threads than cores in all teams, and each
    sleeps between any two operations instead of spinning: a short text took twice as long. So none of these
    ends, nobody else computes, and whoever is alone leaves room for the teams of those that rest: of 2 cores
    it has both, of 8 five. Only a warm-up takes more than that, where others compute beside it.
    """

    def __init__(self, device: torch.device, cores: int | None = None) -> None:
        cores = cores or torch.get_num_threads()
        self.count = min(BESIDE_ON_CPU, cores) if device.type == "cpu" else 1
        self._share = cores // self.count
        # The others keep their teams while they rest.
        self._alone = cores - (self.count - 1) * (self._share - 1)
        # Guards who waits and who rests.
        self._lock = Lock()
        self._waiting: deque[Turn] = deque()
        self._waiting_for_first: deque[Turn] = deque()
        self._resting = set(range(self.count))
        self._handed: list[SimpleQueue[Turn]] = [SimpleQueue() for _ in range(self.count)]
        self._own = local()
        for place in range(self.count):
            Thread(target=self._run, args=(place,), name=f"forward-{place}", daemon=True).start()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Have a function run there once."""
        future, turn = self._asked(function)
        self.enter(turn)
        return future

    def warm_up(self, function: Callable[[], T]) -> "Future[T]":
        """Have a function run there by each size of team: compiled code is for one of them."""

        def by_each() -> T:
            self._take(self._share)
            function()
            self._take(self._alone)
            return function()

        future, turn = self._asked(by_each)
        with self._lock:
            # Only the first has teams of both sizes.
            self._waiting_for_first.append(turn)
            self._deal()
        return future

    def enter(self, turn: Turn) -> None:
        """Have a turn taken."""
        with self._lock:
            self._waiting.append(turn)
            self._deal()

    def take_cores(self) -> None:
        """Called there, before a pass: as many as there are for one that is alone, else a share of them.

        Only the first ever has a larger team than its share; whoever comes while nobody computes is given to
        the first.
        """
        with self._lock:
            is_alone = self._own.place == 0 and len(self._resting) == self.count - 1
        self._take(self._alone if is_alone else self._share)

    def _asked(self, function: Callable[[], T]) -> "tuple[Future[T], Turn]":
        future: Future[T] = Future()

        def turn() -> bool:
            try:
                self.take_cores()
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
                future.set_exception(error)
            return False

        return future, turn

    def _take(self, team: int) -> None:
        if team != self._own.team:
            torch.set_num_threads(team)
            self._own.team = team

    def _deal(self) -> None:
        while self._resting:
            place = min(self._resting)
            waiting = self._waiting_for_first if place == 0 and self._waiting_for_first else self._waiting
            if not waiting:
                break
            self._resting.discard(place)
            self._handed[place].put(waiting.popleft())

    def _run(self, place: int) -> None:
        # ReloadRequest once, a thread has its own number of threads from there on, whatever others are given.
        self._own.place, self._own.team = place, torch.get_num_threads()
        while True:
            turn = self._handed[place].get()
            try:
                wants_more = turn()
            except Exception:
                # Whoever comes next still needs this thread.
                logger.exception("a turn broke")
                wants_more = False
            with self._lock:
                self._resting.add(place)
                if wants_more:
                    self._waiting.append(turn)
                self._deal()
            # Nothing of it stays here while this thread rests: it may be all that still holds a model.
            del turn
