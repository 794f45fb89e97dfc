"""The gateway beside its peers on one stub: single-text calls, interleaved repeats, medians and spread.

    .venv/bin/python -m loadtest.compare                     # some four minutes
    .venv/bin/python -m loadtest.compare --curves            # latency by rate, throughput by callers, too
    .venv/bin/python -m loadtest.compare --only gateway,sglang-router --repeats 5
    .venv/bin/python -m loadtest.compare --only direct,gateway --tree ../before --repeats 7   # two versions

--tree starts the gateway of another checkout too; each repeat measures both, in alternating order.

The gateway runs with keys, exact quotas in a Redis of its own, and metrics. Peers do none of that, but for
LiteLLM's master key. They come from the package index, once, into --cache; nginx where it is installed.
"""

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from loadtest import corpora, schedules, servers
from loadtest.corpora import Calls
from loadtest.generator import Load, Recorder, Sample, closed_loop, open_loop
from loadtest.processes import Running, group
from loadtest.servers import Server

CONTENDERS = ("direct", "nginx", "sglang-router", "vllm-router", "gateway", "litellm")
CALLERS, RATE = 32, 500
CURVE_CALLERS = (1, 2, 4, 8, 16, 32, 64, 128)
CURVE_RATES = (100, 250, 500, 1000, 2000, 3000, 4000, 6000, 8000, 12000)
# What shares the load's core.
_BESIDE = ("load", "stub", "redis")
# An open loop beyond what a server carries measures only how long its queue was let to grow.
_HEADROOM = 1.1
_CACHE = Path.home() / ".cache" / "embedding-gateway-loadtest"
_LIMITS = (
    ", limits: {requests_per_minute: 100000000, tokens_per_minute: 1000000000,"
    " tokens_per_month: 1000000000000, requests_in_flight: 4096}"
)

Kind = Literal["callers", "rate"]


class Round(msgspec.Struct, frozen=True):
    """One sample of one contender. load: so many callers, or calls a second."""

    contender: str
    repeat: int
    kind: Kind
    load: int
    sample: Sample


class Result(msgspec.Struct, frozen=True):
    """A whole run, as its JSON holds it."""

    when: str
    machine: str
    command: str
    rounds: list[Round]


class Middle(msgspec.Struct, frozen=True):
    """Median of the repeats, and the least and most of them."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        """Digits that the spread leaves meaning to."""
        digits = 0 if self.median >= 1000 else 1 if self.median >= 10 else 2
        return f"{self.median:,.{digits}f} ({self.least:,.{digits}f}-{self.most:,.{digits}f})"


class Row(msgspec.Struct, frozen=True):
    """One contender's line. added_p50_ms: over the direct calls of the same repeat.

    load_core: how busy load, stub and Redis kept theirs: near 1 the load is the limit, not the contender.
    elsewhere: the most CPU, in cores, that strangers took in any sample.
    """

    contender: str
    per_s: Middle
    cpu_us: Middle | None
    p50_ms: Middle
    added_p50_ms: Middle | None
    p99_ms: Middle | None
    rss_mb: float | None
    load_core: Middle
    elsewhere: float
    failed: int


def middle(values: Iterable[float]) -> Middle | None:
    """None where there is nothing."""
    found = sorted(values)
    return Middle(statistics.median(found), found[0], found[-1]) if found else None


def summary(rounds: Sequence[Round]) -> list[Row]:
    """The table's lines, in the order in which the contenders ran."""
    names = list(dict.fromkeys(one.contender for one in rounds))
    return [row for name in names if (row := _row(name, rounds)) is not None]


def _of(rounds: Sequence[Round], name: str, kind: Kind, load: int) -> dict[int, Sample]:
    return {
        one.repeat: one.sample for one in rounds if (one.contender, one.kind, one.load) == (name, kind, load)
    }


def _row(name: str, rounds: Sequence[Round]) -> Row | None:
    many = _of(rounds, name, "callers", CALLERS)
    one = _of(rounds, name, "callers", 1)
    base = _of(rounds, "direct", "callers", 1)
    steady = _of(rounds, name, "rate", RATE)
    per_s, p50_ms = middle(s.per_s for s in many.values()), middle(s.p50_ms for s in one.values())
    load_core = middle(sum(s.cpu.get(one, 0) for one in _BESIDE) for s in many.values())
    if per_s is None or p50_ms is None or load_core is None:
        return None
    added = {repeat: s.p50_ms - base[repeat].p50_ms for repeat, s in one.items() if repeat in base}
    return Row(
        name,
        per_s,
        middle(s.cpu[name] / s.per_s * 1e6 for s in many.values() if name in s.cpu and s.per_s),
        p50_ms,
        None if name == "direct" else middle(added.values()),
        middle(s.p99_ms for s in steady.values()),
        max((s.rss_mb[name] for s in many.values() if name in s.rss_mb), default=None),
        load_core,
        max(s.cpu["elsewhere"] for s in (*many.values(), *one.values(), *steady.values())),
        sum(s.failed for s in (*many.values(), *one.values(), *steady.values())),
    )


