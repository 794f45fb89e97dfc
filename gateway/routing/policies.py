"""In which order replicas are tried. Pure: loads, a turn and a random source in, an order out."""

from collections.abc import Sequence
from random import Random

from gateway.config.schema import Policy


def ranked(policy: Policy, loads: Sequence[int], turn: int, random: Random) -> list[int]:
    """Indices of equal replicas, best first.

    loads: tokens in flight at each. turn: how many picks there have been.
    """
    match policy:
        case "round_robin":
            return [(turn + offset) % len(loads) for offset in range(len(loads))]
        case "least_tokens":
            return sorted(range(len(loads)), key=lambda i: (loads[i], (i - turn) % len(loads)))
        case "two_choices":
            return _two_choices(loads, random)


def _two_choices(loads: Sequence[int], random: Random) -> list[int]:
    """The better of two drawn at random first: nearly least loaded, and no herd."""
    shuffled = random.sample(range(len(loads)), len(loads))
    return sorted(shuffled[:2], key=lambda i: loads[i]) + shuffled[2:]
