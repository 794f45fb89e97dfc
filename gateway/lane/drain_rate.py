"""Speed at which a lane empties, for the `retry-after` of refused calls. Pure."""

import math

# Half of the rate's weight is younger than this, so that it follows a change of pace within seconds.
HALF_LIFE_S = 10.0
RETRY_AFTER_MAX_S = 60


class DrainRate:
    """Completed tokens per second, as a decaying average. Reading it changes nothing."""

    def __init__(self, now_s: float) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._last_s = now_s

    def add(self, tokens: int, now_s: float) -> None:
        """Count tokens that a replica has completed."""
        self._tokens, self._seconds = self._decayed(now_s)
        self._tokens += tokens
        self._last_s = now_s

    def retry_after_s(self, queued_tokens: int, now_s: float) -> int:
        """Return the whole seconds until this many tokens have drained: at least 1, at most 60."""
        tokens, seconds = self._decayed(now_s)
        if tokens <= 0 or seconds <= 0:
            return 1
        # Compare before dividing: after a long idle time the quotient would not be finite.
        if queued_tokens * seconds >= RETRY_AFTER_MAX_S * tokens:
            return RETRY_AFTER_MAX_S
        return max(1, math.ceil(queued_tokens * seconds / tokens))

    def _decayed(self, now_s: float) -> tuple[float, float]:
        """Return the tokens and the seconds they took, both weighted by age."""
        factor = 0.5 ** ((now_s - self._last_s) / HALF_LIFE_S)
        # The integral of the weights over the time since; it cannot exceed 14 s.
        new_seconds = HALF_LIFE_S / math.log(2) * (1 - factor)
        return self._tokens * factor, self._seconds * factor + new_seconds
