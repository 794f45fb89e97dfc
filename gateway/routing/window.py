"""How many batches may be in flight to one replica at once, learnt from what comes back. Pure.

More in flight than the replica works on only means waiting inside it, where nobody can be let past; less
leaves it idle. So the size is compared with a larger or smaller one, by turns, in spells in which the window
was full all the time, or a larger one held more than the smaller could: the larger is kept where its slots
bring a fair part of what they promise. By turns, so that what changes meanwhile changes both; several spells
of each, so that chance evens out.
"""

# Few: a server that computes one batch at a time does best with calls that travel together.
START = 4
CEILING = 64
# One at work and one ready: with fewer a replica idles while a reply and the next batch travel.
FLOOR = 2
# A spell lasts for so many windows' worth of batches, and not less than this long.
SPELL_WINDOWS = 3
SPELL_S = 0.25
# So many spells at each of the two sizes decide; one of each, where the larger brings most of its promise.
SPELLS = 3
# The share of its slots' promise that a larger window must keep: half as many slots again, 13 % more.
WORTH = 0.25
PLAIN = 0.7
# After neither a larger nor a smaller one was better, the window rests; each time twice as long.
REST_S = 2.0
REST_LONGEST_S = 60.0


class _Spells:
    """What came back at one size."""

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0
        self.seconds = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Window:
    """fixed: the size that the config sets, which nothing changes."""

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed is not None
        self._started_s: float | None = None
        self._skip = self._batches = self._tokens = 0
        # The most that were in flight in this spell, and in those of the larger size; how many batches found
        # no more in flight there than the smaller size takes.
        self._held = self._most = self._unfilled = 0
        self._reset(fixed or START)

    def _reset(self, size: int) -> None:
        self.size = self._settled = size
        self._other: int | None = None
        self._growing = True
        self._misses = 0
        self._rest_s = REST_S
        self._resting_until_s = 0.0
        self._cut_s = -1.0
        self._compare(None)

    def finished(self, tokens: int, now_s: float, in_flight: int, *, full: bool) -> None:
        """A batch came back well. in_flight: how many were, with it. full: no more could have been."""
        if self._fixed or now_s < self._resting_until_s:
            return
        # A larger window that all callers together do not fill shows what it brings them, all the same.
        tries_larger = self.size > self._settled
        if not (in_flight > self._settled if tries_larger else full):
            self._not_counted(now_s, tries_larger=tries_larger)
            return
        if self._skip > 0:
            self._skip -= 1
            return
        if self._started_s is None:
            if self._other is None:
                self._compare(self._step())
            self._started_s = now_s
            return
        self._batches += 1
        self._tokens += tokens
        self._held = max(self._held, in_flight)
        took_s = now_s - self._started_s
        if self._batches >= SPELL_WINDOWS * self.size and took_s >= SPELL_S:
            self._learn(took_s, now_s)

    def _not_counted(self, now_s: float, *, tries_larger: bool) -> None:
        """What this spell has seen so far tells nothing; nor will a larger size that nobody needs."""
        self._begin(0)
        self._unfilled += tries_larger
        if self._unfilled >= SPELL_WINDOWS * self.size:
            self._missed(now_s)

    def refused(self, now_s: float, sent_s: float | None = None) -> None:
        """The replica said that it is full: less, and no more for a while.

        sent_s: when the batch was; those that were sent before the last cut tell nothing new.
        """
        if self._fixed or (sent_s is not None and sent_s <= self._cut_s):
            return
        self._settled = max(1, self._settled * 2 // 3)
        self._cut_s = now_s
        self._rest(now_s)

    def restart(self) -> None:
        """The replica has just come back: what was learnt of it may not hold any more."""
        if not self._fixed:
            self._reset(START)

    def _compare(self, other: int | None) -> None:
        self._other = other
        self.size = self._settled
        self._most = self._unfilled = 0
        self._spells = {size: _Spells() for size in (self._settled, other) if size is not None}
        self._begin(0)

    def _begin(self, skip: int) -> None:
        """A new spell; skip: batches that were sent at another size come back first."""
        self._skip = skip
        self._started_s = None
        self._batches = self._tokens = self._held = 0

    def _learn(self, took_s: float, now_s: float) -> None:
        assert self._other is not None
        seen = self._spells[self.size]
        seen.count += 1
        seen.tokens += self._tokens
        seen.seconds += took_s
        if self.size > self._settled:
            self._most = max(self._most, self._held)
        if self.size == self._other and self._decided(now_s):
            return
        before, self.size = self.size, self._other if self.size == self._settled else self._settled
        self._begin(max(before, self.size))

    def _step(self) -> int:
        """Another size to try: half as many again, or a third less."""
        if self._settled <= FLOOR:
            self._growing = True
        elif self._settled >= CEILING:
            self._growing = False
        if self._growing:
            return min(CEILING, self._settled + max(1, self._settled // 2))
        return max(FLOOR, self._settled * 2 // 3)

    def _decided(self, now_s: float) -> bool:
        """Take the better of the two sizes, once that is known."""
        assert self._other is not None
        small, large = sorted((self._settled, self._other))
        promised = (self._most or large) / small - 1
        share = (self._spells[large].rate / self._spells[small].rate - 1) / promised
        if self._spells[self._other].count < SPELLS and share < PLAIN:
            return False
        if (large if share >= WORTH else small) == self._other:
            # No more than was seen to be of use.
            self._settled = self._most or self._other
            self._misses, self._rest_s = 0, REST_S
            self._compare(self._step())
            return True
        self._missed(now_s)
        return True

    def _missed(self, now_s: float) -> None:
        """The other size was not better: the other way next, then a rest."""
        self._growing = not self._growing
        self._misses += 1
        if self._misses < 2:
            self._compare(self._step())
        else:
            self._rest(now_s)

    def _rest(self, now_s: float) -> None:
        self._misses = 0
        self._resting_until_s = now_s + self._rest_s
        self._rest_s = min(REST_LONGEST_S, self._rest_s * 2)
        self._compare(None)
