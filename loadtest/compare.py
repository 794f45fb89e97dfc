"""Comparison of the gateway with its peers, and of gateway versions, on one stub upstream.

    .venv/bin/python -m loadtest.compare                     # about four minutes
    .venv/bin/python -m loadtest.compare --curves            # also latency by rate and throughput by callers
    .venv/bin/python -m loadtest.compare --only gateway,sglang-router --repeats 5
    .venv/bin/python -m loadtest.compare --only direct,gateway --tree ../before --repeats 7   # two versions

Calls carry a single text. The gateway runs with keys, exact quotas in a Redis of its own, and metrics; of its
peers only LiteLLM checks a key. Peers are installed once into --cache; nginx must be on the path. --tree also
starts the gateway of another checkout. Each repeat measures every contender, in alternating order.
"""

import argparse
import asyncio
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import uvloop
from rich.console import Console

from loadtest import corpora, results, servers, tables
from loadtest.corpora import CallFactory
from loadtest.generator import CallSender, closed_loop, open_loop, schedule
from loadtest.processes import PinnedProcess, process_group
from loadtest.recorder import Sample, SampleRecorder
from loadtest.results import Curve, Measure, spread
from loadtest.servers import RunningServer

CONTENDERS = ("direct", "nginx", "sglang-router", "vllm-router", "gateway", "litellm")
CALLERS, RATE = 32, 500
WARM_UP_S = 0.7
CURVE_CALLERS = (1, 2, 4, 8, 16, 32, 64, 128)
CURVE_RATES = (100, 250, 500, 1000, 2000, 3000, 4000, 6000, 8000, 12000)
# An open loop beyond a server's capacity measures only how long its queue was allowed to grow.
_HEADROOM = 1.1
_CACHE = Path.home() / ".cache" / "embedding-gateway-loadtest"
_LIMITS = (
    ", limits: {requests_per_minute: 100000000, tokens_per_minute: 1000000000,"
    " tokens_per_month: 1000000000000, requests_in_flight: 4096}"
)

Kind = Literal["callers", "rate"]


class Round(msgspec.Struct, frozen=True):
    """One sample of one contender. load: number of callers, or calls per second."""

    contender: str
    repeat: int
    kind: Kind
    load: int
    sample: Sample


class Figure(msgspec.Struct, frozen=True):
    """A column: what is read from the samples of one kind of load; None where it does not apply."""

    name: str
    kind: Kind
    load: int
    read: Callable[[Round], float | None]


def _cpu_us(measured: Round) -> float | None:
    name = measured.contender
    return measured.sample.cpu_us_per_call(name) if name in measured.sample.cpu else None


def _load_core_share(measured: Round) -> float:
    return sum(measured.sample.cpu.get(name, 0) for name in ("load", "stub", "redis"))


THROUGHPUT = Figure(f"requests/s, {CALLERS} callers", "callers", CALLERS, lambda r: r.sample.per_s)
CPU = Figure("its CPU per call, µs", "callers", CALLERS, _cpu_us)
P50 = Figure("p50 ms, 1 caller", "callers", 1, lambda r: r.sample.p50_ms)
P99 = Figure(f"p99 ms at {RATE}/s", "rate", RATE, lambda r: r.sample.p99_ms)
FIGURES = (
    THROUGHPUT,
    CPU,
    P50,
    P99,
    Figure("RSS MB", "callers", CALLERS, lambda r: r.sample.rss_mb.get(r.contender)),
    Figure("load core busy", "callers", CALLERS, _load_core_share),
    Figure("CPU elsewhere, cores", "callers", CALLERS, lambda r: r.sample.cpu["elsewhere"]),
)
ADDED_P50 = "added p50 ms, 1 caller"


