"""Times of one call, as `server-timing` shows them, and its attempts at replicas."""

import time
from typing import TYPE_CHECKING

from backends.contract import Work
from backends.contract.errors import BackendError
from gateway.events import Stage

if TYPE_CHECKING:
    # OpenTelemetry is loaded only where calls are traced.
    from gateway.telemetry.tracing import CallTrace

# Replicas named in one log line; a call of 2,048 inputs may have been at any number of them.
REPLICAS_MAX = 8
# Characters of an input that are looked for in an upstream's words. A shorter quotation shows nothing.
QUOTED_CHARACTERS = 16
# A word as short as this is no secret, and stands in many errors.
SHORTEST_CHARACTERS = 6
HIDDEN = "[input]"


class AttemptRecord:
    """Attempts that carried a part of one call.

    attempts: their number. replicas: those that were tried, in the order of their first attempt.
    upstream_status, upstream_words: of the last answer that was no success. shares_tokens: its tokens are a
    share of those of an upstream request, by size.
    """

    __slots__ = ("attempts", "replicas", "shares_tokens", "upstream_status", "upstream_words")

    def __init__(self) -> None:
        self.attempts = 0
        self.replicas: tuple[str, ...] = ()
        self.upstream_status: str | None = None
        self.upstream_words: str | None = None
        self.shares_tokens = False

    def add(self, replica: str) -> None:
        """Count an attempt at a replica."""
        self.attempts += 1
        if replica not in self.replicas and len(self.replicas) < REPLICAS_MAX:
            self.replicas = (*self.replicas, replica)

    def withdraw(self) -> None:
        """Take back the last attempt, which sent nothing."""
        self.attempts -= 1
        if not self.attempts:
            self.replicas = ()

    def share_tokens(self) -> None:
        """Record that the tokens of the call are a share of those of an upstream request."""
        self.shares_tokens = True

    def add_failure(self, error: BackendError) -> None:
        """Record what the upstream answered to an attempt."""
        if error.upstream_status is not None or error.detail:
            self.upstream_status = error.upstream_status
            self.upstream_words = error.detail or None


def hide_inputs(error: BackendError, work: Work) -> None:
    """Replace the parts of an upstream's words that quote an input, because no log line contains inputs."""
    if error.detail:
        error.detail = without_quotations(error.detail, _texts_of(work))


def without_quotations(words: str, texts: list[str]) -> str:
    """Return the words with each part that quotes a text replaced.

    A short text is hidden where it stands whole. Of a long one each quotation of 31 characters is found, as
    it contains one of the pieces of `QUOTED_CHARACTERS` that the words are compared in.
    """
    for text in texts:
        if SHORTEST_CHARACTERS <= len(text) < QUOTED_CHARACTERS:
            words = words.replace(text, HIDDEN)
    long_texts = [text for text in texts if len(text) >= QUOTED_CHARACTERS]
    kept: list[str] = []
    done = start = 0
    while start + QUOTED_CHARACTERS <= len(words):
        piece = words[start : start + QUOTED_CHARACTERS]
        quoted = next((text for text in long_texts if piece in text), None)
        if quoted is None:
            start += QUOTED_CHARACTERS
            continue
        first, last = _extended(words, start, quoted, quoted.index(piece))
        kept += [words[done : max(done, first)], HIDDEN]
        done = start = last
    return "".join([*kept, words[done:]])


def _extended(words: str, start: int, text: str, at: int) -> tuple[int, int]:
    """Return the ends of a quotation, a piece of which is at `start`, and at `at` in its text."""
    first, last, before, after = start, start + QUOTED_CHARACTERS, at, at + QUOTED_CHARACTERS
    while first > 0 and before > 0 and words[first - 1] == text[before - 1]:
        first, before = first - 1, before - 1
    while last < len(words) and after < len(text) and words[last] == text[after]:
        last, after = last + 1, after + 1
    return first, last


def _texts_of(work: Work) -> list[str]:
    """Return the distinct texts of a piece of work."""
    texts = [getattr(work, "query", "")]
    for item in work.inputs:
        texts += [item] if isinstance(item, str) else [part for part in item if isinstance(part, str)]
    return [*dict.fromkeys(filter(None, texts))]


class Timeline:
    """Laps of one call on the monotonic clock, in seconds, and the labels that its stages found out.

    started_s: on time.perf_counter. trace: the call's trace, None if calls are not traced. attempts: of its
    slices at replicas.
    """

    def __init__(self, started_s: float | None = None) -> None:
        self._last_s = time.perf_counter() if started_s is None else started_s
        self.started_s = self._last_s
        self.laps: dict[Stage, float] = {}
        self.model: str | None = None
        self.operation: str | None = None
        self.trace: CallTrace | None = None
        self.attempts = AttemptRecord()

    def follow(self, trace: "CallTrace") -> None:
        """Record the stages in a trace too."""
        self.trace = trace

    def name(self, model: str | None, operation: str | None) -> None:
        """Set the labels of the call."""
        self.model, self.operation = model, operation

    def lap(self, stage: Stage) -> None:
        """Attribute the time since the last lap to this stage."""
        now_s = time.perf_counter()
        self.laps[stage] = self.laps.get(stage, 0.0) + now_s - self._last_s
        if self.trace is not None:
            self.trace.stage(stage, self._last_s, now_s)
        self._last_s = now_s

    def move(self, source: Stage, target: Stage, seconds: float) -> None:
        """Move part of one stage's time to another, such as time in the queue from `upstream` to `queue`."""
        moved = min(seconds, self.laps.get(source, 0.0))
        self.laps[source] = self.laps.get(source, 0.0) - moved
        self.laps[target] = self.laps.get(target, 0.0) + moved

    def server_timing(self) -> str:
        """Return the laps as a Server-Timing header, durations in milliseconds."""
        return ", ".join([f"{stage};dur={seconds * 1000:.2f}" for stage, seconds in self.laps.items()])

    def milliseconds(self, stage: Stage) -> int:
        """Round one stage to milliseconds, for TEI's x-*-time headers."""
        return round(self.laps.get(stage, 0.0) * 1000)

    def total_s(self) -> float:
        """Sum all laps."""
        return sum(self.laps.values())
