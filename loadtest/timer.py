"""Callbacks at exact times.

uvloop's own timers tick in whole milliseconds, which would distort the measurement. Linux only: this uses the
kernel's timerfd, which the event loop reads like a file.
"""

import asyncio
import ctypes
import heapq
import os
import time
from collections.abc import Callable
from itertools import count

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Timer:
    """One kernel timer for any number of callbacks, on the clock of `time.monotonic()`."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._fire)

    def at(self, when_s: float, callback: Callable[[], None]) -> None:
        """Schedule a callback at or after `when_s`, never before."""
        heapq.heappush(self._due, (when_s, next(self._order), callback))
        if self._due[0][0] == when_s:
            self._arm(when_s)

    def close(self) -> None:
        """Drop all pending callbacks."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._due.clear()

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            heapq.heappop(self._due)[2]()
        if self._due:
            self._arm(self._due[0][0])

    def _arm(self, when_s: float) -> None:
        # A time of zero would disarm the timer.
        nanoseconds = max(1, round(when_s * 1e9))
        spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec(*divmod(nanoseconds, 1_000_000_000)))
        self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None)
