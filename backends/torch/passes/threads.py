"""Threads that compute on a device, for all its models, in the order of their requests.

On a processor two passes at once, each on its share of the cores, do more than one after the other on all
cores: the threads of a team wait for each other at the end of every operation, and for any other work that
takes a core from one of them. A pass that runs alone gets all cores except those that idle teams keep.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread, local
from typing import TypeAlias, TypeVar

import torch

from backends.torch.priority import lower_priority

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Unit of work on a thread; returns True to be run again, after all others that wait.
Turn: TypeAlias = Callable[[], bool]

PASSES_AT_ONCE = 2


class ForwardThreads:
    """Threads that compute on one device, and the sizes of their OpenMP teams.

    cores: number of cores for all of them, None for torch's own choice. On a GPU it is one: its passes leave
    little to the processor. count: turns that run at once. is_background: their work may wait for that of all
    other threads.

    OpenMP gives every thread that computes a team of its own. With more threads than cores in all teams, each
    thread sleeps between two operations instead of spinning, and a short text took twice as long. Therefore
    these threads never end, no other thread computes, and a pass that runs alone leaves room for the idle
    teams: of 2 cores it gets both, of 8 five. Only a warm-up takes more, while others compute.
    """

    def __init__(
        self, device: torch.device, cores: int | None = None, *, is_background: bool = False
    ) -> None:
        cores = (cores or torch.get_num_threads()) if device.type == "cpu" else 1
        self._device, self._cores, self._is_background = device, cores, is_background
        self._background: ForwardThreads | None = None
        # A GPU computes one: two at once delay single callers more than they help bulk.
        self.count = min(PASSES_AT_ONCE, cores)
        self._shared_team = cores // self.count
        # The other threads keep their teams while they are idle.
        self._alone_team = cores - (self.count - 1) * (self._shared_team - 1)
        # Guards the waiting turns and the set of idle threads.
        self._lock = Lock()
        self._waiting: deque[Turn] = deque()
        self._waiting_for_first: deque[Turn] = deque()
        self._idle = set(range(self.count))
        self._inboxes: list[SimpleQueue[Turn]] = [SimpleQueue() for _ in range(self.count)]
        self._own = local()
        for place in range(self.count):
            Thread(target=self._run, args=(place,), name=f"forward-{place}", daemon=True).start()

    @property
    def background(self) -> "ForwardThreads":
        """Threads of lower priority for the same cores; these threads themselves on a GPU.

        The operating system divides the cores, so that work on them delays no other. They are started by
        their first use: a process without pictures needs none.
        """
        if self._device.type != "cpu":
            return self
        with self._lock:
            if self._background is None:
                self._background = ForwardThreads(self._device, self._cores, is_background=True)
            return self._background

    @property
    def shares_cores(self) -> bool:
        """True if two turns at once divide the cores that compute."""
        return self._device.type == "cpu"

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function once on one of the threads."""
        future, turn = self._turn_of(function)
        self.enter(turn)
        return future

    def warm_up(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function with each size of team, because compiled code is specific to one."""

        def with_each_team() -> T:
            if self._shared_team != self._alone_team:
                self._use_team(self._shared_team)
                function()
            self._use_team(self._alone_team)
            return function()

        future, turn = self._turn_of(with_each_team)
        with self._lock:
            # Only the first thread has teams of both sizes.
            self._waiting_for_first.append(turn)
            self._assign()
        return future

    def enter(self, turn: Turn) -> None:
        """Queue a turn."""
        with self._lock:
            self._waiting.append(turn)
            self._assign()

    def take_cores(self) -> None:
        """Set this thread's team for the next pass: all available cores if it runs alone, else its share.

        Only the first thread ever has the larger team; a turn that arrives while all are idle goes to it.
        """
        with self._lock:
            is_alone = self._own.place == 0 and len(self._idle) == self.count - 1
        self._use_team(self._alone_team if is_alone else self._shared_team)

    def _turn_of(self, function: Callable[[], T]) -> "tuple[Future[T], Turn]":
        future: Future[T] = Future()

        def turn() -> bool:
            try:
                self.take_cores()
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
                future.set_exception(error)
            return False

        return future, turn

    def _use_team(self, team: int) -> None:
        if team != self._own.team:
            torch.set_num_threads(team)
            self._own.team = team

    def _assign(self) -> None:
        while self._idle:
            place = min(self._idle)
            waiting = self._waiting_for_first if place == 0 and self._waiting_for_first else self._waiting
            if not waiting:
                break
            self._idle.discard(place)
            self._inboxes[place].put(waiting.popleft())

    def _run(self, place: int) -> None:
        if self._is_background:
            lower_priority()
        # After this first read a thread has its own team size, whatever other threads set theirs to.
        self._own.place, self._own.team = place, torch.get_num_threads()
        while True:
            turn = self._inboxes[place].get()
            try:
                wants_more = turn()
            except Exception:
                # The next turn still needs this thread.
                logger.exception("a turn failed")
                wants_more = False
            with self._lock:
                self._idle.add(place)
                if wants_more:
                    self._waiting.append(turn)
                self._assign()
            # Drop the reference while the thread is idle: it may be the last one to a model.
            del turn
