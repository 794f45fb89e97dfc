"""What callers go through: trickle, bulk, neighbours, replicas that die, hang or crawl, huge calls.

    .venv/bin/python -m loadtest.scenarios                 # all of them, some three minutes
    .venv/bin/python -m loadtest.scenarios --only bulk,hung_replica

Each has its baseline in the same run: the same load sent directly to the stub, or the same load undisturbed.
"""

import argparse
import asyncio
import contextlib
import http.client
import inspect
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from loadtest import corpora, schedules, servers
from loadtest.compare import machine
from loadtest.corpora import Calls, EncodingFormat
from loadtest.generator import Load, Recorder, Sample, Target, closed_loop, open_loop
from loadtest.processes import Running, group
from loadtest.servers import KEY, Server

_OTHER_KEY = "sk-loadtest-other"
_BULK = {"x-priority": "bulk"}


class Finding(msgspec.Struct, frozen=True):
    """One line: a figure and its baseline. ratio: the figure in baselines."""

    scenario: str
    measure: str
    baseline: float
    gateway: float
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """None where there is nothing to divide by."""
        return round(self.gateway / self.baseline, 3) if self.baseline else None


class Stage:
    """Servers of one scenario; they end with it."""

    def __init__(self, folder: Path, started: list[Running], seconds: float) -> None:
        self.seconds = seconds
        self._folder = folder
        self._started = started
        self._seed = 0

    def stub(self, *flags: str) -> Server:
        """An upstream with these flags."""
        stub = servers.start_stub(self._folder, *flags)
        assert stub.process is not None
        self._started.append(stub.process)
        return stub

    def gateway(self, *stubs: Server, settings: str = "") -> Server:
        """In front of equal replicas; two tenants without limits. settings: more of the upstream."""
        replicas = ", ".join(f"'http://127.0.0.1:{one.target.port}'" for one in stubs)
        server = servers.start_gateway(
            self._folder,
            f"upstreams: {{stub: {{backend: tei, replicas: [{replicas}]{settings}}}}}\n"
            "models: {stub: {upstream: stub}}\n"
            f"tenants: {{one: {servers.tenant(KEY)}, other: {servers.tenant(_OTHER_KEY)}}}\n",
        )
        assert server.process is not None
        self._started.append(server.process)
        return server

    def _load(
        self, server: Server, target: Target | None, inputs: int, form: EncodingFormat = "base64"
    ) -> Load:
        self._seed += 1
        watch = {server.name: server.process.usage} if server.process else {}
        # Replies of many inputs are all held against their texts, in their order.
        every = 1 if inputs > 32 else 7
        calls = Calls(
            corpora.texts("queries" if inputs == 1 else "mixed", self._seed), inputs=inputs, form=form
        )
        return Load(target or server.target, calls, Recorder(watch), every)

    async def closed(
        self, server: Server, callers: int, inputs: int = 1, target: Target | None = None
    ) -> Sample:
        """So many callers."""
        return await closed_loop(self._load(server, target, inputs), callers, self.seconds, 0.5)

    async def closed_floats(self, server: Server, callers: int, inputs: int) -> Sample:
        """The same for callers that want JSON numbers."""
        load = self._load(server, None, inputs, "float")
        return await closed_loop(load, callers, self.seconds, 0.5)

    async def open(
        self, server: Server, rate: float, inputs: int = 1, target: Target | None = None
    ) -> Sample:
        """So many calls a second."""
        load = self._load(server, target, inputs)
        return await open_loop(load, schedules.poisson(rate, self.seconds + 0.5, self._seed), 0.5)


def _failed(name: str, before: Sample, sample: Sample) -> Finding:
    return Finding(name, "failed calls", before.failed, sample.failed, _statuses(sample))


def _cpu(server: Server, sample: Sample) -> str:
    return f"{sample.cpu[server.name] / max(sample.per_s, 0.01) * 1000:.2f} ms of CPU a call"


def _statuses(sample: Sample) -> str:
    bad = {status: count for status, count in sample.statuses.items() if status != "200"}
    return f"{bad or ''} {f'{sample.unanswered} unanswered' if sample.unanswered else ''}".strip()


async def trickle(stage: Stage) -> list[Finding]:
    """Single texts, 50 a second, to an upstream that needs 5 ms."""
    stub = stage.stub("--base-ms", "5", "--parallel", "8")
    gateway = stage.gateway(stub)
    direct, ours = await stage.open(stub, 50), await stage.open(gateway, 50)
    return [
        Finding("trickle", "p50 ms", direct.p50_ms, ours.p50_ms),
        Finding("trickle", "p99 ms", direct.p99_ms, ours.p99_ms),
    ]


