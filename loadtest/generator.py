"""A load generator that does not lie: latencies from the intended start, its own lateness and CPU shown.

Closed loop: so many callers, each with one call at a time. Open loop: calls arrive at their moments, whether
or not the server keeps up; a late one's clock is running. Some replies are held against their texts.

    .venv/bin/python -m loadtest.generator --port 8080 --key gw_… --callers 32
    .venv/bin/python -m loadtest.generator --port 8080 --key gw_… --rate 500
"""

import argparse
import asyncio
import contextlib
import gc
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pybase64
import uvloop
from hdrh.histogram import HdrHistogram

from loadtest import corpora, schedules
from loadtest.connection import GOOD, LOST, Answer, Connection, connect
from loadtest.corpora import Call, Calls
from loadtest.processes import Usage, machine_cpu_s
from loadtest.stub_wire import mark_of
from loadtest.timer import Timer

# From 1 µs to two minutes, three digits.
_HISTOGRAM = (1, 120_000_000, 3)
# Prime, so that no rhythm of the load hides from the check.
_CHECK_EVERY = 101
# How long an open loop waits for its last answers.
PATIENCE_S = 5.0
_RECONNECT_S = 0.05
# Whoever gets one of these must be told when to come again.
_ADVISED = frozenset({429, 503})
_MOST_CONNECTIONS = 1024

Watch = Mapping[str, Callable[[], Usage]]


class Target(msgspec.Struct, frozen=True):
    """Where calls go. checked: its vectors are the stub's, and can be told from each other."""

    port: int
    headers: dict[str, str] = {}
    model: str = "stub"
    checked: bool = True

    def head(self) -> bytes:
        """What each request begins with."""
        return corpora.head_of(f"127.0.0.1:{self.port}", self.headers)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measured stretch. calls: answered well. Latencies: of good answers and of calls given up.

    sent: calls written since the connections opened, warm-up included.
    histogram: the latencies', HdrHistogram V2 in µs, compressed, as base64.
    late_ms: how much later than intended the generator wrote a request, p99; 0 in a closed loop.
    refused_ms: p99 of answers other than good ones. unadvised: 429 and 503 without retry-after.
    unanswered: calls still open when patience ended. cpu: cores used by each watched process, by the
    load itself, and elsewhere: by what has nothing to do with the run and may have disturbed it.
    """

    calls: int
    sent: int
    seconds: float
    per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p999_ms: float
    most_ms: float
    statuses: dict[str, int]
    wrong: int
    unanswered: int
    refused_ms: float = 0.0
    unadvised: int = 0
    late_ms: float
    cpu: dict[str, float]
    rss_mb: dict[str, float]
    histogram: str

    @property
    def failed(self) -> int:
        """Calls without a good answer."""
        return sum(n for status, n in self.statuses.items() if status != "200") + self.wrong + self.unanswered


class Recorder:
    """What happened between `start` and `stop`; outside of them nothing counts."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._latencies_us = array("q")
        self._lateness_us = array("q")
        self._refused_us = array("q")
        self._unadvised = 0
        self._statuses: Counter[str] = Counter()
        self._before: dict[str, Usage] = {}
        self._after: dict[str, Usage] = {}
        self._own_s = 0.0
        self._machine_s = 0.0
        self._unanswered = 0
        self.wrong = 0
        self.running = False
        self.started_s = 0.0
        self.stopped_s = 0.0

    def start(self) -> None:
        """The warm-up is over."""
        self._before = {name: look() for name, look in self._watch.items()}
        self._own_s = time.process_time()
        self._machine_s = machine_cpu_s()
        self.started_s = time.monotonic()
        self.running = True

    def stop(self) -> None:
        """The measured stretch is over."""
        self.stopped_s = time.monotonic()
        self._own_s = time.process_time() - self._own_s
        self._machine_s = machine_cpu_s() - self._machine_s
        self._after = {name: look() for name, look in self._watch.items()}
        self.running = False

    def answered(self, answer: Answer, took_s: float) -> None:
        """One call's end, with an answer or with LOST."""
        self._statuses[str(answer.status)] += 1
        took_us = max(1, int(took_s * 1e6))
        if answer.status == GOOD:
            self._latencies_us.append(took_us)
        else:
            self._refused_us.append(took_us)
            self._unadvised += answer.status in _ADVISED and not answer.advised

    def unanswered(self, took_s: float) -> None:
        """A call that was given up."""
        self._latencies_us.append(int(took_s * 1e6))
        self._unanswered += 1

    def late(self, seconds: float) -> None:
        """How much after its moment a call was written."""
        self._lateness_us.append(int(seconds * 1e6))

    def sample(self, sent: int) -> Sample:
        """The figures."""
        seconds = self.stopped_s - self.started_s
        good = len(self._latencies_us) - self._unanswered
        histogram = HdrHistogram(*_HISTOGRAM)
        for latency_us in self._latencies_us:
            histogram.record_value(latency_us)
        quantile_ms = {q: _ms(histogram.get_value_at_percentile(q)) for q in (50, 95, 99, 99.9, 100)}
        cpu = {name: (self._after[name].cpu_s - one.cpu_s) / seconds for name, one in self._before.items()}
        cpu["load"] = self._own_s / seconds
        cpu["elsewhere"] = max(0.0, self._machine_s / seconds - sum(cpu.values()))
        return Sample(
            calls=good,
            sent=sent,
            seconds=round(seconds, 3),
            per_s=round(good / seconds, 1),
            p50_ms=quantile_ms[50],
            p95_ms=quantile_ms[95],
            p99_ms=quantile_ms[99],
            p999_ms=quantile_ms[99.9],
            most_ms=quantile_ms[100],
            statuses=dict(self._statuses),
            wrong=self.wrong,
            unanswered=self._unanswered,
            refused_ms=_p99_ms(self._refused_us),
            unadvised=self._unadvised,
            late_ms=_p99_ms(self._lateness_us),
            cpu={name: round(share, 3) for name, share in cpu.items()},
            rss_mb={name: round(one.rss_bytes / 1e6, 1) for name, one in self._after.items()},
            histogram=histogram.encode().decode(),
        )