def table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    per_s = {row.contender: row.per_s.median for row in rows}
    shown = Table(title="single-text calls, 1,024 dimensions as base64; medians (least-most) of the repeats")
    columns = (
        "",
        f"requests/s, {CALLERS} callers",
        "of sglang-router",
        "× litellm",
        "its CPU a call, µs",
        "p50 ms, 1 caller",
        "added p50 ms",
        f"p99 ms at {RATE}/s",
        "RSS MB",
        "load core busy",
        "elsewhere",
        "failed",
    )
    for column in columns:
        shown.add_column(column, justify="left" if not column else "right")
    for row in rows:
        shown.add_row(
            row.contender,
            str(row.per_s),
            _ratio(row.per_s.median, per_s.get("sglang-router")),
            _ratio(row.per_s.median, per_s.get("litellm")),
            _text(row.cpu_us),
            str(row.p50_ms),
            _text(row.added_p50_ms),
            _text(row.p99_ms),
            "" if row.rss_mb is None else f"{row.rss_mb:.0f}",
            f"{row.load_core.median:.0%}",
            f"{row.elsewhere:.0%}",
            str(row.failed),
        )
    return shown


def tree_table(rounds: Sequence[Round]) -> Table:
    """Return the ratios of this checkout to each other one, paired within each repeat."""
    shown = Table(title="this checkout ÷ the other, in the same repeat; medians (least-most)")
    for column in ("", f"requests/s, {CALLERS} callers", "CPU a call", "p50, 1 caller", f"p99 at {RATE}/s"):
        shown.add_column(column, justify="left" if not column else "right")
    for name in dict.fromkeys(r.contender for r in rounds if r.contender.startswith("gateway:")):
        many = _of(rounds, "gateway", "callers", CALLERS), _of(rounds, name, "callers", CALLERS)
        single = _of(rounds, "gateway", "callers", 1), _of(rounds, name, "callers", 1)
        steady = _of(rounds, "gateway", "rate", RATE), _of(rounds, name, "rate", RATE)
        shown.add_row(
            name,
            _text(_paired(*many, lambda sample: sample.per_s)),
            _text(_paired(*many, _cpu_per_call)),
            _text(_paired(*single, lambda sample: sample.p50_ms)),
            _text(_paired(*steady, lambda sample: sample.p99_ms)),
        )
    return shown


def _paired(
    ours: dict[int, Sample], other: dict[int, Sample], figure: Callable[[Sample], float]
) -> Middle | None:
    """Return the ratio of a figure over the repeats that measured both."""
    return middle(figure(ours[repeat]) / figure(other[repeat]) for repeat in ours if repeat in other)


def _cpu_per_call(sample: Sample) -> float:
    cpu = sum(share for name, share in sample.cpu.items() if name.startswith("gateway"))
    return cpu / sample.per_s


def _text(value: Middle | None) -> str:
    return "" if value is None else str(value)


def _ratio(value: float, other: float | None) -> str:
    return f"{value / other:.2f}" if other else ""


def gateway_config(stub_port: int, redis_url: str) -> str:
    """Keys, exact quotas, one TEI upstream."""
    return (
        f"quotas: {{store: '{redis_url}'}}\n"
        f"upstreams: {{stub: {{backend: tei, replicas: ['http://127.0.0.1:{stub_port}']}}}}\n"
        "models: {stub: {upstream: stub}}\n"
        f"tenants: {{load: {servers.tenant(servers.KEY, _LIMITS)}}}\n"
    )