def measures(rounds: Sequence[Round]) -> list[Measure]:
    """Return each contender's figures, in the order in which the contenders ran."""
    found = []
    for name in dict.fromkeys(measured.contender for measured in rounds):
        for figure in FIGURES:
            by_repeat = _read(rounds, name, figure)
            if by_repeat:
                found.append(Measure(name, figure.name, spread(by_repeat.values())))
            if figure is P50 and name != "direct":
                direct = _read(rounds, "direct", figure)
                added = [by_repeat[repeat] - direct[repeat] for repeat in by_repeat.keys() & direct.keys()]
                found += [Measure(name, ADDED_P50, spread(added))] if added else []
        total = sum(measured.sample.failed for measured in rounds if measured.contender == name)
        found.append(Measure(name, "failed calls", spread([total])))
    return found


def version_measures(rounds: Sequence[Round]) -> list[Measure]:
    """Return this checkout's figures with those of each other one, and ratios paired within each repeat."""
    found = []
    for name in dict.fromkeys(r.contender for r in rounds if r.contender.startswith("gateway:")):
        for figure in (THROUGHPUT, CPU, P50, P99):
            ours, other = _read(rounds, "gateway", figure), _read(rounds, name, figure)
            paired = [ours[repeat] / other[repeat] for repeat in ours.keys() & other.keys() if other[repeat]]
            if paired:
                values = spread(ours.values()), spread(other.values()), spread(paired)
                found.append(Measure(f"gateway ÷ {name}", figure.name, *values))
    return found


def _read(rounds: Sequence[Round], name: str, figure: Figure) -> dict[int, float]:
    """Return the figure of each repeat."""
    wanted = (name, figure.kind, figure.load)
    found = {r.repeat: figure.read(r) for r in rounds if (r.contender, r.kind, r.load) == wanted}
    return {repeat: value for repeat, value in found.items() if value is not None}


def curves(rounds: Sequence[Round]) -> list[Curve]:
    """Return throughput by callers and latency by rate."""
    found = []
    shapes: tuple[tuple[Kind, str, Callable[[Sample], float]], ...] = (
        ("callers", "requests/s by callers", lambda sample: sample.per_s),
        ("rate", "p99 ms by rate", lambda sample: sample.p99_ms),
        ("rate", "p50 ms by rate", lambda sample: sample.p50_ms),
    )
    for name in dict.fromkeys(measured.contender for measured in rounds):
        for kind, title, read in shapes:
            loads: dict[int, list[float]] = {}
            for measured in rounds:
                if (measured.contender, measured.kind) == (name, kind):
                    loads.setdefault(measured.load, []).append(read(measured.sample))
            if len(loads) > 1:
                ordered = sorted(loads)
                found.append(
                    Curve(name, title, [float(load) for load in ordered], [spread(loads[n]) for n in ordered])
                )
    return found


def gateway_config(stub_port: int, redis_url: str) -> str:
    """Return a configuration with keys, exact quotas and one TEI upstream."""
    return (
        f"quotas: {{store: '{redis_url}'}}\n"
        f"upstreams: {{stub: {{backend: tei, replicas: ['http://127.0.0.1:{stub_port}']}}}}\n"
        "models: {stub: {upstream: stub}}\n"
        f"tenants: {{load: {servers.tenant(servers.KEY, _LIMITS)}}}\n"
    )


