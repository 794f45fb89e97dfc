"""Order in which replicas are tried. Pure: loads, a turn and a random source in, an order out."""

from collections.abc import Sequence
from random import Random
from typing import Literal

# The same values as `gateway.config.schema.Policy`, which this module does not import to stay a leaf. The
# type checker compares the two where an upstream opens its pool.
Policy = Literal["round_robin", "least_tokens", "two_choices"]


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
