"""Budget for the attempts that a lane adds to those its callers cause. Pure: time is an argument.

A retry or a hedge is work that no caller requested, and additional work worsens an overload.
Each costs one unit of a budget that recent first attempts fill.
"""

HALF_LIFE_S = 10.0
# Lets a quiet lane retry its first failures.
FREE_ATTEMPTS = 10.0


class RetryBudget:
    """Decaying counts of first and added attempts. share: added attempts allowed per first attempt."""

    def __init__(self, share: float, now_s: float) -> None:
        self._share = share
        self._first = 0.0
        self._added = 0.0
        self._last_s = now_s

    def add_first_attempt(self, now_s: float) -> None:
        """Count a batch that is tried for the first time."""
        self._decay(now_s)
        self._first += 1

    def try_spend(self, now_s: float) -> bool:
        """Return True and count one added attempt if the budget allows it."""
        self._decay(now_s)
        allowed = self._added + 1 <= self._first * self._share + FREE_ATTEMPTS
        self._added += allowed
        return allowed

    def _decay(self, now_s: float) -> None:
        factor = 0.5 ** ((now_s - self._last_s) / HALF_LIFE_S)
        self._first *= factor
        self._added *= factor
        self._last_s = now_s
