"""How many tokens an interactive batch may be joined from, so that it is done in time. Pure.

Everyone in a batch waits for all of it: past a target time, joining more calls costs each of them more than
it saves the replica.
"""

TARGET_S = 0.25
START_TOKENS = 4096
LEAST_TOKENS = 256
MOST_TOKENS = 1 << 20


class Portion:
    """Learnt from how long batches take."""

    def __init__(self) -> None:
        self.tokens = START_TOKENS

    def finished(self, tokens: int, took_s: float) -> None:
        """A batch of so many tokens came back; a small one tells nothing of a full one."""
        if tokens * 2 < self.tokens:
            return
        if took_s > TARGET_S:
            self.tokens = max(LEAST_TOKENS, self.tokens * 4 // 5)
        elif took_s * 2 < TARGET_S:
            self.tokens = min(MOST_TOKENS, self.tokens * 5 // 4)