async def callers(stage: Stage) -> list[Finding]:
    """Single texts from more and more callers, to an upstream for which a batch is cheaper than its texts."""
    stub = stage.stub("--base-ms", "4", "--input-ms", "0.25", "--parallel", "1")
    gateway = stage.gateway(stub)
    found = []
    for count in (1, 8, 32, 128):
        direct, ours = await stage.closed(stub, count), await stage.closed(gateway, count)
        found.append(Finding("callers", f"calls/s, {count} callers", direct.per_s, ours.per_s))
    return found


async def bulk(stage: Stage) -> list[Finding]:
    """Eight callers with 32 texts a call."""
    stub = stage.stub("--base-ms", "4", "--input-ms", "0.25", "--parallel", "2")
    gateway = stage.gateway(stub)
    direct, ours = await stage.closed(stub, 8, 32), await stage.closed(gateway, 8, 32)
    return [
        Finding("bulk", "inputs/s", direct.per_s * 32, ours.per_s * 32, _cpu(gateway, ours)),
        Finding("bulk", "p50 ms", direct.p50_ms, ours.p50_ms),
    ]


async def both(stage: Stage) -> list[Finding]:
    """A trickle of single texts beside sixteen bulk callers; baseline: the same two, directly."""
    stub = stage.stub("--base-ms", "4", "--input-ms", "0.5", "--parallel", "2")
    gateway = stage.gateway(stub, settings=", in_flight_batches: 2")
    alone = await stage.open(gateway, 20)
    direct, direct_bulk = await asyncio.gather(stage.open(stub, 20), stage.closed(stub, 16, 32))
    other = servers.bearer(gateway.target.port, _OTHER_KEY)
    target = Target(other.port, other.headers | _BULK)
    ours, our_bulk = await asyncio.gather(
        stage.open(gateway, 20), stage.closed(gateway, 16, 32, target=target)
    )
    return [
        Finding("both", "trickle's p95 ms", direct.p95_ms, ours.p95_ms, f"alone {alone.p95_ms} ms"),
        Finding("both", "bulk inputs/s", direct_bulk.per_s * 32, our_bulk.per_s * 32),
    ]


async def noisy_neighbour(stage: Stage) -> list[Finding]:
    """A victim with one call at a time beside 200 callers of another tenant; baseline: the victim alone."""
    stub = stage.stub("--base-ms", "50", "--parallel", "8")
    gateway = stage.gateway(stub, settings=", in_flight_batches: 8")
    flood = servers.bearer(gateway.target.port, _OTHER_KEY)
    alone = await stage.closed(gateway, 1)
    beside, others = await asyncio.gather(stage.closed(gateway, 1), stage.closed(gateway, 200, target=flood))
    direct, _ = await asyncio.gather(stage.closed(stub, 1), stage.closed(stub, 200))
    note = f"directly, without the gateway: {direct.p95_ms:.0f} ms; flood {others.per_s:.0f} calls/s"
    return [Finding("noisy_neighbour", "victim's p95 ms", alone.p95_ms, beside.p95_ms, note)]


async def dead_replica(stage: Stage) -> list[Finding]:
    """One of three replicas dies under 200 calls a second; baseline: before it did."""
    return await _disturbed(stage, "dead_replica", {"die": True})


async def hung_replica(stage: Stage) -> list[Finding]:
    """One of three replicas takes calls and answers none."""
    return await _disturbed(stage, "hung_replica", {"hang": True})


async def slow_upstream(stage: Stage) -> list[Finding]:
    """One of three replicas becomes twenty times slower."""
    return await _disturbed(stage, "slow_upstream", {"slow": 20.0})


async def _disturbed(stage: Stage, name: str, wish: dict[str, object]) -> list[Finding]:
    stubs = [stage.stub("--base-ms", "5", "--parallel", "8") for _ in range(3)]
    gateway = stage.gateway(*stubs, settings=", attempt_timeout_s: 2")
    before = await stage.open(gateway, 200)
    for stub in stubs:
        servers.control(stub, reset=True)

    async def disturb() -> int:
        await asyncio.sleep(stage.seconds / 3)
        got = servers.stats(stubs[0]).requests
        # One that dies does not say so.
        with contextlib.suppress(OSError, http.client.HTTPException):
            servers.control(stubs[0], **wish)
        return got

    sample, got = await asyncio.gather(stage.open(gateway, 200), disturb())
    if "die" not in wish:
        got = servers.stats(stubs[0]).requests
    attempts = got + sum(servers.stats(stub).requests for stub in stubs[1:])
    return [
        _failed(name, before, sample),
        Finding(name, "p50 ms", before.p50_ms, sample.p50_ms),
        Finding(name, "p99 ms", before.p99_ms, sample.p99_ms),
        Finding(name, "attempts a call", 1.0, round(attempts / sample.sent, 3)),
    ]