def _ms(value_us: float) -> float:
    return round(value_us / 1000, 3)


def _p99_ms(values_us: "array[int]") -> float:
    return _ms(float(np.percentile(values_us, 99))) if values_us else 0.0


class Underway(msgspec.Struct):
    """A call between its moment and its answer. since_s: the intended start."""

    inputs: tuple[str, ...]
    since_s: float
    checked: bool


class Load:
    """What both loops share: writing calls, judging answers."""

    def __init__(
        self, target: Target, calls: Calls, recorder: Recorder, check_every: int = _CHECK_EVERY
    ) -> None:
        self._check_every = check_every
        self.target = target
        self.recorder = recorder
        self._calls = calls
        self._head = target.head()
        self.sent = 0
        self._open: set[Connection] = set()

    def send(self, connection: Connection, since_s: float) -> None:
        """Write the next call; its clock runs since since_s."""
        call: Call = self._calls.next(self._head)
        self.sent += 1
        checked = self.target.checked and self.sent % self._check_every == 0
        connection.note = Underway(call.inputs, since_s, checked)
        self._open.add(connection)
        connection.send(call.request, keep=checked)

    def judge(self, connection: Connection, answer: Answer) -> None:
        """Record a call's end."""
        underway = connection.note
        assert isinstance(underway, Underway)
        self._open.discard(connection)
        if self.recorder.running:
            self.recorder.answered(answer, time.monotonic() - underway.since_s)
        if underway.checked and answer.status == GOOD and not is_right(answer.body, underway.inputs):
            self.recorder.wrong += 1

    def refused(self) -> None:
        """No connection was to be had."""
        if self.recorder.running:
            self.recorder.answered(LOST, 0.0)

    def give_up(self, waiting_since_s: Iterable[float]) -> None:
        """Calls still open have taken at least this long: leaving them out would flatter the server."""
        underway = [one.note.since_s for one in self._open if isinstance(one.note, Underway)]
        for since_s in (*underway, *waiting_since_s):
            self.recorder.unanswered(time.monotonic() - since_s)


