"""What callers go through: trickle, bulk, neighbours, replicas that die, hang or crawl, huge calls.

    .venv/bin/python -m loadtest.scenarios                 # all of them, some three minutes
    .venv/bin/python -m loadtest.scenarios --only bulk,hung_replica

Each has its baseline in the same run: the same load sent directly to the stub, or the same load undisturbed.
"""

import argparse
import asyncio
import inspect
import os
import tempfile
import time
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from loadtest import servers
from loadtest.compare import machine
from loadtest.generator import Target
from loadtest.processes import group
from loadtest.stage import BATCH, OTHER_KEY, Finding, Scenario, Shape, Stage, cpu, failed
from loadtest.troubles import TROUBLES

_BULK = {"x-priority": "bulk"}


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
    direct, ours = await stage.closed(stub, 8, BATCH), await stage.closed(gateway, 8, BATCH)
    return [
        Finding("bulk", "inputs/s", direct.per_s * 32, ours.per_s * 32, cpu(gateway, ours)),
        Finding("bulk", "p50 ms", direct.p50_ms, ours.p50_ms),
    ]


async def both(stage: Stage) -> list[Finding]:
    """A trickle of single texts beside sixteen bulk callers; baseline: the same two, directly."""
    stub = stage.stub("--base-ms", "4", "--input-ms", "0.5", "--parallel", "2")
    gateway = stage.gateway(stub, settings=", in_flight_batches: 2")
    alone = await stage.open(gateway, 20)
    direct, direct_bulk = await asyncio.gather(stage.open(stub, 20), stage.closed(stub, 16, BATCH))
    other = servers.bearer(gateway.target.port, OTHER_KEY)
    target = Target(other.port, other.headers | _BULK)
    ours, our_bulk = await asyncio.gather(stage.open(gateway, 20), stage.closed(gateway, 16, BATCH, target))
    return [
        Finding("both", "trickle's p95 ms", direct.p95_ms, ours.p95_ms, f"alone {alone.p95_ms} ms"),
        Finding("both", "bulk inputs/s", direct_bulk.per_s * 32, our_bulk.per_s * 32),
    ]


async def noisy_neighbour(stage: Stage) -> list[Finding]:
    """A victim with one call at a time beside 200 callers of another tenant; baseline: the victim alone."""
    stub = stage.stub("--base-ms", "50", "--parallel", "8")
    gateway = stage.gateway(stub, settings=", in_flight_batches: 8")
    flood = servers.bearer(gateway.target.port, OTHER_KEY)
    alone = await stage.closed(gateway, 1)
    beside, others = await asyncio.gather(stage.closed(gateway, 1), stage.closed(gateway, 200, target=flood))
    direct, _ = await asyncio.gather(stage.closed(stub, 1), stage.closed(stub, 200))
    note = f"directly, without the gateway: {direct.p95_ms:.0f} ms; flood {others.per_s:.0f} calls/s"
    return [Finding("noisy_neighbour", "victim's p95 ms", alone.p95_ms, beside.p95_ms, note)]


async def batch_replies(stage: Stage) -> list[Finding]:
    """32 texts a call, 1,024 dimensions, to an upstream that takes no time; CPU of the gateway for a call."""
    stub = stage.stub()
    gateway = stage.gateway(stub)
    packed, packed_ours = await stage.closed(stub, 4, BATCH), await stage.closed(gateway, 4, BATCH)
    numbers = Shape(32, "float")
    floats, floats_ours = await stage.closed(stub, 4, numbers), await stage.closed(gateway, 4, numbers)
    return [
        Finding(
            "batch_replies", "calls/s, base64", packed.per_s, packed_ours.per_s, cpu(gateway, packed_ours)
        ),
        Finding(
            "batch_replies", "calls/s, floats", floats.per_s, floats_ours.per_s, cpu(gateway, floats_ours)
        ),
    ]


async def huge_replies(stage: Stage) -> list[Finding]:
    """1,000 vectors of 4,096 dimensions in one reply, as base64: 22 MB."""
    stub = stage.stub("--dimensions", "4096", "--items", "1000", "--permits", "4000")
    gateway = stage.gateway(stub)
    direct, ours = await stage.closed(stub, 1, Shape(1000)), await stage.closed(gateway, 1, Shape(1000))
    return [
        Finding("huge_replies", "p50 ms", direct.p50_ms, ours.p50_ms, cpu(gateway, ours)),
        failed("huge_replies", direct, ours),
        Finding("huge_replies", "RSS MB", 0, ours.rss_mb[gateway.name]),
    ]


async def many_inputs(stage: Stage) -> list[Finding]:
    """2,048 inputs in one call, to a TEI with its default limits; baseline: 32 a call by eight callers."""
    stub = stage.stub("--base-ms", "4", "--input-ms", "0.25", "--parallel", "2")
    gateway = stage.gateway(stub)
    direct = await stage.closed(stub, 8, BATCH)
    servers.control(stub, reset=True)
    ours = await stage.closed(gateway, 1, Shape(2048))
    told = servers.stats(stub)
    note = f"largest request {told.most_inputs} inputs, refused {told.refused or 0}, wrong order {ours.wrong}"
    return [
        # Few calls end in a stretch: their time tells more than their number.
        Finding("many_inputs", "inputs/s", direct.per_s * 32, 2048 / ours.p50_ms * 1000, note),
        failed("many_inputs", direct, ours),
    ]


async def alike(stage: Stage) -> list[Finding]:
    """32 callers of one tenant who send the same text at the same time; baseline: each a text of its own."""
    stub = stage.stub("--base-ms", "4", "--input-ms", "0.25", "--parallel", "1")
    gateway = stage.gateway(stub)
    found = []
    for shape in (Shape(), Shape(alike=32)):
        servers.control(stub, reset=True)
        sample, told = await stage.closed(gateway, 32, shape), servers.stats(stub)
        found.append((sample, told.requests / sample.sent, told.inputs / sample.sent))
    (apart, *apart_asked), (together, *together_asked) = found
    return [
        Finding("alike", "calls/s", apart.per_s, together.per_s, cpu(gateway, together)),
        Finding("alike", "upstream requests a call", apart_asked[0], together_asked[0]),
        Finding("alike", "inputs computed a call", apart_asked[1], together_asked[1]),
        failed("alike", apart, together),
    ]


SCENARIOS: dict[str, Scenario] = {
    one.__name__: one
    for one in (
        trickle,
        callers,
        alike,
        bulk,
        both,
        noisy_neighbour,
        batch_replies,
        huge_replies,
        many_inputs,
    )
} | TROUBLES


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
