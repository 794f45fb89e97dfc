"""Load generator with honest latencies: they start at the intended time, and its own delay and CPU are shown.

Closed loop: a number of callers with one call at a time each. Open loop: calls arrive at their scheduled
times, whether or not the server keeps up; the clock of a delayed call is running. A share of the replies is
checked against the texts that were sent. `gateway bench` has the same loops over httpx, whose CPU
per call would limit the measurements here; the arrival times are the same.
"""

import asyncio
import contextlib
import gc
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import msgspec
import numpy as np
import pybase64

from gateway.cli.bench_load import Arrivals, arrival_times
from loadtest import corpora
from loadtest.client_connection import LOST, OK, ClientConnection, Reply, connect
from loadtest.corpora import CallFactory, PreparedCall
from loadtest.recorder import Sample, SampleRecorder
from loadtest.stub_protocol import mark_of
from loadtest.timer import Timer

# Prime, so that no rhythm of the load hides from the check.
_CHECK_EVERY = 101
# How long a loop waits for its last replies.
PATIENCE_S = 5.0
_RECONNECT_S = 0.05
_MAX_CONNECTIONS = 1024


def schedule(arrivals: Arrivals, rate: float, seconds: float, seed: int) -> list[float]:
    """Return the arrival times of an open loop in a period."""
    return list(takewhile(lambda at_s: at_s < seconds, arrival_times(arrivals, rate, seed)))


class LoadTarget(msgspec.Struct, frozen=True):
    """Destination of calls. checked: the vectors are the stub's, and identify their texts."""

    port: int
    headers: dict[str, str] = {}
    path: str = "/v1/embeddings"
    checked: bool = True

    def head(self) -> bytes:
        """Return the head of each request."""
        return corpora.request_head(f"127.0.0.1:{self.port}", self.headers, self.path)


class PendingCall(msgspec.Struct):
    """A call between its arrival time and its reply. since_s: the arrival time."""

    inputs: tuple[str, ...]
    since_s: float
    checked: bool


class CallSender:
    """The part that both loops share: writing calls, checking and recording replies."""

    def __init__(
        self,
        target: LoadTarget,
        calls: CallFactory,
        recorder: SampleRecorder,
        check_every: int = _CHECK_EVERY,
    ) -> None:
        self._check_every = check_every
        self.target = target
        self.recorder = recorder
        self._calls = calls
        self._head = target.head()
        self.sent = 0
        # Ends the measured period of a closed loop early.
        self.finished = asyncio.Event()
        self._open: set[ClientConnection] = set()

    def send(self, connection: ClientConnection, since_s: float) -> None:
        """Write the next call; its latency counts from `since_s`."""
        call: PreparedCall = self._calls.next(self._head)
        self.sent += 1
        checked = self.target.checked and self.sent % self._check_every == 0
        connection.context = PendingCall(call.inputs, since_s, checked)
        self._open.add(connection)
        connection.send(call.request, wants_body=checked)

    def on_reply(self, connection: ClientConnection, reply: Reply) -> None:
        """Record the end of a call."""
        pending = connection.context
        assert isinstance(pending, PendingCall)
        self._open.discard(connection)
        if self.recorder.running:
            self.recorder.on_reply(reply, time.monotonic() - pending.since_s)
        if pending.checked and reply.status == OK and not is_correct(reply.body, pending.inputs):
            self.recorder.wrong += 1

    def on_connect_error(self) -> None:
        """Record a call that found no connection."""
        if self.recorder.running:
            self.recorder.on_reply(LOST, 0.0)

    def abandon(self, waiting_since_s: Iterable[float]) -> None:
        """Record open calls with their time so far: leaving them out would flatter the server."""
        open_since_s = [
            connection.context.since_s
            for connection in self._open
            if isinstance(connection.context, PendingCall)
        ]
        for since_s in (*open_since_s, *waiting_since_s):
            self.recorder.on_unanswered(time.monotonic() - since_s)


def is_correct(body: bytes, inputs: Sequence[str]) -> bool:
    """Return True if an OpenAI reply holds the stub's vectors of these texts, in their order."""
    data = msgspec.json.decode(body)["data"]
    return len(data) == len(inputs) and all(
        _starts_with(item["embedding"], mark_of(text)) for item, text in zip(data, inputs, strict=True)
    )


def _starts_with(embedding: Any, mark: Sequence[float]) -> bool:
    """Compare the first components; the vector is a list of floats or base64."""
    if isinstance(embedding, str):
        embedding = np.frombuffer(pybase64.b64decode(embedding), dtype="<f4")
    return bool(np.allclose(embedding[: len(mark)], mark, atol=1e-6))


async def closed_loop(sender: CallSender, callers: int, seconds: float, warmup_s: float) -> Sample:
    """Run callers with one call at a time each, without a pause."""
    with _without_garbage_collection():
        return await ClosedLoop(sender, callers).run(seconds, warmup_s)


async def open_loop(sender: CallSender, arrivals_s: Sequence[float], warmup_s: float) -> Sample:
    """Send calls at their arrival times; those of the first `warmup_s` are not recorded.

    Raises: OSError.
    """
    with _without_garbage_collection():
        return await OpenLoop(sender, arrivals_s, warmup_s).run()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the collector, whose pause would count as the server's latency."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


