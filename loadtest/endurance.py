"""Whether an HTTP worker grows: its memory after every so many of a million calls of all kinds.

    .venv/bin/python -m loadtest.endurance --calls 1000000        # some ten minutes

Two stubs, Redis and the load share core 1, the gateway has core 0. Callers of many tenants send distinct
texts, alone and many at once, in two dialects, ask for what is refused, break off, and open connections anew.
Slope: least squares over the samples after the warm-up, with the confidence that residuals which follow each
other allow. Memory that grows and then stays is told by the second half's slope beside the whole one's.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from loadtest import corpora, servers
from loadtest.compare import machine
from loadtest.connection import LOST, Answer, Connection, connect
from loadtest.processes import Memory, group, memory, open_files, workers_of
from loadtest.servers import Server

TENANTS = 12
SAMPLES = 200
WARM_UP_SHARE = 0.2
PATIENCE_S = 60.0
# Student's t, two-sided 95 %, for as many samples as are taken here.
T95 = 1.98
# A call that is given up is so this soon: before it is sent on, while it waits, or while it is computed.
GIVE_UP_MOST_S = 0.012
CALLS_A_CONNECTION = 400
CONFIG = """
quotas: {{store: "{store}"}}
upstreams:
  stub:
    backend: tei
    replicas: [{replicas}]
    in_flight_batches: 2
models: {{stub: {{upstream: stub}}, alias: {{upstream: stub}}}}
defaults: {{embed: stub, rerank: stub}}
tenants:
{tenants}
"""
LIMITS = ", limits: {requests_in_flight: 500, requests_per_second: 100000, tokens_per_minute: 1000000000}"


class Point(msgspec.Struct, frozen=True):
    """The worker after so many calls."""

    calls: int
    seconds: float
    memory: Memory
    files: int


class Fit(msgspec.Struct, frozen=True):
    """Megabytes a million calls, and half the width of their 95 % interval."""

    slope: float
    within: float


class Result(msgspec.Struct, frozen=True):
    """One run. slopes: by measure and stretch. peak_mb: the most that was ever resident."""

    when: str
    machine: str
    calls: int
    seconds: float
    answers: dict[str, int]
    peak_mb: float
    slopes: dict[str, Fit]
    points: list[Point]


def fit(calls: Sequence[float], megabytes: Sequence[float]) -> Fit:
    """Least squares. Residuals that follow each other count as fewer, by their first autocorrelation."""
    across, up = np.asarray(calls, float) / 1e6, np.asarray(megabytes, float)
    spread = float(((across - across.mean()) ** 2).sum())
    slope = float(((across - across.mean()) * (up - up.mean())).sum()) / spread
    rest = up - up.mean() - slope * (across - across.mean())
    variance = float((rest**2).sum()) / max(1, len(up) - 2)
    follows = float((rest[1:] * rest[:-1]).sum() / max(float((rest**2).sum()), 1e-12))
    follows = min(max(follows, 0.0), 0.99)
    error = (variance / spread * (1 + follows) / (1 - follows)) ** 0.5
    return Fit(round(slope, 3), round(T95 * error, 3))


class Asking:
    """Requests of all kinds, seeded. Each distinct text, name and id is sent once."""

    def __init__(self, port: int, seed: int) -> None:
        self._dice = random.Random(seed)  # noqa: S311 - a seeded load
        self._texts = corpora.texts("mixed", seed)
        self._serial = itertools.count()
        self._port = port
        self._kinds: tuple[tuple[Callable[[], bytes], int], ...] = (
            (self._single, 800),
            (self._several, 40),
            (self._floats, 20),
            (self._repeated, 40),
            (self._native, 20),
            (self._ranked, 20),
            (self._below_a_name, 10),
            (self._empty, 10),
            (self._broken, 10),
            (self._other_model, 10),
            (self._strangers, 5),
            (self._beyond_its_limit, 10),
            (self._nowhere, 5),
        )

    def next(self) -> bytes:
        """A request, head and body."""
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

    def _embeddings(self, given: object, model: str = "stub", form: str = "base64") -> bytes:
        return self._request(
            "/v1/embeddings", {"input": given, "model": model, "encoding_format": form, "user": "u"}
        )

    def _some(self, most: int) -> list[str]:
        return [next(self._texts) for _ in range(self._dice.randint(2, most))]

    def _single(self) -> bytes:
        return self._embeddings(next(self._texts))

    def _several(self) -> bytes:
        return self._embeddings(self._some(80), "alias")

    def _floats(self) -> bytes:
        return self._embeddings(self._some(4), form="float")

    def _repeated(self) -> bytes:
        return self._embeddings(f"one of a hundred: {self._dice.randrange(100)}")

    def _native(self) -> bytes:
        return self._request("/embed", {"inputs": self._some(3), "normalize": False})

    def _ranked(self) -> bytes:
        return self._request("/rerank", {"query": next(self._texts), "texts": self._some(5)})

    def _below_a_name(self) -> bytes:
        return self._request("/models/alias/embed", {"inputs": next(self._texts)})

    def _empty(self) -> bytes:
        return self._embeddings("")

    def _broken(self) -> bytes:
        return self._request("/v1/embeddings", b'{"input": "half a')

    def _other_model(self) -> bytes:
        return self._embeddings("a", model=f"model-{next(self._serial)}")

    def _strangers(self) -> bytes:
        return self._request("/v1/embeddings", {"input": "a"}, key=f"sk-nobody-{next(self._serial)}")

    def _beyond_its_limit(self) -> bytes:
        return self._request("/v1/embeddings", {"input": next(self._texts)}, key="sk-tight")

    def _nowhere(self) -> bytes:
        return self._request(f"/v1/{next(self._serial)}", {})


class Callers:
    """A closed loop whose callers break off at times.

    answers: by status, `gone` where a caller broke off, `unanswered` where its patience ended.
    """

    def __init__(self, port: int, calls: int, seed: int = 1) -> None:
        self.answers: Counter[str] = Counter()
        self.done = 0
        self._port = port
        self._calls = calls
        self._asking = Asking(port, seed)
        self._dice = random.Random(seed + 1)  # noqa: S311 - a seeded load

    async def run(self, callers: int, step: int, look: Callable[[int], None]) -> None:
        """All calls; look is told how many are done, after each step of them."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(callers):
                tasks.create_task(self._caller(step, look))

    async def _caller(self, step: int, look: Callable[[int], None]) -> None:
        connection: Connection | None = None
        told: asyncio.Future[Answer]

        def done(_: Connection, answer: Answer) -> None:
            if not told.done():
                told.set_result(answer)

        while self._begin(step, look):
            if connection is None or connection.closed or self._dice.randrange(CALLS_A_CONNECTION) == 0:
                if connection is not None:
                    connection.close()
                connection = await connect("127.0.0.1", self._port, done)
            told = asyncio.get_running_loop().create_future()
            connection.send(self._asking.next())
            await self._end(connection, told)
        if connection is not None:
            connection.close()

    def _begin(self, step: int, look: Callable[[int], None]) -> bool:
        if self.done >= self._calls:
            return False
        self.done += 1
        if self.done % step == 0:
            look(self.done)
        return True

    async def _end(self, connection: Connection, told: "asyncio.Future[Answer]") -> None:
        """One call in a hundred is broken off."""
        if self._dice.randrange(100) == 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._dice.random() * GIVE_UP_MOST_S):
                    await asyncio.shield(told)
            if not told.done():
                told.set_result(LOST)
                self._leave(connection, "gone")
                return
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await told
        except TimeoutError:
            # The load may have been stopped, with SIGSTOP, and goes on: its timer has passed meanwhile.
            self._leave(connection, "unanswered")
        else:
            self.answers[str(answer.status)] += 1

    def _leave(self, connection: Connection, why: str) -> None:
        connection.close()
        connection.closed = True
        self.answers[why] += 1


