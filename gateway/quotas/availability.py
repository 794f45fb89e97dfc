"""Whether the shared store is there: a few misses in a row say no, one answer says yes. Pure."""

MISSES_MAX = 3


class Availability:
    """Counts misses; `away` is what decides between the store and the way without it."""

    def __init__(self) -> None:
        self._misses = 0

    @property
    def away(self) -> bool:
        """Whether it has been given up for now."""
        return self._misses >= MISSES_MAX

    def missed(self) -> bool:
        """Note a miss; True where this one changed the mode."""
        self._misses += 1
        return self._misses == MISSES_MAX

    def answered(self) -> bool:
        """Note an answer; True where this one changed the mode."""
        was_away = self.away
        self._misses = 0
        return was_away
