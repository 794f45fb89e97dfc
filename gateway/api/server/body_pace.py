"""Time that the client of one connection has for a body."""

import asyncio


class BodyPace:
    """Time that a client has for a body: in all, and by its rate in each interval.

    A body that hardly moves takes memory from others. ends_s: when the time in all is over; from then on only
    a fast body goes on, which is the upload of a large file. bytes: that came in this interval.
    """

    check_s = 5.0
    bytes_per_s = 16 * 1024
    # As a body of 32 MiB needs about half of this to be in time, only uploads get here.
    fast_bytes_per_s = 1024 * 1024
    # A check this late was delayed by the gateway itself, which may not have read what has come.
    late_s = 1.0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._since_s = 0.0
        self._check_at_s = 0.0
        self.ends_s = 0.0
        self.bytes = 0

    def start(self, timeout_s: float) -> None:
        """Start the time of a body, of which some bytes have come with its head."""
        self._since_s = self._loop.time()
        self.ends_s = self._since_s + timeout_s

    def next_check_s(self) -> float:
        """Return the time until the next check."""
        now_s = self._loop.time()
        check_at_s = now_s + self.check_s
        self._check_at_s = min(check_at_s, self.ends_s) if now_s < self.ends_s else check_at_s
        return self._check_at_s - now_s

    def is_late(self, *, was_paused: bool) -> bool:
        """Return whether the time is over. was_paused: the gateway did not read for a part of it."""
        now_s = self._loop.time()
        bytes_per_s = self.fast_bytes_per_s if now_s >= self.ends_s else self.bytes_per_s
        needed = bytes_per_s * (now_s - self._since_s)
        is_slow = self.bytes < needed and not was_paused and now_s <= self._check_at_s + self.late_s
        self._since_s, self.bytes = now_s, 0
        return is_slow
