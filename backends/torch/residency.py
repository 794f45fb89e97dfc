"""Which models leave memory so that another finds room, and which because nobody asks for them. Pure.

Knows nothing of torch: names, sizes and times in, names out.
"""

from collections.abc import Sequence

import msgspec


class Resident(msgspec.Struct, frozen=True):
    """A model in memory. used_s: when it last had work. busy: whether it has some now."""

    name: str
    memory_bytes: int
    used_s: float
    busy: bool = False


def who_leaves(residents: Sequence[Resident], needed_bytes: int, budget_bytes: int) -> list[str] | None:
    """Who makes room for so many bytes more, in the order of leaving; None where nobody's leaving helps.

    The least recently used goes first, and who has work goes after all who have none: it has to end that.
    """
    if needed_bytes > budget_bytes:
        return None
    held_bytes = sum(one.memory_bytes for one in residents)
    leaving = []
    for one in sorted(residents, key=lambda one: (one.busy, one.used_s)):
        if held_bytes + needed_bytes <= budget_bytes:
            break
        held_bytes -= one.memory_bytes
        leaving.append(one.name)
    return leaving


def who_is_idle(residents: Sequence[Resident], now_s: float, idle_s: float) -> list[str]:
    """Who has had no work for so long."""
    return [one.name for one in residents if not one.busy and now_s - one.used_s >= idle_s]
