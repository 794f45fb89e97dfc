"""Number of batches that may be in flight to one replica at once, learned from completed batches. Pure.

More batches in flight than the replica works on only wait inside it, where nothing can overtake them; fewer
leave it idle. The window therefore alternates between its size and a larger or smaller one and compares the
throughput, in spells during which the window was full all the time, or more batches were in flight than the
smaller size allows. The larger size is kept if its extra slots bring a fair part of the throughput that they
promise. The sizes alternate so that outside changes affect both equally, and several spells of each even out
chance. Until a larger size is rejected for the first time, the window doubles after one spell of each.

Refusals shrink the window. Once they have ended it doubles, without measuring, back to its size before them,
or to a smaller one if they come again within a minute.
"""

# Few slots: a server that computes one batch at a time does best if calls share batches.
SIZE_START = 4
SIZE_MAX = 64
# One batch at work and one ready: with fewer a replica idles while a reply and the next batch travel.
SIZE_MIN = 2
# A spell lasts for at least this many windows' worth of batches, and at least this long.
SPELL_WINDOWS = 3
SPELL_MIN_S = 0.25
# Spells at each of the two sizes before the decision. One of each is enough if the larger size is clearly
# worth it.
SPELLS = 3
# Share of the promised gain that a larger window must bring to be kept: half as many slots again, 13 % more.
WORTHWHILE_GAIN = 0.25
CLEAR_GAIN = 0.7
# Pause after neither a larger nor a smaller size was better; it doubles each time.
REST_S = 2.0
REST_MAX_S = 60.0
# Time between two doublings after refusals.
RECOVERY_STEP_S = 0.5


