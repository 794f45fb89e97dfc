"""How many attempts a lane may add to those its callers cause. Pure: time is an argument.

A retry or a hedge is work that nobody asked for: under trouble it is what makes trouble worse. Each costs one
of a budget that recent first attempts fill.
"""

HALF_LIFE_S = 10.0
# So that the first failure of a quiet lane can be retried.
FREE = 10.0


class Budget:
    """share: extra attempts allowed for each first one."""

    def __init__(self, share: float, now_s: float) -> None:
        self._share = share
        self._first = 0.0
        self._extra = 0.0
        self._last_s = now_s

    def count_first(self, now_s: float) -> None:
        """A batch is tried for the first time."""
        self._fade(now_s)
        self._first += 1

    def take(self, now_s: float) -> bool:
        """Whether one more attempt may be made; if so, it is counted."""
        self._fade(now_s)
        allowed = self._extra + 1 <= self._first * self._share + FREE
        self._extra += allowed
        return allowed

    def _fade(self, now_s: float) -> None:
        kept = 0.5 ** ((now_s - self._last_s) / HALF_LIFE_S)
        self._first *= kept
        self._extra *= kept
        self._last_s = now_s
