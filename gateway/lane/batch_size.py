"""Size of interactive batches, learned so that a batch completes within a target time. Pure.

Every call in a batch waits for the whole batch. Past the target time, joining more calls costs each of them
more than it saves the replica. But each batch has a fixed cost, however small it is. If that alone exceeds
the target, smaller batches would only increase the wait of every call.
"""

TARGET_S = 0.25
START_TOKENS = 4096
MIN_TOKENS = 256
MAX_TOKENS = 1 << 20
# Weight of earlier batches after each new one.
DECAY = 0.95
# Batches whose sizes differ by less than this share do not show a batch's fixed cost.
MIN_SPREAD = 0.1


class BatchSizer:
    """Tokens of one interactive batch, from a line fitted to batches' durations by their tokens."""

    def __init__(self) -> None:
        self.tokens = START_TOKENS
        self._count = self._tokens = self._squares = self._seconds = self._products = 0.0

    def record_batch(self, tokens: int, took_s: float) -> None:
        """Learn from a completed batch; a small one alone shows nothing about a full one."""
        self._count = self._count * DECAY + 1
        self._tokens = self._tokens * DECAY + tokens
        self._squares = self._squares * DECAY + tokens * tokens
        self._seconds = self._seconds * DECAY + took_s
        self._products = self._products * DECAY + tokens * took_s
        if tokens * 2 < self.tokens:
            return
        best = max(MIN_TOKENS, min(MAX_TOKENS, self._best()))
        self.tokens = int(max(self.tokens * 4 / 5, min(self.tokens * 5 / 4, best)))

    def _best(self) -> float:
        """Return the tokens that fill the target time, or the fixed cost of a batch if that is longer."""
        mean_tokens, mean_s = self._tokens / self._count, self._seconds / self._count
        variance = self._squares / self._count - mean_tokens**2
        token_s = mean_s / max(1.0, mean_tokens)
        if variance > (MIN_SPREAD * mean_tokens) ** 2:
            token_s = (self._products / self._count - mean_tokens * mean_s) / variance
        fixed_s = max(0.0, mean_s - token_s * mean_tokens)
        time_s = max(TARGET_S - fixed_s, fixed_s)
        # Compare before dividing: a duration that does not depend on tokens allows any number of them.
        return MAX_TOKENS if token_s * MAX_TOKENS <= time_s else time_s / token_s
