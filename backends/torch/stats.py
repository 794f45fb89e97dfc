"""Statistics of an engine, under TEI's names, and their wire format. Knows nothing of torch.

Source: /metrics of text-embeddings-inference 1.9.3: names, labels and the bounds of durations. A request of
TEI is a piece of work here; `te_embed_*` and `te_predict_*` count inputs.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

import msgspec

from backends.contract import Operation, Work
from backends.tracing import EnginePhases

# Operations that TEI counts as predictions.
PREDICTS = frozenset({Operation.RERANK, Operation.CLASSIFY})
# As in TEI: 35 bounds from 15 µs on, each 1.5 times its predecessor.
DURATION_BOUNDS_S = tuple(1.5e-5 * 1.5**step for step in range(35))
LENGTH_BOUNDS = tuple(float(2**step) for step in range(17))
SIZE_BOUNDS = tuple(float(2**step) for step in range(14))
TOKENS_BOUNDS = tuple(float(2**step) for step in range(4, 20))

_STEPS = {"": "total", "_tokenization": "tokenize", "_queue": "queue", "_inference": "forward"}
BOUNDS: dict[str, tuple[float, ...]] = {
    **{
        f"te_{kind}{step}_duration": DURATION_BOUNDS_S
        for kind in ("request", "embed", "predict")
        for step in _STEPS
    },
    "te_request_input_length": LENGTH_BOUNDS,
    "te_batch_next_size": SIZE_BOUNDS,
    "te_batch_next_tokens": TOKENS_BOUNDS,
}
# Label of each counter; "" for none.
COUNTERS: dict[str, str] = {
    "te_request_count": "method",
    "te_request_success": "method",
    "te_request_failure": "err",
    "te_embed_count": "",
    "te_embed_success": "",
    "te_predict_count": "",
    "te_predict_success": "",
}
# TEI's names of BackendError kinds.
FAILURES = {
    "invalid_input": "validation",
    "unsupported": "model_type",
    "overloaded": "overloaded",
    "timed_out": "dropped",
}


class Distribution(msgspec.Struct):
    """Histogram. counts: per bucket, not cumulative, one more than bounds. total: sum of all values."""

    counts: list[int]
    total: float = 0.0


class EngineStats(msgspec.Struct, frozen=True):
    """Statistics since the engine's start. queue_size: inputs queued now. counters: by name and label."""

    queue_size: int
    counters: dict[str, dict[str, int]]
    distributions: dict[str, Distribution]


def joined_stats(parts: Sequence[EngineStats]) -> EngineStats | None:
    """Return the statistics of several engines together, None of none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    counters: dict[str, Counter[str]] = {name: Counter() for name in COUNTERS}
    distributions = {name: Distribution([0] * (len(bounds) + 1)) for name, bounds in BOUNDS.items()}
    for part in parts:
        for name, counts in part.counters.items():
            counters[name].update(counts)
        for name, distribution in part.distributions.items():
            joined = distributions[name]
            joined.total += distribution.total
            joined.counts = [a + b for a, b in zip(joined.counts, distribution.counts, strict=True)]
    waiting = sum(part.queue_size for part in parts)
    return EngineStats(waiting, {name: dict(counts) for name, counts in counters.items()}, distributions)


class Stopwatch:
    """Times of one piece of work on this process' clocks. lengths: tokens of each input."""

    def __init__(self) -> None:
        self._started_ns = time.time_ns()
        self._started_s = time.perf_counter()
        self._moments_s: tuple[float, float, float] | None = None
        self.lengths: list[int] = []

    def note(self, tokenized_s: float, began_s: float, ended_s: float, lengths: list[int]) -> None:
        """Record the moments of computed work, in seconds of time.perf_counter."""
        self._moments_s = (tokenized_s, began_s, ended_s)
        self.lengths = lengths

    @property
    def phases(self) -> EnginePhases | None:
        """Duration of each phase, None if nothing was computed."""
        if self._moments_s is None:
            return None
        tokenized_s, began_s, ended_s = self._moments_s
        return EnginePhases(
            self._started_ns, tokenized_s - self._started_s, began_s - tokenized_s, ended_s - began_s
        )


class Recorder:
    """Counters of one model.

    Invariant: one thread at a time calls `batch`; only the event loop calls the rest.
    """

    def __init__(self) -> None:
        self._counters: dict[str, Counter[str]] = {name: Counter() for name in COUNTERS}
        self._distributions = {name: Distribution([0] * (len(b) + 1)) for name, b in BOUNDS.items()}

    def began(self, work: Work) -> None:
        """Count work that has arrived."""
        self._counters["te_request_count"][_method(work)] += 1
        if (kind := _kind(work)) is not None:
            self._counters[f"te_{kind}_count"][""] += len(work.inputs)

    def finished(self, work: Work, stopwatch: Stopwatch) -> None:
        """Count work that has succeeded."""
        self._counters["te_request_success"][_method(work)] += 1
        kind, phases = _kind(work), stopwatch.phases
        if kind is None or phases is None:
            return
        inputs = len(work.inputs)
        self._counters[f"te_{kind}_success"][""] += inputs
        for length in stopwatch.lengths:
            self._add("te_request_input_length", length)
        seconds = {"tokenize": phases.tokenize_s, "queue": phases.queue_s, "forward": phases.forward_s}
        seconds["total"] = sum(seconds.values())
        for step, phase in _STEPS.items():
            self._add(f"te_request{step}_duration", seconds[phase])
            self._add(f"te_{kind}{step}_duration", seconds[phase], inputs)

    def failed(self, kind: str) -> None:
        """Count work that was refused or has failed. kind: of a BackendError."""
        self._counters["te_request_failure"][FAILURES.get(kind, "inference")] += 1

    def batch(self, inputs: int, tokens: int) -> None:
        """Count a forward pass."""
        self._add("te_batch_next_size", inputs)
        self._add("te_batch_next_tokens", tokens)

    def snapshot(self, queue_size: int) -> EngineStats:
        """Return the statistics of this moment."""
        counters = {name: dict(counter) for name, counter in self._counters.items()}
        return EngineStats(queue_size, counters, self._distributions)

    def _add(self, name: str, value: float, times: int = 1) -> None:
        distribution = self._distributions[name]
        distribution.counts[bisect_left(BOUNDS[name], value)] += times
        distribution.total += value * times


def _method(work: Work) -> str:
    return "single" if len(work.inputs) == 1 else "batch"


def _kind(work: Work) -> str | None:
    return None if work.is_free else "predict" if work.kind in PREDICTS else "embed"


decoder = msgspec.msgpack.Decoder(EngineStats)