class Comparison:
    """Contenders that all run at the same time and are measured one after the other."""

    def __init__(self, options: argparse.Namespace, folder: Path, processes: list[PinnedProcess]) -> None:
        self._options = options
        self._folder = folder
        self._seed = 1
        self.rounds: list[Round] = []
        self._stub = servers.start_stub(folder)
        processes.append(self._stub.process)
        redis, self._redis_url = servers.start_redis(folder)
        processes.append(redis)
        self._watch = {"stub": self._stub.process.usage, "redis": redis.usage}
        self._trees = {f"gateway:{tree.name}": tree for tree in options.tree}
        self._contenders = []
        for name in (*options.only, *self._trees):
            server = self._start(name)
            if server is not None:
                self._contenders.append(server)
                processes.extend([server.process] if name != "direct" else [])

    def _start(self, name: str) -> RunningServer | None:
        stub_port = self._stub.target.port
        try:
            if name == "direct":
                return msgspec.structs.replace(self._stub, name="direct")
            if name == "gateway" or name in self._trees:
                config = gateway_config(stub_port, self._redis_url)
                tree = self._trees.get(name, servers.ROOT)
                server = servers.start_gateway(self._folder, config, name=name, tree=tree)
            else:
                server = servers.start_peer(name, self._folder, stub_port, self._options.cache)
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            print(f"without {name}: {error}", flush=True)
            return None
        servers.check_forwards(server, self._stub)
        return server

    async def run(self) -> None:
        """Measure in turns, A B C, C B A: a drift of the machine then affects every contender."""
        for repeat in range(self._options.repeats):
            for server in self._contenders if repeat % 2 == 0 else reversed(self._contenders):
                await self._measure(server, repeat, "callers", CALLERS)
                await self._measure(server, repeat, "callers", 1)
                if self._carries(server, RATE):
                    await self._measure(server, repeat, "rate", RATE)
            print(f"repeat {repeat + 1} of {self._options.repeats} done", flush=True)
        if self._options.curves:
            for server in self._contenders:
                await self._measure_curves(server)

    async def _measure_curves(self, server: RunningServer) -> None:
        for callers in CURVE_CALLERS:
            await self._measure(server, self._options.repeats, "callers", callers)
        for rate in CURVE_RATES:
            if self._carries(server, rate):
                await self._measure(server, self._options.repeats, "rate", rate)

    def _carries(self, server: RunningServer, rate: int) -> bool:
        closed = (r for r in self.rounds if r.contender == server.name and r.kind == "callers")
        return max((r.sample.per_s for r in closed), default=0) > rate * _HEADROOM

    async def _measure(self, server: RunningServer, repeat: int, kind: Kind, load: int) -> None:
        seconds = self._options.seconds
        self._seed += 1
        # Direct calls have no process but the stub's, which is watched already.
        watch = self._watch | ({} if server.name == "direct" else server.watch)
        texts = corpora.texts("queries", self._seed)
        sender = CallSender(server.target, CallFactory(texts), SampleRecorder(watch))
        if kind == "callers":
            sample = await closed_loop(sender, load, seconds, WARM_UP_S)
        else:
            arrivals_s = schedule("poisson", load, seconds + WARM_UP_S, self._seed)
            sample = await open_loop(sender, arrivals_s, WARM_UP_S)
        self.rounds.append(Round(server.name, repeat, kind, load, sample))


def _options() -> argparse.Namespace:
    parser = results.argument_parser(__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CONTENDERS))
    parser.add_argument(
        "--tree",
        type=lambda text: Path(text).resolve(),
        action="append",
        default=[],
        help="another checkout whose gateway is measured too; repeatable",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3, help="measured period of each sample")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--cache", type=Path, default=_CACHE, help="where peers are installed")
    return parser.parse_args()


def main() -> None:
    """Start all contenders, measure, print and write the result."""
    options = _options()
    os.sched_setaffinity(0, {servers.LOAD_CORE})
    with tempfile.TemporaryDirectory() as folder, process_group() as processes:
        comparison = Comparison(options, Path(folder), processes)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(comparison.run())
    console, found = Console(width=190), measures(comparison.rounds)
    console.print(tables.pivoted(found))
    versions = version_measures(comparison.rounds)
    if versions:
        console.print(tables.listed(versions, "this checkout, the other, and their ratio within a repeat"))
    # A comparison of versions is for its reader; it does not belong in the README's table.
    run = "versions" if options.tree else "compare"
    results.write(results.new_result(run, found + versions, curves(comparison.rounds)), options.out)


if __name__ == "__main__":
    main()