def _tenants() -> str:
    named = [f"  t{number}: {servers.tenant(f'sk-{number}', LIMITS)}" for number in range(TENANTS)]
    tight = servers.tenant("sk-tight", ", limits: {requests_per_minute: 30}")
    return "\n".join([*named, f"  tight: {tight}"])


@contextlib.contextmanager
def _gateway(folder: Path) -> Iterator[Server]:
    """In front of two stubs that join's batches suit, one request in five hundred of which fails."""
    flags = ("--base-ms", "1.5", "--input-ms", "0.02", "--parallel", "2", "--error-share", "0.002")
    with group() as started:
        stubs = [servers.start_stub(folder, *flags, "--dimensions", "256") for _ in range(2)]
        started += [one.process for one in stubs if one.process is not None]
        redis, store = servers.start_redis(folder)
        started.append(redis)
        replicas = ", ".join(f"'http://127.0.0.1:{one.target.port}'" for one in stubs)
        config = CONFIG.format(store=store, replicas=replicas, tenants=_tenants())
        gateway = servers.start_gateway(folder, config)
        assert gateway.process is not None
        started.append(gateway.process)
        yield gateway


def run(calls: int, callers: int) -> Result:
    """Fresh servers, all calls, and what the worker held meanwhile."""
    points: list[Point] = []
    with tempfile.TemporaryDirectory() as name, _gateway(Path(name)) as gateway:
        assert gateway.process is not None
        (worker,) = workers_of(gateway.process.process.pid)
        started_s = time.monotonic()

        def look(done: int) -> None:
            told = Point(done, round(time.monotonic() - started_s, 1), memory(worker), open_files(worker))
            points.append(told)
            if len(points) % 10 == 0:
                print(
                    f"{done:9,} calls, {told.seconds:6.0f} s: {told.memory}, {told.files} files", flush=True
                )

        load = Callers(gateway.target.port, calls)
        # Interrupted, it tells what it has.
        with (
            contextlib.suppress(KeyboardInterrupt),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(load.run(callers, max(1, calls // SAMPLES), look))
        seconds = round(time.monotonic() - started_s, 1)
    when, peak = time.strftime("%Y-%m-%d %H:%M"), max(one.memory.peak_mb for one in points)
    return Result(when, machine(), load.done, seconds, dict(load.answers), peak, _slopes(points), points)


def _slopes(points: Sequence[Point]) -> dict[str, Fit]:
    warm = points[int(len(points) * WARM_UP_SHARE) :]
    stretches = {"after the warm-up": warm, "last half": points[len(points) // 2 :]}
    measures: dict[str, Callable[[Memory], float]] = {
        "RSS": lambda one: one.rss_mb,
        "PSS": lambda one: one.pss_mb,
        "private": lambda one: one.private_mb,
    }
    return {
        f"{measure}, {stretch}": fit([one.calls for one in chosen], [take(one.memory) for one in chosen])
        for measure, take in measures.items()
        for stretch, chosen in stretches.items()
    }


def main() -> None:
    """Run, tell, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("loadtest-results"))
    options = parser.parse_args()
    os.sched_setaffinity(0, {servers.LOAD_CORE})
    result = run(options.calls, options.callers)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "endurance.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    first, last = result.points[0], result.points[-1]
    print(f"{result.calls:,} calls in {result.seconds:.0f} s; answers {result.answers}")
    print(f"first {first.memory}, last {last.memory}; most ever resident {result.peak_mb:.1f} MB")
    for name, one in result.slopes.items():
        print(f"{name}: {one.slope:+.2f} ± {one.within:.2f} MB a million calls")


if __name__ == "__main__":
    main()