def is_right(body: bytes, inputs: Sequence[str]) -> bool:
    """Whether an OpenAI reply holds the stub's vectors of these texts, in their order."""
    data = msgspec.json.decode(body)["data"]
    return len(data) == len(inputs) and all(
        _begins_with(item["embedding"], mark_of(text)) for item, text in zip(data, inputs, strict=True)
    )


def _begins_with(embedding: Any, mark: Sequence[float]) -> bool:
    """Either wire's form of a vector."""
    if isinstance(embedding, str):
        embedding = np.frombuffer(pybase64.b64decode(embedding), dtype="<f4")
    return bool(np.allclose(embedding[: len(mark)], mark, atol=1e-6))


async def closed_loop(load: Load, callers: int, seconds: float, warmup_s: float) -> Sample:
    """So many callers, each with one call at a time, never pausing."""
    with _without_collections():
        return await ClosedLoop(load, callers).run(seconds, warmup_s)


async def open_loop(load: Load, moments_s: Sequence[float], warmup_s: float) -> Sample:
    """Calls at their moments; those of the first warmup_s are not recorded. Raises: OSError."""
    with _without_collections():
        return await OpenLoop(load, moments_s, warmup_s).run()


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """A collection in the middle would be the generator's pause, told as the server's."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Until it happened or patience ended."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


class ClosedLoop:
    """A connection for each caller, opened anew where the server closed it."""

    def __init__(self, load: Load, callers: int) -> None:
        self._load = load
        self._open_callers = callers
        self._stopping = False
        self._all_done = asyncio.Event()
        self._connections: list[Connection] = []
        self._opening: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float, warmup_s: float) -> Sample:
        """Load, warm-up included, and its figures."""
        recorder = self._load.recorder
        for _ in range(self._open_callers):
            self._open_soon()
        await asyncio.sleep(warmup_s)
        recorder.start()
        await asyncio.sleep(seconds)
        recorder.stop()
        self._stopping = True
        await _wait(self._all_done, PATIENCE_S)
        for task in self._opening:
            task.cancel()
        for connection in self._connections:
            connection.close()
        return recorder.sample(self._load.sent)

    def _open_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self._open())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self) -> None:
        while not self._stopping:
            try:
                connection = await connect("127.0.0.1", self._load.target.port, self._answered)
            except OSError:
                self._load.refused()
                await asyncio.sleep(_RECONNECT_S)
                continue
            self._connections.append(connection)
            self._load.send(connection, time.monotonic())
            return
        self._leave()

    def _answered(self, connection: Connection, answer: Answer) -> None:
        self._load.judge(connection, answer)
        if self._stopping:
            self._leave()
        elif connection.closed:
            self._connections.remove(connection)
            self._open_soon()
        else:
            self._load.send(connection, time.monotonic())

    def _leave(self) -> None:
        self._open_callers -= 1
        if self._open_callers == 0:
            self._all_done.set()


class OpenLoop:
    """Idle connections, and a queue of calls whose moment has come and that have none."""

    def __init__(self, load: Load, moments_s: Sequence[float], warmup_s: float) -> None:
        self._load = load
        self._moments_s = moments_s
        self._warmup_s = warmup_s
        self._next = 0
        self._start_s = 0.0
        self._idle: deque[Connection] = deque()
        self._waiting: deque[float] = deque()
        self._connections: list[Connection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._open_calls = 0
        self._over = False
        self._all_done = asyncio.Event()

    async def run(self) -> Sample:
        """The whole schedule."""
        recorder, timer = self._load.recorder, Timer()
        await asyncio.gather(*(self._open() for _ in range(16)))
        self._start_s = time.monotonic() + 0.05
        timer.at(self._start_s + self._warmup_s, recorder.start)
        self._arm(timer)
        await _wait(self._all_done, self._start_s - time.monotonic() + self._moments_s[-1] + PATIENCE_S)
        self._load.give_up(self._waiting)
        recorder.stop()
        self._over = True
        for task in self._opening:
            task.cancel()
        for connection in self._connections:
            connection.close()
        timer.close()
        return recorder.sample(self._load.sent)

    def _arm(self, timer: Timer) -> None:
        timer.at(self._start_s + self._moments_s[self._next], partial(self._arrive, timer))

    def _arrive(self, timer: Timer) -> None:
        now_s = time.monotonic()
        while self._next < len(self._moments_s) and self._start_s + self._moments_s[self._next] <= now_s:
            self._open_calls += 1
            self._waiting.append(self._start_s + self._moments_s[self._next])
            self._next += 1
            self._dispatch()
        if self._next < len(self._moments_s):
            self._arm(timer)

    def _dispatch(self) -> None:
        if self._over:
            # Who was cut off below needs no other connection.
            return
        while self._waiting and self._idle:
            connection = self._idle.pop()
            if connection.closed:
                continue
            since_s = self._waiting.popleft()
            if self._load.recorder.running:
                self._load.recorder.late(time.monotonic() - since_s)
            self._load.send(connection, since_s)
        wanted = len(self._waiting) - len(self._opening)
        room = _MOST_CONNECTIONS - len(self._connections) - len(self._opening)
        for _ in range(min(wanted, room)):
            task = asyncio.get_running_loop().create_task(self._open())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self) -> None:
        connection = await connect("127.0.0.1", self._load.target.port, self._answered)
        self._connections.append(connection)
        self._idle.append(connection)
        self._dispatch()

    def _answered(self, connection: Connection, answer: Answer) -> None:
        self._load.judge(connection, answer)
        self._open_calls -= 1
        if connection.closed:
            self._connections.remove(connection)
        else:
            self._idle.append(connection)
        self._dispatch()
        if self._next == len(self._moments_s) and self._open_calls == 0:
            self._all_done.set()


async def _main(options: argparse.Namespace) -> Sample:
    headers = {"authorization": f"Bearer {options.key}"} if options.key else {}
    target = Target(options.port, headers, options.model, checked=not options.unchecked)
    source = corpora.texts(options.mixture, options.seed)
    calls = Calls(source, inputs=options.inputs, form=options.format, model=options.model)
    load = Load(target, calls, Recorder({}))
    if options.rate is None:
        return await closed_loop(load, options.callers, options.seconds, options.warmup)
    moments_s = schedules.schedule(
        options.arrivals, options.rate, options.seconds + options.warmup, options.seed
    )
    return await open_loop(load, moments_s, options.warmup)


def main() -> None:
    """One sample of any server that speaks OpenAI's embeddings, as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", default="")
    parser.add_argument("--model", default="stub")
    parser.add_argument("--callers", type=int, default=32, help="closed loop")
    parser.add_argument("--rate", type=float, help="open loop: calls a second")
    parser.add_argument("--arrivals", choices=("poisson", "constant"), default="poisson")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--warmup", type=float, default=1)
    parser.add_argument("--inputs", type=int, default=1)
    parser.add_argument("--format", choices=("base64", "float"), default="base64")
    parser.add_argument("--mixture", choices=("queries", "passages", "mixed"), default="queries")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unchecked", action="store_true", help="the vectors are not the stub's")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sample = runner.run(_main(options))
    shown = {name: value for name, value in msgspec.to_builtins(sample).items() if name != "histogram"}
    print(msgspec.json.format(msgspec.json.encode(shown)).decode())


if __name__ == "__main__":
    main()
