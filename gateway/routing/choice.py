"""Choice between the equal replicas of an upstream: the order in which they are tried, and their speed. Pure.

A policy orders the replicas by their tokens in flight. Tokens alone say nothing of a replica that takes a
hundred times as long as its twin for each: it would keep its share of the calls. So loads are weighted by the
slowness of each replica, learned from the batches that it completed. Replicas whose speeds differ by less
than `SLOW_FACTOR` count as equal, so that noise does not decide between them.
"""

from collections.abc import Sequence
from random import Random
from typing import Literal

# The same values as `gateway.config.schema.Policy`, which this module does not import to stay a leaf. The
# type checker compares the two where an upstream opens its pool.
Policy = Literal["round_robin", "least_tokens", "two_choices"]
# Weight of the newest batch, and of one that is faster than the record: a replica that has recovered is used
# again after few batches.
NEWEST_SHARE = 0.2
FASTER_SHARE = 0.5
# Weight of a batch that took longer than the fastest replica usually does.
SLOWER_SHARE = 0.01
# Batches before the record of a replica counts.
SAMPLES_MIN = 4
SLOW_FACTOR = 3.0
# A replica that is passed over gets one of so many batches, which shows whether it has recovered.
TRIAL_EVERY = 200


class BatchTimes:
    """Times that batches take at the fastest replica, by the tokens in flight when they are sent.

    A batch of a few tokens takes longer for each than a large one, so that only alike ones are compared.
    """

    __slots__ = ("_fastest_s",)

    def __init__(self) -> None:
        # By the number of binary digits of the tokens in flight.
        self._fastest_s: dict[int, float] = {}

    def slowness(self, took_s: float, tokens_in_flight: int) -> float:
        """Return how many times longer a batch took than alike ones at the fastest replica; learn from it."""
        size = tokens_in_flight.bit_length()
        fastest_s = self._fastest_s.setdefault(size, took_s)
        share = FASTER_SHARE if took_s < fastest_s else SLOWER_SHARE
        self._fastest_s[size] = fastest_s + (took_s - fastest_s) * share
        return took_s / fastest_s if fastest_s > 0 else 1.0


class Pace:
    """Slowness of one replica, as a running mean over its batches."""

    __slots__ = ("_samples", "_slowness")

    def __init__(self) -> None:
        self._slowness = 0.0
        self._samples = 0

    def add(self, slowness: float) -> None:
        """Record a completed batch. slowness: as `BatchTimes` returns it."""
        if not self._samples:
            self._slowness = slowness
        share = FASTER_SHARE if slowness < self._slowness else NEWEST_SHARE
        self._slowness += (slowness - self._slowness) * share
        self._samples += 1

    @property
    def slowness(self) -> float | None:
        """Times that a batch takes as long as at the fastest replica, None before there are enough."""
        return self._slowness if self._samples >= SAMPLES_MIN else None


def slowdowns(paces: Sequence[Pace]) -> list[float] | None:
    """Return how many times slower each replica is than the fastest; 1 for those that count as equal.

    A replica without a record counts as equal. Returns None if all do.
    """
    slow = [pace.slowness for pace in paces]
    known = [slowness for slowness in slow if slowness is not None]
    fastest = min(known, default=0.0)
    if not fastest or max(known) < SLOW_FACTOR * fastest:
        return None
    return [
        1.0 if slowness is None or slowness < SLOW_FACTOR * fastest else slowness / fastest
        for slowness in slow
    ]


def relative_slowness(paces: Sequence[Pace]) -> list[float]:
    """Return how many times slower each replica is than the fastest; 1 for those without a record."""
    slow = [pace.slowness for pace in paces]
    fastest = min((slowness for slowness in slow if slowness is not None), default=0.0)
    return [slowness / fastest if slowness is not None and fastest else 1.0 for slowness in slow]


def is_worth_waiting(cost: float, costs: Sequence[float]) -> bool:
    """Return whether a batch is done sooner by waiting for room elsewhere than at a replica with this cost.

    costs: tokens in flight and those of a batch, times the slowdown, of each replica that gets work.
    """
    return cost > SLOW_FACTOR * min(costs, default=cost)


def rank_replicas(policy: Policy, loads: Sequence[float], turn: int, random: Random) -> list[int]:
    """Return the indices of equal replicas, best first.

    loads: tokens in flight at each replica, weighted by its slowness. turn: how many replicas have been
    picked so far.
    """
    match policy:
        case "round_robin":
            return [(turn + offset) % len(loads) for offset in range(len(loads))]
        case "least_tokens":
            return sorted(range(len(loads)), key=lambda i: (loads[i], (i - turn) % len(loads)))
        case "two_choices":
            return _two_choices(loads, random)


def _two_choices(loads: Sequence[float], random: Random) -> list[int]:
    """Put the better of two random replicas first: nearly least loaded, without a herd on one replica."""
    shuffled = random.sample(range(len(loads)), len(loads))
    return sorted(shuffled[:2], key=lambda i: loads[i]) + shuffled[2:]
