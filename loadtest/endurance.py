"""Memory of an HTTP worker over a million calls of all kinds.

    .venv/bin/python -m loadtest.endurance --calls 1000000        # about ten minutes

Two stubs, Redis and the load share core 1; the gateway has core 0. Callers of many tenants send distinct
texts, single and in batches, in two dialects, send requests that must be refused, cancel, and open new
connections. The slope is a least squares fit over the samples after the warm-up; its confidence interval
accounts for autocorrelated residuals. Memory that grows and then settles shows in the slope of the last half.
"""

import asyncio
import contextlib
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from rich.console import Console

from loadtest import corpora, results, servers, tables
from loadtest.client_connection import ClientConnection
from loadtest.corpora import CallFactory
from loadtest.generator import CallSender, LoadTarget, PendingCall, closed_loop
from loadtest.processes import MemoryUsage, memory, open_files, process_group, workers_of
from loadtest.recorder import SampleRecorder
from loadtest.results import Measure, Spread, spread
from loadtest.servers import RunningServer
from loadtest.testbed import Testbed

TENANTS = 12
SAMPLES = 200
WARM_UP_SHARE = 0.2
# Student's t, two-sided 95 %, for the number of samples taken here.
T95 = 1.98
# A cancelled call ends within this time: before it is sent upstream, in the queue, or while it is computed.
MAX_CANCEL_S = 0.012
LIMITS = ", limits: {requests_in_flight: 500, requests_per_second: 100000, tokens_per_minute: 1000000000}"


class MemorySample(msgspec.Struct, frozen=True):
    """The worker after a number of calls."""

    calls: int
    memory: MemoryUsage
    files: int


class LinearFit(msgspec.Struct, frozen=True):
    """Megabytes per million calls, and half the width of their 95 % interval."""

    slope: float
    margin: float


def fit(calls: Sequence[float], megabytes: Sequence[float]) -> LinearFit:
    """Fit a line by least squares; autocorrelated residuals count as fewer samples."""
    x, y = np.asarray(calls, float) / 1e6, np.asarray(megabytes, float)
    spread_x = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread_x
    residuals = y - y.mean() - slope * (x - x.mean())
    squares = float((residuals**2).sum())
    autocorrelation = float((residuals[1:] * residuals[:-1]).sum() / max(squares, 1e-12))
    autocorrelation = min(max(autocorrelation, 0.0), 0.99)
    variance = squares / max(1, len(y) - 2)
    error = (variance / spread_x * (1 + autocorrelation) / (1 - autocorrelation)) ** 0.5
    return LinearFit(round(slope, 3), round(T95 * error, 3))


class RequestMix:
    """Seeded requests of all kinds; each distinct text, name and id is sent once."""

    def __init__(self, port: int, seed: int) -> None:
        self._dice = random.Random(seed)  # noqa: S311 - a seeded load
        self._texts = corpora.texts("mixed", seed)
        self._serial = itertools.count()
        self._port = port
        self._kinds: tuple[tuple[Callable[[], bytes], int], ...] = (
            (lambda: self._embeddings(next(self._texts)), 800),
            (lambda: self._embeddings(self._several(80), "alias"), 40),
            (lambda: self._embeddings(self._several(4), form="float"), 20),
            (lambda: self._embeddings(f"one of a hundred: {self._dice.randrange(100)}"), 40),
            (lambda: self._request("/embed", {"inputs": self._several(3), "normalize": False}), 20),
            (self._rerank, 20),
            (lambda: self._request("/models/alias/embed", {"inputs": next(self._texts)}), 10),
            # Requests that must be refused.
            (lambda: self._embeddings(""), 10),
            (lambda: self._request("/v1/embeddings", b'{"input": "half a'), 10),
            (lambda: self._embeddings("a", model=f"model-{next(self._serial)}"), 10),
            (self._with_unknown_key, 5),
            (lambda: self._request("/v1/embeddings", {"input": next(self._texts)}, key="sk-tight"), 10),
            (lambda: self._request(f"/v1/{next(self._serial)}", {}), 5),
        )

    def next(self) -> bytes:
        """Return a request, head and body."""
        makers, weights = zip(*self._kinds, strict=True)
        make: Callable[[], bytes] = self._dice.choices(makers, weights)[0]
        return make()

    def _request(self, path: str, body: object, key: str | None = None) -> bytes:
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        key = key or f"sk-{self._dice.randrange(TENANTS)}"
        return (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\nauthorization: Bearer {key}\r\n"
            f"x-request-id: call-{next(self._serial)}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(raw)}\r\n\r\n"
        ).encode() + raw

    def _embeddings(self, inputs: object, model: str = "stub", form: str = "base64") -> bytes:
        body = {"input": inputs, "model": model, "encoding_format": form, "user": "u"}
        return self._request("/v1/embeddings", body)

    def _rerank(self) -> bytes:
        return self._request("/rerank", {"query": next(self._texts), "texts": self._several(5)})

    def _with_unknown_key(self) -> bytes:
        return self._request("/v1/embeddings", {"input": "a"}, key=f"sk-unknown-{next(self._serial)}")

    def _several(self, maximum: int) -> list[str]:
        return [next(self._texts) for _ in range(self._dice.randint(2, maximum))]


