"""How many tokens an interactive batch may be joined from, so that it is done in time. Pure.

Everyone in a batch waits for all of it: past a target time, joining more calls costs each of them more than
it saves the replica. But a batch costs something however small it is: where that alone takes longer than the
target, smaller batches would make everybody wait longer.
"""

TARGET_S = 0.25
START_TOKENS = 4096
LEAST_TOKENS = 256
MOST_TOKENS = 1 << 20
# What is known of earlier batches fades by this much with each.
KEPT = 0.95
# Batches whose sizes differ by less than this share tell nothing of what a batch costs by itself.
SPREAD = 0.1


class BatchSizer:
    """Learnt from how long batches take: a line through their times by their tokens."""

    def __init__(self) -> None:
        self.tokens = START_TOKENS
        self._count = self._tokens = self._squares = self._seconds = self._products = 0.0

    def finished(self, tokens: int, took_s: float) -> None:
        """A batch of so many tokens came back; a small one by itself tells nothing of a full one."""
        self._count = self._count * KEPT + 1
        self._tokens = self._tokens * KEPT + tokens
        self._squares = self._squares * KEPT + tokens * tokens
        self._seconds = self._seconds * KEPT + took_s
        self._products = self._products * KEPT + tokens * took_s
        if tokens * 2 < self.tokens:
            return
        most = max(LEAST_TOKENS, min(MOST_TOKENS, self._best()))
        self.tokens = int(max(self.tokens * 4 / 5, min(self.tokens * 5 / 4, most)))

    def _best(self) -> float:
        """As many as take the target time, and at least as many as take as long as an empty batch."""
        mean_tokens, mean_s = self._tokens / self._count, self._seconds / self._count
        variance = self._squares / self._count - mean_tokens**2
        token_s = mean_s / max(1.0, mean_tokens)
        if variance > (SPREAD * mean_tokens) ** 2:
            token_s = (self._products / self._count - mean_tokens * mean_s) / variance
        fixed_s = max(0.0, mean_s - token_s * mean_tokens)
        time_s = max(TARGET_S - fixed_s, fixed_s)
        # Compared before it is divided: a time that does not depend on tokens allows any number.
        return MOST_TOKENS if token_s * MOST_TOKENS <= time_s else time_s / token_s
