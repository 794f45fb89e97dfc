"""Recording of one measured period: latencies, statuses, and the CPU and memory of the watched processes."""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
from hdrh.histogram import HdrHistogram

from loadtest.client_connection import OK, Reply
from loadtest.processes import ResourceUsage, machine_cpu_s

# From 1 µs to two minutes, three digits.
_HISTOGRAM = (1, 120_000_000, 3)
# Replies with these statuses must carry `retry-after`.
_RETRY_STATUSES = frozenset({429, 503})

Watch = Mapping[str, Callable[[], ResourceUsage]]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one measured period.

    calls: those answered with 200. sent: calls written since the connections opened, warm-up included.
    Latencies cover successful calls and abandoned ones. histogram: the latencies in µs as HdrHistogram V2,
    compressed, in base64. late_ms: p99 of the generator's own delay in writing a request; 0 in a closed loop.
    refused_ms: p99 of replies with another status than 200. without_retry_after: 429 and 503 replies without
    the header. unanswered: calls still open at the end. cpu: cores used by each watched process, by the load
    itself, and elsewhere (by processes outside the run, which may have disturbed it).
    """

    calls: int
    sent: int
    seconds: float
    per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    statuses: dict[str, int]
    wrong: int
    unanswered: int
    refused_ms: float = 0.0
    without_retry_after: int = 0
    late_ms: float
    cpu: dict[str, float]
    rss_mb: dict[str, float]
    histogram: str

    @property
    def failed(self) -> int:
        """Number of calls without a correct reply."""
        return sum(n for status, n in self.statuses.items() if status != "200") + self.wrong + self.unanswered

    def cpu_us_per_call(self, name: str) -> float:
        """Return the CPU of one watched process per successful call."""
        return self.cpu[name] / max(self.per_s, 0.01) * 1e6

    @property
    def failures(self) -> str:
        """Statuses of the failed calls, in words."""
        bad = {status: count for status, count in self.statuses.items() if status != "200"}
        return f"{bad or ''} {f'{self.unanswered} unanswered' if self.unanswered else ''}".strip()


class SampleRecorder:
    """Recorder of the period between `start` and `stop`; calls outside of it do not count."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._latencies_us = array("q")
        self._lateness_us = array("q")
        self._refused_us = array("q")
        self._without_retry_after = 0
        self._statuses: Counter[str] = Counter()
        self._before: dict[str, ResourceUsage] = {}
        self._after: dict[str, ResourceUsage] = {}
        self._own_s = 0.0
        self._machine_s = 0.0
        self._unanswered = 0
        self.wrong = 0
        self.running = False
        self.started_s = 0.0
        self.stopped_s = 0.0

    def start(self) -> None:
        """Begin the measured period, after the warm-up."""
        self._before = {name: usage() for name, usage in self._watch.items()}
        self._own_s = time.process_time()
        self._machine_s = machine_cpu_s()
        self.started_s = time.monotonic()
        self.running = True

    def stop(self) -> None:
        """End the measured period."""
        self.stopped_s = time.monotonic()
        self._own_s = time.process_time() - self._own_s
        self._machine_s = machine_cpu_s() - self._machine_s
        self._after = {name: usage() for name, usage in self._watch.items()}
        self.running = False

    def on_reply(self, reply: Reply, took_s: float) -> None:
        """Record the end of one call, with its reply or with LOST."""
        self._statuses[str(reply.status)] += 1
        took_us = max(1, int(took_s * 1e6))
        if reply.status == OK:
            self._latencies_us.append(took_us)
        else:
            self._refused_us.append(took_us)
            self._without_retry_after += reply.status in _RETRY_STATUSES and not reply.has_retry_after

    def on_unanswered(self, took_s: float) -> None:
        """Record an abandoned call."""
        self._latencies_us.append(int(took_s * 1e6))
        self._unanswered += 1

    def on_late(self, seconds: float) -> None:
        """Record how much later than its arrival time a call was written."""
        self._lateness_us.append(int(seconds * 1e6))

    def sample(self, sent: int) -> Sample:
        """Return the figures."""
        seconds = self.stopped_s - self.started_s
        calls = len(self._latencies_us) - self._unanswered
        histogram = HdrHistogram(*_HISTOGRAM)
        for latency_us in self._latencies_us:
            histogram.record_value(latency_us)
        quantile_ms = {q: _ms(histogram.get_value_at_percentile(q)) for q in (50, 95, 99, 100)}
        cpu = {
            name: (self._after[name].cpu_s - before.cpu_s) / seconds for name, before in self._before.items()
        }
        cpu["load"] = self._own_s / seconds
        cpu["elsewhere"] = max(0.0, self._machine_s / seconds - sum(cpu.values()))
        return Sample(
            calls=calls,
            sent=sent,
            seconds=round(seconds, 3),
            per_s=round(calls / seconds, 1),
            p50_ms=quantile_ms[50],
            p95_ms=quantile_ms[95],
            p99_ms=quantile_ms[99],
            max_ms=quantile_ms[100],
            statuses=dict(self._statuses),
            wrong=self.wrong,
            unanswered=self._unanswered,
            refused_ms=_p99_ms(self._refused_us),
            without_retry_after=self._without_retry_after,
            late_ms=_p99_ms(self._lateness_us),
            cpu={name: round(cores, 4) for name, cores in cpu.items()},
            rss_mb={name: round(usage.rss_bytes / 1e6, 1) for name, usage in self._after.items()},
            histogram=histogram.encode().decode(),
        )


def _ms(value_us: float) -> float:
    return round(value_us / 1000, 3)


def _p99_ms(values_us: "array[int]") -> float:
    return _ms(float(np.percentile(values_us, 99))) if values_us else 0.0