class LoadLoop:
    """Connections of one load, and the tasks that open them."""

    def __init__(self, sender: CallSender) -> None:
        self._sender = sender
        self._all_done = asyncio.Event()
        self._connections: list[ClientConnection] = []
        self._opening: set[asyncio.Task[None]] = set()

    def _start_opening(self) -> None:
        task = asyncio.get_running_loop().create_task(self._open())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in self._connections:
            connection.close()


class ClosedLoop(LoadLoop):
    """One connection per caller, opened again where the server closed it."""

    def __init__(self, sender: CallSender, callers: int) -> None:
        super().__init__(sender)
        self._active_callers = callers
        self._stopping = False

    async def run(self, seconds: float, warmup_s: float) -> Sample:
        """Run the load with its warm-up and return the figures."""
        recorder = self._sender.recorder
        for _ in range(self._active_callers):
            self._start_opening()
        await asyncio.sleep(warmup_s)
        recorder.start()
        await _wait(self._sender.finished, seconds)
        recorder.stop()
        self._stopping = True
        await _wait(self._all_done, PATIENCE_S)
        self._close()
        return recorder.sample(self._sender.sent)

    async def _open(self) -> None:
        while not self._stopping:
            try:
                connection = await connect("127.0.0.1", self._sender.target.port, self._on_reply)
            except OSError:
                self._sender.on_connect_error()
                await asyncio.sleep(_RECONNECT_S)
                continue
            self._connections.append(connection)
            self._sender.send(connection, time.monotonic())
            return
        self._end_caller()

    def _on_reply(self, connection: ClientConnection, reply: Reply) -> None:
        self._sender.on_reply(connection, reply)
        if self._stopping:
            self._end_caller()
        elif connection.closed:
            self._connections.remove(connection)
            self._start_opening()
        else:
            self._sender.send(connection, time.monotonic())

    def _end_caller(self) -> None:
        self._active_callers -= 1
        if self._active_callers == 0:
            self._all_done.set()


class OpenLoop(LoadLoop):
    """Idle connections, and a queue of calls that are due and have no connection yet."""

    def __init__(self, sender: CallSender, arrivals_s: Sequence[float], warmup_s: float) -> None:
        super().__init__(sender)
        self._arrivals_s = arrivals_s
        self._warmup_s = warmup_s
        self._next = 0
        self._start_s = 0.0
        self._idle: deque[ClientConnection] = deque()
        self._waiting_since_s: deque[float] = deque()
        self._open_calls = 0
        self._over = False

    async def run(self) -> Sample:
        """Run the whole schedule and return the figures."""
        recorder, timer = self._sender.recorder, Timer()
        await asyncio.gather(*(self._open() for _ in range(16)))
        self._start_s = time.monotonic() + 0.05
        timer.at(self._start_s + self._warmup_s, recorder.start)
        self._arm(timer)
        await _wait(self._all_done, self._start_s - time.monotonic() + self._arrivals_s[-1] + PATIENCE_S)
        self._sender.abandon(self._waiting_since_s)
        recorder.stop()
        self._over = True
        self._close()
        timer.close()
        return recorder.sample(self._sender.sent)

    def _arm(self, timer: Timer) -> None:
        timer.at(self._start_s + self._arrivals_s[self._next], partial(self._arrive, timer))

    def _arrive(self, timer: Timer) -> None:
        now_s = time.monotonic()
        while self._next < len(self._arrivals_s) and self._start_s + self._arrivals_s[self._next] <= now_s:
            self._open_calls += 1
            self._waiting_since_s.append(self._start_s + self._arrivals_s[self._next])
            self._next += 1
            self._dispatch()
        if self._next < len(self._arrivals_s):
            self._arm(timer)

    def _dispatch(self) -> None:
        if self._over:
            # Closing a connection reports LOST; that call needs no other connection.
            return
        while self._waiting_since_s and self._idle:
            connection = self._idle.pop()
            if connection.closed:
                continue
            since_s = self._waiting_since_s.popleft()
            if self._sender.recorder.running:
                self._sender.recorder.on_late(time.monotonic() - since_s)
            self._sender.send(connection, since_s)
        wanted = len(self._waiting_since_s) - len(self._opening)
        room = _MAX_CONNECTIONS - len(self._connections) - len(self._opening)
        for _ in range(min(wanted, room)):
            self._start_opening()

    async def _open(self) -> None:
        connection = await connect("127.0.0.1", self._sender.target.port, self._on_reply)
        self._connections.append(connection)
        self._idle.append(connection)
        self._dispatch()

    def _on_reply(self, connection: ClientConnection, reply: Reply) -> None:
        self._sender.on_reply(connection, reply)
        self._open_calls -= 1
        if connection.closed:
            self._connections.remove(connection)
        else:
            self._idle.append(connection)
        self._dispatch()
        if self._next == len(self._arrivals_s) and self._open_calls == 0:
            self._all_done.set()
