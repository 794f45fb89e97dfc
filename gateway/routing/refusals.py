"""Knowledge from a replica's refusals: the bytes that a request may have, and whether permits are taken.

Pure: time and chance are arguments.
"""

# A smaller request that is refused for its size shows no limit on size: no server has such a low one.
REFUSED_BYTES_MIN = 16_384
# A bound that was learned is tested again after this time: the server or its proxy may have a new limit.
LEARNED_FOR_S = 600.0
# Pause after a batch for which the replica had no permits; it doubles until a batch is computed.
PAUSE_MIN_S = 0.02
PAUSE_MAX_S = 0.5
PAUSES_MAX = 5


class Refusals:
    """Refusals of one replica.

    learned_bytes: most bytes of inputs in one request, None if it refused no size. is_paused: it had no
    permits for a batch, and is given no batch for a while; other clients may hold its permits.
    """

    __slots__ = ("_learned_s", "is_paused", "learned_bytes", "pauses")

    def __init__(self) -> None:
        self.learned_bytes: int | None = None
        self.is_paused = False
        self.pauses = 0
        self._learned_s = 0.0

    def learn_size(self, refused_bytes: int, now_s: float) -> bool:
        """Lower the bound on bytes to half of a refused request; return whether that changed it."""
        learned = refused_bytes // 2
        known = self.learned_bytes
        if refused_bytes < REFUSED_BYTES_MIN or (known is not None and known <= learned):
            return False
        self.learned_bytes, self._learned_s = learned, now_s
        return True

    def forget_old_size(self, now_s: float) -> None:
        """Forget a bound on bytes that was learned long ago."""
        if self.learned_bytes is not None and now_s - self._learned_s >= LEARNED_FOR_S:
            self.learned_bytes = None

    def pause(self, chance: float) -> float | None:
        """Begin a pause and return its length, or None if there is one already.

        chance: from 0 to 1, so that gateways that were refused together do not come back together.
        """
        if self.is_paused:
            return None
        pause_s = min(PAUSE_MAX_S, PAUSE_MIN_S * float(2**self.pauses))
        self.is_paused, self.pauses = True, min(self.pauses + 1, PAUSES_MAX)
        return pause_s * (1 + chance) / 2

    def end_pauses(self) -> None:
        """End the pause: a batch was computed and gave back its permits."""
        self.is_paused, self.pauses = False, 0