class _SizeRecord:
    """Throughput measured at one size."""

    def __init__(self) -> None:
        self.spells = 0
        self.tokens = 0
        self.seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.spells += 1
        self.tokens += tokens
        self.seconds += seconds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Window:
    """Adaptive limit on batches in flight.

    fixed: a configured size, which never changes. start: the first size of one that is learned.
    """

    def __init__(self, fixed: int | None = None, *, start: int = SIZE_START) -> None:
        self._is_fixed = fixed is not None
        self._first_size = start
        self._started_s: float | None = None
        self._skip = self._batches = self._tokens = 0
        # The most batches in flight in this spell, and in all spells of the larger size; and how many batches
        # at the larger size found no more in flight than the smaller size allows.
        self._spell_peak = self._larger_peak = self._unfilled = 0
        self._start_at(fixed or start)

    def _start_at(self, size: int) -> None:
        self.size = size
        self._settled = size
        self._candidate: int | None = None
        self._is_growing = self._is_new = True
        self._misses = 0
        self._rest_s = REST_S
        self._resting_until_s = 0.0
        self._cut_s: float | None = None
        self._refused_until_s = self._growth_from_s = 0.0
        self._pause_s = REST_S
        # After refusals: the size to return to now, and the one to return to a minute after the last.
        self._next_goal = self._last_goal = 0
        self._compare_with(None)

    def record_batch(self, tokens: int, now_s: float, in_flight: int, *, was_full: bool) -> None:
        """Learn from a completed batch.

        in_flight: batches in flight, including this one. was_full: no more batches could have been in flight.
        """
        if self._is_fixed or now_s < self._resting_until_s:
            return
        # A larger window that all callers together cannot fill still shows its gain in throughput.
        tries_larger = self.size > self._settled
        if not (in_flight > self._settled if tries_larger else was_full):
            # Nearly always, of an idle replica, nothing has begun that could be discarded.
            if tries_larger or self._unfilled or self._skip or self._started_s is not None:
                self._discard_spell(now_s, tries_larger=tries_larger)
            return
        if self._skip > 0:
            self._skip -= 1
            return
        if self._started_s is None:
            if self._candidate is None:
                self._compare_with(self._next_candidate())
            self._started_s = now_s
            return
        self._batches += 1
        self._tokens += tokens
        self._spell_peak = max(self._spell_peak, in_flight)
        took_s = now_s - self._started_s
        if self._batches >= SPELL_WINDOWS * self.size and took_s >= SPELL_MIN_S:
            self._end_spell(took_s, now_s)

    def record_refusal(self, now_s: float, sent_s: float | None = None) -> None:
        """Shrink the window and pause learning: the replica reported that it is full.

        sent_s: when the refused batch was sent. Batches sent before the last cut carry no new information.
        """
        cut_s = self._cut_s
        if self._is_fixed or (sent_s is not None and cut_s is not None and sent_s <= cut_s):
            return
        smaller = max(1, self._settled * 2 // 3)
        # Many refusals at a time count once.
        if now_s >= self._refused_until_s:
            comes_again = cut_s is not None and now_s - cut_s < REST_MAX_S
            self._pause_s = min(REST_MAX_S, self._pause_s * 2) if comes_again else REST_S
            self._next_goal = min(self._settled, self.size * 2 // 3) if comes_again else self._settled
            self._last_goal = max(self._last_goal, self._settled)
        self._settled = smaller
        self._is_new = False
        self._misses = 0
        self._cut_s = now_s
        self._refused_until_s = self._resting_until_s = self._growth_from_s = now_s + self._pause_s
        self._compare_with(None)

    def recover(self, now_s: float) -> None:
        """Grow after refusals; called with each completed batch, also with those that teach nothing else."""
        if self._cut_s is None or now_s < self._growth_from_s:
            return
        if now_s - self._cut_s >= REST_MAX_S:
            self._next_goal, self._last_goal = max(self._next_goal, self._last_goal), 0
        if self._settled >= self._next_goal:
            self._next_goal = 0
            return
        self._settled = min(self._next_goal, self._settled * 2)
        self._growth_from_s = self._resting_until_s = now_s + RECOVERY_STEP_S
        self._compare_with(None)

    def restart(self) -> None:
        """Forget the measurements, because the replica has restarted and may behave differently."""
        if not self._is_fixed:
            self._start_at(self._first_size)

    def _discard_spell(self, now_s: float, *, tries_larger: bool) -> None:
        """Start the spell again: a window that was not full shows nothing.

        A larger size that callers repeatedly do not fill counts as a miss.
        """
        self._begin_spell(0)
        self._unfilled += tries_larger
        if self._unfilled >= SPELL_WINDOWS * self.size:
            self._reject_candidate(now_s)

    def _compare_with(self, candidate: int | None) -> None:
        self._candidate = candidate
        self.size = self._settled
        self._larger_peak = self._unfilled = 0
        self._records = {size: _SizeRecord() for size in (self._settled, candidate) if size is not None}
        self._begin_spell(0)

    def _begin_spell(self, skip: int) -> None:
        """Begin a spell. skip: number of batches sent at another size that come back first."""
        self._skip = skip
        self._started_s = None
        self._batches = self._tokens = self._spell_peak = 0

    def _end_spell(self, took_s: float, now_s: float) -> None:
        assert self._candidate is not None
        record = self._records[self.size]
        record.add(self._tokens, took_s)
        if self.size > self._settled:
            self._larger_peak = max(self._larger_peak, self._spell_peak)
        if self.size == self._candidate and self._decide(now_s):
            return
        previous = self.size
        self.size = self._candidate if self.size == self._settled else self._settled
        self._begin_spell(max(previous, self.size))

    def _next_candidate(self) -> int:
        """Return the next size: twice as many slots at first, later half as many again, or a third fewer."""
        if self._settled <= SIZE_MIN:
            self._is_growing = True
        elif self._settled >= SIZE_MAX:
            self._is_growing = False
        if self._is_growing:
            more = self._settled if self._is_new else max(1, self._settled // 2)
            return min(SIZE_MAX, self._settled + more)
        return max(SIZE_MIN, self._settled * 2 // 3)

    def _decide(self, now_s: float) -> bool:
        """Settle on the better of the two sizes; return False while that is not known yet."""
        assert self._candidate is not None
        # What was measured since counts more than the size before refusals.
        self._last_goal = 0
        small, large = sorted((self._settled, self._candidate))
        promised_gain = (self._larger_peak or large) / small - 1
        gain_share = (self._records[large].rate / self._records[small].rate - 1) / promised_gain
        is_clear = self._is_new or gain_share >= CLEAR_GAIN
        if self._records[self._candidate].spells < SPELLS and not is_clear:
            return False
        if (large if gain_share >= WORTHWHILE_GAIN else small) == self._candidate:
            # Keep no more slots than were seen to be of use.
            self._settled = self._larger_peak or self._candidate
            self._misses, self._rest_s = 0, REST_S
            self._compare_with(self._next_candidate())
            return True
        self._reject_candidate(now_s)
        return True

    def _reject_candidate(self, now_s: float) -> None:
        """Try the other direction next, or rest if neither direction was better.

        One spell may have been chance: a new window tries half as many slots again next.
        """
        if self._is_new:
            self._is_new = False
        else:
            self._is_growing = not self._is_growing
            self._misses += 1
        if self._misses < 2:
            self._compare_with(self._next_candidate())
        else:
            self._rest(now_s)

    def _rest(self, now_s: float) -> None:
        self._misses = 0
        self._resting_until_s = now_s + self._rest_s
        self._rest_s = min(REST_MAX_S, self._rest_s * 2)
        self._compare_with(None)
