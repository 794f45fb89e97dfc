"""What an engine counts of itself, under the names that TEI gives it, and how that travels to the gateway.

Source: text-embeddings-inference 1.9.3, its /metrics: names, labels and the bounds of durations. A request
there is a piece of work here; `te_embed_*` and `te_predict_*` count inputs. Knows nothing of torch.
"""

import time
from bisect import bisect_left
from collections import Counter

import msgspec

from backends.contract import Classify, Embed, Encode, Rerank, Score, Work, inputs_of
from backends.tracing import EnginePhases

# TEI's own: 35 bounds from 15 µs on, each 1.5 times the one before.
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
# The label that tells the parts of a counter apart.
COUNTERS: dict[str, str] = {
    "te_request_count": "method",
    "te_request_success": "method",
    "te_request_failure": "err",
    "te_embed_count": "",
    "te_embed_success": "",
    "te_predict_count": "",
    "te_predict_success": "",
}
# A BackendError's kind as TEI names it.
FAILURES = {
    "invalid_input": "validation",
    "unsupported": "model_type",
    "overloaded": "overloaded",
    "timed_out": "dropped",
}


class Distribution(msgspec.Struct):
    """counts: one for each bound and one past the last; not cumulative. total: the sum of what was seen."""

    counts: list[int]
    total: float = 0.0


class Stats(msgspec.Struct, frozen=True):
    """Everything since the engine's start. queue_size: inputs that wait now; counters: by label's value."""

    queue_size: int
    counters: dict[str, dict[str, int]]
    distributions: dict[str, Distribution]


class Watch:
    """Where one piece of work's time goes, on this process' clock; the engine notes each moment."""

    def __init__(self) -> None:
        self._started_ns = time.time_ns()
        self._started_s = time.perf_counter()
        self._moments_s: tuple[float, float, float] | None = None
        self.lengths: list[int] = []

    def note(self, tokenized_s: float, began_s: float, ended_s: float, lengths: list[int]) -> None:
        """It has been computed. lengths: tokens of each input."""
        self._moments_s = (tokenized_s, began_s, ended_s)
        self.lengths = lengths

    @property
    def phases(self) -> EnginePhases | None:
        """None where nothing was computed."""
        if self._moments_s is None:
            return None
        tokenized_s, began_s, ended_s = self._moments_s
        return EnginePhases(
            self._started_ns, tokenized_s - self._started_s, began_s - tokenized_s, ended_s - began_s
        )


class Recorder:
    """Counts. Invariant: one thread at a time calls `batch`, the event loop alone all else."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter[str]] = {name: Counter() for name in COUNTERS}
        self._distributions = {name: Distribution([0] * (len(b) + 1)) for name, b in BOUNDS.items()}

    def began(self, work: Work) -> None:
        """A piece of work has come."""
        self._counters["te_request_count"][_method(work)] += 1
        if (kind := _kind(work)) is not None:
            self._counters[f"te_{kind}_count"][""] += len(inputs_of(work))

    def finished(self, work: Work, watch: Watch) -> None:
        """It was answered well."""
        self._counters["te_request_success"][_method(work)] += 1
        kind, phases = _kind(work), watch.phases
        if kind is None or phases is None:
            return
        inputs = len(inputs_of(work))
        self._counters[f"te_{kind}_success"][""] += inputs
        for length in watch.lengths:
            self._add("te_request_input_length", length)
        seconds = {"tokenize": phases.tokenize_s, "queue": phases.queue_s, "forward": phases.forward_s}
        seconds["total"] = sum(seconds.values())
        for step, phase in _STEPS.items():
            self._add(f"te_request{step}_duration", seconds[phase])
            self._add(f"te_{kind}{step}_duration", seconds[phase], inputs)

    def failed(self, kind: str) -> None:
        """It was refused, or failed. kind: a BackendError's."""
        self._counters["te_request_failure"][FAILURES.get(kind, "inference")] += 1

    def batch(self, inputs: int, tokens: int) -> None:
        """A forward pass begins."""
        self._add("te_batch_next_size", inputs)
        self._add("te_batch_next_tokens", tokens)

    def snapshot(self, queue_size: int) -> Stats:
        """All of it now."""
        counters = {name: dict(counter) for name, counter in self._counters.items()}
        return Stats(queue_size, counters, self._distributions)

    def _add(self, name: str, value: float, times: int = 1) -> None:
        distribution = self._distributions[name]
        distribution.counts[bisect_left(BOUNDS[name], value)] += times
        distribution.total += value * times


def _method(work: Work) -> str:
    return "single" if len(inputs_of(work)) == 1 else "batch"


def _kind(work: Work) -> str | None:
    if isinstance(work, Embed | Encode):
        return "embed"
    return "predict" if isinstance(work, Rerank | Score | Classify) else None


decoder = msgspec.msgpack.Decoder(Stats)
