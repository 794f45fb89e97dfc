"""How many batches may be in flight to one replica at once, learnt from what comes back. Pure.

The window starts small and grows while more in flight means more tokens a second; where it does not, more
in flight only means waiting inside the replica, where nobody can be let past. Compared are spells in
which the window was full all the time: others tell nothing.
"""

START = 4
CEILING = 64
# A spell lasts for so many windows' worth of batches, and not less than this long.
SPELL_WINDOWS = 3
SPELL_S = 0.25
# A larger window is kept only for this much more a second; noise is less, mostly.
GAIN = 1.05
# A smaller window is kept where it costs no more than this.
LOSS = 0.98
# After a step that brought nothing, the window rests; each time twice as long.
REST_S = 2.0
REST_LONGEST_S = 60.0


class Window:
    """fixed: the size that the config sets, which nothing changes."""

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed is not None
        self._reset(fixed or START)

    def _reset(self, size: int) -> None:
        self.size = self._before = size
        self._rate: float | None = None
        self._growing = True
        self._rest_s = REST_S
        self._resting_until_s = 0.0
        self._spell_started_s: float | None = None
        self._batches = self._tokens = 0

    def finished(self, tokens: int, now_s: float, *, full: bool) -> None:
        """A batch came back well. full: no more could have been in flight until now."""
        if self._fixed:
            return
        if not full:
            self._spell_started_s = None
            return
        if self._spell_started_s is None:
            self._begin(now_s)
            return
        self._batches += 1
        self._tokens += tokens
        took_s = now_s - self._spell_started_s
        if self._batches >= SPELL_WINDOWS * self.size and took_s >= SPELL_S:
            self._learn(self._tokens / took_s, now_s)
            self._begin(now_s)

    def refused(self, now_s: float) -> None:
        """The replica said that it is full: less, and no more for a while."""
        if not self._fixed:
            self._settle(max(1, self.size * 2 // 3), None, now_s)

    def shrink_to_one(self) -> None:
        """A replica that has just come back is given one batch, and more as it proves itself."""
        if not self._fixed:
            self._reset(1)

    def _begin(self, now_s: float) -> None:
        self._spell_started_s = now_s
        self._batches = self._tokens = 0

    def _learn(self, rate: float, now_s: float) -> None:
        if now_s < self._resting_until_s:
            self._rate = rate
        elif self._rate is None or self.size == self._before:
            self._rate = rate
            self._step()
        elif self.size > self._before:
            self._judge_growth(rate, now_s)
        else:
            kept = rate >= self._rate * LOSS
            self._settle(self.size if kept else self._before, rate if kept else self._rate, now_s)

    def _judge_growth(self, rate: float, now_s: float) -> None:
        assert self._rate is not None
        if rate >= self._rate * GAIN:
            self._before, self._rate, self._rest_s = self.size, rate, REST_S
            self._step()
        else:
            self._settle(self._before, self._rate, now_s)

    def _step(self) -> None:
        """Try another size: up by half while that helps, then down by one, in turns."""
        self._before = self.size
        if self._growing or self.size == 1:
            self.size = min(CEILING, self.size + max(1, self.size // 2))
        else:
            self.size -= 1

    def _settle(self, size: int, rate: float | None, now_s: float) -> None:
        self.size = self._before = size
        self._rate = rate
        self._growing = not self._growing
        self._resting_until_s = now_s + self._rest_s
        self._rest_s = min(REST_LONGEST_S, self._rest_s * 2)
