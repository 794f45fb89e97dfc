"""Figures of a load: latencies in buckets of one percent, replies by status, and time by stage. Pure.

The memory does not grow with the number of calls.
"""

import math
from collections import Counter

import msgspec

# Each bucket is this much wider than the one below it, so a percentile is right within half a percent.
GROWTH = math.log(1.01)
LEAST_S = 1e-5
SHARES = (0.5, 0.9, 0.95, 0.99, 0.999)
EXAMPLE_CHARACTERS_MAX = 200
STAGES_MAX = 32


class Latencies:
    """Histogram of durations."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.most_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._buckets[round(math.log(max(seconds, LEAST_S)) / GROWTH)] += 1
        self.count += 1
        self.most_s = max(self.most_s, seconds)

    def quantile_s(self, share: float) -> float | None:
        """Return the duration that a share of all does not exceed, None if there are none."""
        if not self.count:
            return None
        below, rank = 0, math.ceil(share * self.count)
        for bucket in sorted(self._buckets):
            below += self._buckets[bucket]
            if below >= rank:
                return min(math.exp(bucket * GROWTH), self.most_s)
        return self.most_s


class CallEnd(msgspec.Struct, frozen=True):
    """End of one call. status: of HTTP, or the name of a connection's error. problem: empty for a good reply.

    took_s: since the call was due. stages: milliseconds by stage, as the server reports them.
    """

    status: str
    took_s: float
    texts: int = 0
    tokens: int = 0
    stages: dict[str, float] = {}
    problem: str = ""


class Figures:
    """Sums over the calls of a measured period.

    latencies: of good replies. by_second: the same for each second. examples: one problem for each status.
    late: how late the generator itself sent calls.
    """

    def __init__(self) -> None:
        self.latencies = Latencies()
        self.by_second: dict[int, Latencies] = {}
        self.statuses: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.stage_ms: dict[str, float] = {}
        self.late = Latencies()
        self.texts = self.tokens = self.good = self.unanswered = 0

    def add(self, end: CallEnd, second: int) -> None:
        """Add a call that ended in a second of the period."""
        self.statuses[end.status] += 1
        if end.problem:
            self.examples.setdefault(end.status, end.problem[:EXAMPLE_CHARACTERS_MAX])
            return
        self.good += 1
        self.texts += end.texts
        self.tokens += end.tokens
        self.latencies.add(end.took_s)
        self.by_second.setdefault(second, Latencies()).add(end.took_s)
        for name, duration_ms in end.stages.items():
            # A server may name other stages in each reply.
            if name in self.stage_ms or len(self.stage_ms) < STAGES_MAX:
                self.stage_ms[name] = self.stage_ms.get(name, 0.0) + duration_ms