class Comparison:
    """Contenders that are all up, measured one at a time."""

    def __init__(self, options: argparse.Namespace, folder: Path, started: list[Running]) -> None:
        self._options = options
        self._seed = options.seed
        self.rounds: list[Round] = []
        self._stub = servers.start_stub(folder)
        started.append(_process(self._stub))
        redis, redis_url = servers.start_redis(folder)
        started.append(redis)
        self._beside = {"stub": _process(self._stub).usage, "redis": redis.usage}
        self._contenders = []
        self._trees = {f"gateway:{tree.name}": tree for tree in options.tree}
        for name in (*options.only, *self._trees):
            server = self._start(name, folder, redis_url)
            if server is not None:
                self._contenders.append(server)
                started.extend([server.process] if server.process and name != "direct" else [])

    def _start(self, name: str, folder: Path, redis_url: str) -> Server | None:
        stub_port = self._stub.target.port
        try:
            if name == "direct":
                return Server("direct", self._stub.target)
            if name == "gateway" or name in self._trees:
                config = gateway_config(stub_port, redis_url)
                tree = self._trees.get(name, servers.ROOT)
                server = servers.start_gateway(folder, config, name=name, tree=tree)
            else:
                server = servers.start_peer(name, folder, stub_port, self._options.cache)
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            print(f"without {name}: {error}", flush=True)
            return None
        servers.check_forwards(server, self._stub)
        return server

    async def run(self) -> None:
        """Measure in turns, A B C, C B A: a drift of the machine then hits every contender."""
        for repeat in range(self._options.repeats):
            for server in self._contenders if repeat % 2 == 0 else reversed(self._contenders):
                await self._measure(server, repeat, "callers", CALLERS)
                await self._measure(server, repeat, "callers", 1)
                if self._carries(server, RATE):
                    await self._measure(server, repeat, "rate", RATE)
            print(f"repeat {repeat + 1} of {self._options.repeats} done", flush=True)
        if self._options.curves:
            for server in self._contenders:
                await self._curves(server)

    async def _curves(self, server: Server) -> None:
        for callers in CURVE_CALLERS:
            await self._measure(server, self._options.repeats, "callers", callers)
        for rate in CURVE_RATES:
            if self._carries(server, rate):
                await self._measure(server, self._options.repeats, "rate", rate)

    def _carries(self, server: Server, rate: int) -> bool:
        of_it = (one for one in self.rounds if one.contender == server.name and one.kind == "callers")
        return max((one.sample.per_s for one in of_it), default=0) > rate * _HEADROOM

    async def _measure(self, server: Server, repeat: int, kind: Kind, load: int) -> None:
        options = self._options
        self._seed += 1
        watch = dict(self._beside)
        if server.process is not None:
            watch[server.name] = server.process.usage
        texts = corpora.texts(options.mixture, self._seed)
        work = Load(server.target, Calls(texts, form=options.format), Recorder(watch))
        if kind == "callers":
            sample = await closed_loop(work, load, options.seconds, options.warmup)
        else:
            seconds = options.seconds + options.warmup
            moments_s = schedules.poisson(load, seconds, self._seed)
            sample = await open_loop(work, moments_s, options.warmup)
        self.rounds.append(Round(server.name, repeat, kind, load, sample))


def _process(server: Server) -> Running:
    assert server.process is not None
    return server.process


def machine() -> str:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
    return (
        f"{os.cpu_count()} cores of {model}, Linux {platform.release()}, Python {platform.python_version()}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CONTENDERS))
    parser.add_argument(
        "--tree",
        type=lambda text: Path(text).resolve(),
        action="append",
        default=[],
        help="another checkout whose gateway is measured too; repeatable",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3, help="measured, each sample")
    parser.add_argument("--warmup", type=float, default=0.7)
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--format", choices=("base64", "float"), default="base64")
    parser.add_argument("--mixture", choices=("queries", "passages", "mixed"), default="queries")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=_CACHE, help="where peers are installed")
    parser.add_argument("--out", type=Path, default=Path("loadtest-results"), help="JSON and plots")
    return parser.parse_args()


def main() -> None:
    """Start everything, measure, tell."""
    options = _options()
    os.sched_setaffinity(0, {servers.LOAD_CORE})
    with tempfile.TemporaryDirectory() as folder, group() as started:
        comparison = Comparison(options, Path(folder), started)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(comparison.run())
    command = "python -m loadtest.compare" + (" --curves" if options.curves else "")
    when = time.strftime("%Y-%m-%d %H:%M")
    result = Result(when, machine(), command, comparison.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "compare.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    console = Console(width=190)
    console.print(table(summary(result.rounds)))
    if options.tree:
        console.print(tree_table(result.rounds))
    print(f"{result.machine}\nall figures: {path}; plots: .venv/bin/python -m loadtest.plots {path}")


if __name__ == "__main__":
    main()