class MixedCallSender(CallSender):
    """Sender of a fixed number of mixed calls, one in a hundred of which its caller cancels."""

    def __init__(self, target: LoadTarget, calls: int, on_step: Callable[[int], None], seed: int = 1) -> None:
        super().__init__(target, CallFactory(iter(())), SampleRecorder({}))
        self._requests = RequestMix(target.port, seed)
        self._total = calls
        self._step = max(1, calls // SAMPLES)
        self._on_step = on_step
        self._dice = random.Random(seed + 1)  # noqa: S311 - a seeded load

    def send(self, connection: ClientConnection, since_s: float) -> None:
        """Write the next request, and cancel some; a cancelled call's connection is replaced."""
        self.sent += 1
        if self.sent % self._step == 0 and self.sent <= self._total:
            self._on_step(self.sent)
        if self.sent == self._total:
            self.finished.set()
        call = connection.context = PendingCall((), since_s, checked=False)
        connection.send(self._requests.next())
        if self._dice.randrange(100) == 0:
            delay_s = self._dice.random() * MAX_CANCEL_S
            asyncio.get_running_loop().call_later(delay_s, self._cancel, connection, call)

    def _cancel(self, connection: ClientConnection, call: PendingCall) -> None:
        if connection.busy and connection.context is call:
            connection.close()


@contextlib.contextmanager
def _gateway() -> Iterator[RunningServer]:
    """Run a gateway with many tenants in front of two stubs that fail one request in five hundred."""
    flags = ("--base-ms", "1.5", "--input-ms", "0.02", "--parallel", "2", "--error-share", "0.002")
    tenants = {f"t{number}": servers.tenant(f"sk-{number}", LIMITS) for number in range(TENANTS)}
    tenants["tight"] = servers.tenant("sk-tight", ", limits: {requests_per_minute: 30}")
    with tempfile.TemporaryDirectory() as folder, process_group() as processes:
        testbed = Testbed(Path(folder), processes, seconds=0)
        ports = [testbed.stub(*flags, "--dimensions", "256").target.port for _ in range(2)]
        replicas = ", ".join(f"'http://127.0.0.1:{port}'" for port in ports)
        yield testbed.gateway_with(
            f"quotas: {{store: '{testbed.redis()[1]}'}}\n"
            f"upstreams: {{stub: {{backend: tei, replicas: [{replicas}], in_flight_batches: 2}}}}\n"
            "models: {stub: {upstream: stub}, alias: {upstream: stub}}\n"
            "defaults: {embed: stub, rerank: stub}\n"
            "tenants:\n" + "".join(f"  {name}: {entry}\n" for name, entry in tenants.items())
        )


def run(calls: int, callers: int, seconds: float) -> tuple[list[MemorySample], dict[str, int]]:
    """Send all calls to a fresh gateway; return the worker's memory over time, and the replies by status."""
    samples: list[MemorySample] = []
    with _gateway() as gateway:
        (worker,) = workers_of(gateway.process.process.pid)

        def on_step(sent: int) -> None:
            samples.append(MemorySample(sent, memory(worker), open_files(worker)))
            if len(samples) % 10 == 0:
                print(
                    f"{sent:9,} calls: {samples[-1].memory.rss_mb:.1f} MB, {samples[-1].files} files",
                    flush=True,
                )

        sender = MixedCallSender(gateway.target, calls, on_step)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            sample = runner.run(closed_loop(sender, callers, seconds, warmup_s=0))
    return samples, sample.statuses


def measures(samples: Sequence[MemorySample], replies: dict[str, int]) -> list[Measure]:
    """Return memory at the end and the start, its slopes, and the open files.

    The note holds the replies by status; 0 are the cancelled calls.
    """
    subject, last = f"{samples[-1].calls:,} calls", samples[-1]
    start, end = samples[0].memory, last.memory
    found = [
        Measure(subject, "resident MB", spread([end.rss_mb]), spread([start.rss_mb]), note=f"{replies}"),
        Measure(subject, "private MB", spread([end.private_mb]), spread([start.private_mb])),
        Measure(subject, "peak MB", spread([end.peak_mb])),
        Measure(subject, "open files", spread(sample.files for sample in samples)),
    ]
    periods = {
        "after the warm-up": samples[int(len(samples) * WARM_UP_SHARE) :],
        "last half": samples[len(samples) // 2 :],
    }
    for name, period in periods.items():
        if len(period) > 2:
            line = fit([sample.calls for sample in period], [sample.memory.rss_mb for sample in period])
            interval = Spread(
                line.slope, round(line.slope - line.margin, 3), round(line.slope + line.margin, 3)
            )
            found.append(
                Measure(subject, f"resident MB per million calls, {name}", interval, note="95 % interval")
            )
    return found


def main() -> None:
    """Run, print and write the result."""
    parser = results.argument_parser(__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3600, help="the run ends by then, at the latest")
    options = parser.parse_args()
    os.sched_setaffinity(0, {servers.LOAD_CORE})
    samples, replies = run(options.calls, options.callers, options.seconds)
    found = measures(samples, replies)
    Console(width=170).print(tables.listed(found))
    results.write(results.new_result("endurance", found), options.out)


if __name__ == "__main__":
    main()