async def batch_replies(stage: Stage) -> list[Finding]:
    """32 texts a call, 1,024 dimensions, to an upstream that takes no time; CPU of the gateway for a call."""
    stub = stage.stub()
    gateway = stage.gateway(stub)
    packed, packed_ours = await stage.closed(stub, 4, 32), await stage.closed(gateway, 4, 32)
    floats, floats_ours = (
        await stage.closed_floats(stub, 4, 32),
        await stage.closed_floats(gateway, 4, 32),
    )
    return [
        Finding(
            "batch_replies", "calls/s, base64", packed.per_s, packed_ours.per_s, _cpu(gateway, packed_ours)
        ),
        Finding(
            "batch_replies", "calls/s, floats", floats.per_s, floats_ours.per_s, _cpu(gateway, floats_ours)
        ),
    ]


async def huge_replies(stage: Stage) -> list[Finding]:
    """1,000 vectors of 4,096 dimensions in one reply, as base64: 22 MB."""
    stub = stage.stub("--dimensions", "4096", "--items", "1000", "--permits", "4000")
    gateway = stage.gateway(stub)
    direct, ours = await stage.closed(stub, 1, 1000), await stage.closed(gateway, 1, 1000)
    return [
        Finding("huge_replies", "p50 ms", direct.p50_ms, ours.p50_ms, _cpu(gateway, ours)),
        _failed("huge_replies", direct, ours),
        Finding("huge_replies", "RSS MB", 0, ours.rss_mb[gateway.name]),
    ]


async def many_inputs(stage: Stage) -> list[Finding]:
    """2,048 inputs in one call, to a TEI with its default limits; baseline: 32 a call by eight callers."""
    stub = stage.stub("--base-ms", "4", "--input-ms", "0.25", "--parallel", "2")
    gateway = stage.gateway(stub)
    direct = await stage.closed(stub, 8, 32)
    servers.control(stub, reset=True)
    ours = await stage.closed(gateway, 1, 2048)
    told = servers.stats(stub)
    note = f"largest request {told.most_inputs} inputs, refused {told.refused or 0}, wrong order {ours.wrong}"
    return [
        # Few calls end in a stretch: their time tells more than their number.
        Finding("many_inputs", "inputs/s", direct.per_s * 32, 2048 / ours.p50_ms * 1000, note),
        _failed("many_inputs", direct, ours),
    ]


Scenario = Callable[[Stage], Awaitable[list[Finding]]]
SCENARIOS: dict[str, Scenario] = {
    one.__name__: one
    for one in (
        trickle,
        callers,
        bulk,
        both,
        noisy_neighbour,
        dead_replica,
        hung_replica,
        slow_upstream,
        batch_replies,
        huge_replies,
        many_inputs,
    )
}


def table(findings: list[Finding]) -> Table:
    """For the terminal."""
    shown = Table()
    for column in ("scenario", "measure", "baseline", "gateway", "ratio", "note"):
        shown.add_column(column, justify="left" if column in {"scenario", "measure", "note"} else "right")
    for one in findings:
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        figures = (f"{one.baseline:,.2f}", f"{one.gateway:,.2f}", ratio)
        shown.add_row(one.scenario, one.measure, *figures, one.note)
    return shown


async def play(name: str, seconds: float) -> list[Finding]:
    """One scenario on fresh servers."""
    with tempfile.TemporaryDirectory() as folder, group() as started:
        return await SCENARIOS[name](Stage(Path(folder), started, seconds))


def main() -> None:
    """Play, tell, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SCENARIOS))
    parser.add_argument("--seconds", type=float, default=4, help="measured, each sample")
    parser.add_argument("--out", type=Path, default=Path("loadtest-results"))
    options = parser.parse_args()
    os.sched_setaffinity(0, {servers.LOAD_CORE})
    findings: list[Finding] = []
    for name in options.only:
        print(f"{name}: {inspect.getdoc(SCENARIOS[name])}", flush=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            findings += runner.run(play(name, options.seconds))
    options.out.mkdir(parents=True, exist_ok=True)
    told = {"when": time.strftime("%Y-%m-%d %H:%M"), "machine": machine(), "findings": findings}
    (options.out / "scenarios.json").write_bytes(msgspec.json.format(msgspec.json.encode(told)))
    Console(width=170).print(table(findings))


if __name__ == "__main__":
    main()
