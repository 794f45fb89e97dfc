"""Watch over replicas that stay slower than their peers. Pure.

Routing avoids a slow replica at once; operators learn of it only if it stays slow, because one large batch or
a compilation makes every replica slow for moments.
"""

from collections.abc import Mapping

import msgspec

# Upstream and replica.
ReplicaKey = tuple[str, str]


class _Spell(msgspec.Struct):
    """Time in which a replica is slow. since_s: its start. is_reported: operators know of it."""

    since_s: float
    is_reported: bool = False


class SlowWatch:
    """Replicas that are slow now. factor, for_s: as of `NotifySettings`."""

    def __init__(self, factor: float, for_s: float) -> None:
        self._factor = factor
        self._for_s = for_s
        self._spells: dict[ReplicaKey, _Spell] = {}

    def look(self, slowness: Mapping[ReplicaKey, float], now_s: float) -> list[ReplicaKey]:
        """Return the replicas that have been slow for long enough now, each once in its spell.

        slowness: of each replica that gets work, against the fastest of its upstream.
        """
        slow = [key for key, times in slowness.items() if times >= self._factor]
        self._spells = {key: self._spells.get(key) or _Spell(now_s) for key in slow}
        due = [
            key
            for key, spell in self._spells.items()
            if not spell.is_reported and now_s - spell.since_s >= self._for_s
        ]
        for key in due:
            self._spells[key].is_reported = True
        return due
