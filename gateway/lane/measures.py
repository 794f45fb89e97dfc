"""Measurements that completed batches give a lane: drain rate, size of a batch, quantiles of durations. Pure.

Interactive batches are sized so that one completes within a target time, because every call in a batch waits
for the whole batch. Past that time, joining more calls costs each of them more than it saves the replica. But
each batch has a fixed cost, however small it is. If that alone exceeds the target, smaller batches would only
increase the wait of every call.
"""

import math
from bisect import bisect_left, insort
from collections import deque

TARGET_S = 0.25
START_TOKENS = 4096
MIN_TOKENS = 256
MAX_TOKENS = 1 << 20
# Weight of earlier batches after each new one.
DECAY = 0.95
# Batches whose sizes differ by less than this share do not show a batch's fixed cost.
MIN_SPREAD = 0.1
# Half of the rate's weight is younger than this, so that it follows a change of pace within seconds.
HALF_LIFE_S = 10.0
RETRY_AFTER_MAX_S = 60
SAMPLES_MAX = 200
# With fewer samples the slowest of twenty is not known.
SAMPLES_MIN = 40


class BatchSizer:
    """Tokens of one interactive batch, from a line fitted to batches' durations by their tokens."""

    def __init__(self) -> None:
        self.tokens = START_TOKENS
        self._count = self._tokens = self._squares = self._seconds = self._products = 0.0

    def record_batch(self, tokens: int, took_s: float) -> None:
        """Learn from a completed batch; a small one alone shows nothing about a full one."""
        self._count = self._count * DECAY + 1
        self._tokens = self._tokens * DECAY + tokens
        self._squares = self._squares * DECAY + tokens * tokens
        self._seconds = self._seconds * DECAY + took_s
        self._products = self._products * DECAY + tokens * took_s
        if tokens * 2 < self.tokens:
            return
        best = max(MIN_TOKENS, min(MAX_TOKENS, self._best()))
        self.tokens = int(max(self.tokens * 4 / 5, min(self.tokens * 5 / 4, best)))

    def _best(self) -> float:
        """Return the tokens that fill the target time, or the fixed cost of a batch if that is longer."""
        mean_tokens, mean_s = self._tokens / self._count, self._seconds / self._count
        variance = self._squares / self._count - mean_tokens**2
        token_s = mean_s / max(1.0, mean_tokens)
        if variance > (MIN_SPREAD * mean_tokens) ** 2:
            token_s = (self._products / self._count - mean_tokens * mean_s) / variance
        fixed_s = max(0.0, mean_s - token_s * mean_tokens)
        time_s = max(TARGET_S - fixed_s, fixed_s)
        # Compare before dividing: a duration that does not depend on tokens allows any number of them.
        return MAX_TOKENS if token_s * MAX_TOKENS <= time_s else time_s / token_s


class DrainRate:
    """Completed tokens per second, as a decaying average. Reading it changes nothing."""

    def __init__(self, now_s: float) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._last_s = now_s

    def add(self, tokens: int, now_s: float) -> None:
        """Count tokens that a replica has completed."""
        self._tokens, self._seconds = self._decayed(now_s)
        self._tokens += tokens
        self._last_s = now_s

    def retry_after_s(self, queued_tokens: int, now_s: float) -> int:
        """Return the whole seconds until this many tokens have drained: at least 1, at most 60."""
        tokens, seconds = self._decayed(now_s)
        if tokens <= 0 or seconds <= 0:
            return 1
        # Compare before dividing: after a long idle time the quotient would not be finite.
        if queued_tokens * seconds >= RETRY_AFTER_MAX_S * tokens:
            return RETRY_AFTER_MAX_S
        return max(1, math.ceil(queued_tokens * seconds / tokens))

    def _decayed(self, now_s: float) -> tuple[float, float]:
        """Return the tokens and the seconds they took, both weighted by age."""
        factor = 0.5 ** ((now_s - self._last_s) / HALF_LIFE_S)
        # The integral of the weights over the time since; it cannot exceed 14 s.
        new_seconds = HALF_LIFE_S / math.log(2) * (1 - factor)
        return self._tokens * factor, self._seconds * factor + new_seconds


class Latencies:
    """Most recent durations, kept in order of arrival and sorted."""

    def __init__(self) -> None:
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, duration_s: float) -> None:
        """Record a duration and drop the oldest one past `SAMPLES_MAX`."""
        self._arrived.append(duration_s)
        insort(self._sorted, duration_s)
        if len(self._arrived) > SAMPLES_MAX:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]

    def quantile(self, share: float) -> float | None:
        """Return the duration that `share` of the samples do not exceed, or None with too few samples."""
        if len(self._sorted) < SAMPLES_MIN:
            return None
        return self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))]


class LaneMeasures:
    """Drain rate, batch size, and the latencies of batches with a single input."""

    def __init__(self, now_s: float) -> None:
        self.drain_rate = DrainRate(now_s)
        self.sizer = BatchSizer()
        self.single_latencies = Latencies()

    def record_batch(self, inputs: int, tokens: int, took_s: float, now_s: float) -> None:
        """Learn from a completed batch."""
        self.drain_rate.add(tokens, now_s)
        self.sizer.record_batch(tokens, took_s)
        if inputs == 1:
            self.single_latencies.add(took_s)
