"""Choice of the models to evict for another one, and of those that are idle. Pure.

Knows nothing of torch: names, sizes and times in, names out.
"""

from collections.abc import Sequence

import msgspec


class Resident(msgspec.Struct, frozen=True):
    """Model in memory. used_s: end of its last work. busy: it has work now."""

    name: str
    memory_bytes: int
    used_s: float
    busy: bool = False


def models_to_evict(residents: Sequence[Resident], needed_bytes: int, budget_bytes: int) -> list[str] | None:
    """Return the models to evict, in order, to free `needed_bytes`; None if all of them are not enough.

    The least recently used goes first. Busy models go last, because their work has to end first.
    """
    if needed_bytes > budget_bytes:
        return None
    held_bytes = sum(model.memory_bytes for model in residents)
    evicted = []
    for model in sorted(residents, key=lambda model: (model.busy, model.used_s)):
        if held_bytes + needed_bytes <= budget_bytes:
            break
        held_bytes -= model.memory_bytes
        evicted.append(model.name)
    return evicted


def idle_models(residents: Sequence[Resident], now_s: float, idle_s: float) -> list[str]:
    """Return the models that have had no work for `idle_s`."""
    return [model.name for model in residents if not model.busy and now_s - model.used_s >= idle_s]
