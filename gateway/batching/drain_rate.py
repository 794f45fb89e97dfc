"""How fast a lane empties, so that a refused caller can be told when to come back. Pure."""

import math

# Half of what the rate knows is this old; a lane that changed pace is believed within seconds.
HALF_LIFE_S = 10.0
RETRY_AFTER_MAX_S = 60


class DrainRate:
    """Tokens finished a second, as an average in which the past fades. Asking changes nothing."""

    def __init__(self, now_s: float) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._last_s = now_s

    def finished(self, tokens: int, now_s: float) -> None:
        """Count tokens that left the lane."""
        self._tokens, self._seconds = self._faded(now_s)
        self._tokens += tokens
        self._last_s = now_s

    def retry_after_s(self, queued_tokens: int, now_s: float) -> int:
        """Whole seconds until this much has drained: at least 1, at most 60."""
        tokens, seconds = self._faded(now_s)
        if tokens <= 0 or seconds <= 0:
            return 1
        # Compared before it is divided: after a long idle time a quotient would be no finite number.
        if queued_tokens * seconds >= RETRY_AFTER_MAX_S * tokens:
            return RETRY_AFTER_MAX_S
        return max(1, math.ceil(queued_tokens * seconds / tokens))

    def _faded(self, now_s: float) -> tuple[float, float]:
        """Tokens and the seconds they took, both weighted by how long ago that was."""
        kept = 0.5 ** ((now_s - self._last_s) / HALF_LIFE_S)
        # The integral of the weights over the time since: it cannot grow past 14 s.
        new_seconds = HALF_LIFE_S / math.log(2) * (1 - kept)
        return self._tokens * kept, self._seconds * kept + new_seconds
