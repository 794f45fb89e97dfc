"""What traces cost: the same load on a gateway without them, with 1 % of calls sampled, and with all.

    .venv/bin/python -m loadtest.tracing

Three gateways with keys and quotas in memory stand side by side on core 0, one stub behind them; they are
measured in turns. A collector that reads OTLP and keeps nothing shares core 1 with stub and load.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from loadtest import corpora, servers
from loadtest.corpora import Calls
from loadtest.generator import Load, Recorder, Sample, closed_loop
from loadtest.processes import Running, free_port, group, listens
from loadtest.servers import Server

# Share of calls that is recorded; None is no tracing at all.
MODES: Mapping[str, float | None] = {"off": None, "1 %": 0.01, "full": 1.0}


class Row(msgspec.Struct, frozen=True):
    """One mode beside `off`: medians of figures and of ratios within each repeat, with a spread."""

    mode: str
    per_s: float
    cpu_us: float
    throughput: float
    least: float
    most: float
    cpu: float


def config(stub_port: int, collector_port: int, sample: float | None) -> str:
    """One tenant with limits, one TEI upstream, no line a call."""
    tracing = (
        ""
        if sample is None
        else f"tracing: {{endpoint: 'http://127.0.0.1:{collector_port}/', sample: {sample}}}\n"
    )
    return (
        f"{tracing}logs: {{access: false}}\n"
        f"upstreams: {{stub: {{backend: tei, replicas: ['http://127.0.0.1:{stub_port}']}}}}\n"
        "models: {stub: {upstream: stub}}\n"
        f"tenants: {{load: {servers.tenant(servers.KEY, ', limits: {requests_per_minute: 1000000000}')}}}\n"
    )


def start_collector(folder: Path) -> tuple[Running, int]:
    """Its process and its port."""
    port = free_port()
    command = [sys.executable, "-m", "loadtest.tracing", "--collect", str(port)]
    collector = Running(command, servers.LOAD_CORE, folder / "collector.log")
    collector.wait_until(lambda: listens(port))
    return collector, port


async def collect(port: int) -> None:
    """Answer every POST with 200, until the process is ended."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
                await reader.readexactly(int(length))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    await server.serve_forever()


async def measured(server: Server, options: argparse.Namespace, seed: int) -> Sample:
    """A closed loop, after a short warm-up."""
    calls = Calls(corpora.texts("queries", seed), form="base64")
    load = Load(server.target, calls, Recorder(servers.watch(server)))
    sample = await closed_loop(load, options.callers, options.seconds, warmup_s=0.5)
    if sample.statuses.keys() - {"200"}:
        raise RuntimeError(f"{server.name}: {sample.statuses}")
    return sample


async def rounds(options: argparse.Namespace, contenders: Sequence[Server]) -> list[dict[str, Sample]]:
    """A B C, C B A: what drifts, drifts for all, and nobody always follows the same one."""
    found = []
    for repeat in range(options.repeats):
        order = contenders if repeat % 2 == 0 else contenders[::-1]
        found.append({one.name: await measured(one, options, repeat * 10 + n) for n, one in enumerate(order)})
        print(f"repeat {repeat + 1} of {options.repeats} done", flush=True)
    return found


def summary(found: Sequence[Mapping[str, Sample]]) -> list[Row]:
    """Each mode in ratios to no tracing."""
    rows = []
    for mode in MODES:
        ratios = [one[mode].per_s / one["off"].per_s for one in found]
        cpu = [_cpu_us(one[mode]) / _cpu_us(one["off"]) for one in found]
        rows.append(
            Row(
                mode,
                median(one[mode].per_s for one in found),
                median(_cpu_us(one[mode]) for one in found),
                median(ratios),
                min(ratios),
                max(ratios),
                median(cpu),
            )
        )
    return rows


def _cpu_us(sample: Sample) -> float:
    """Of the gateway, for each call."""
    (cores,) = [used for name, used in sample.cpu.items() if name in MODES]
    return cores / sample.per_s * 1e6


def table(rows: Sequence[Row]) -> Table:
    """For people."""
    shown = Table("traces", "calls/s", "CPU a call", "throughput to off (least-most)", "CPU a call to off")
    for one in rows:
        shown.add_row(
            one.mode,
            f"{one.per_s:,.0f}",
            f"{one.cpu_us:.0f} µs",
            f"{one.throughput:.3f} ({one.least:.3f}-{one.most:.3f})",
            f"{one.cpu:.3f}",
        )
    return shown


def main() -> None:
    """Start everything, measure, tell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--collect", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.collect:
            runner.run(collect(options.collect))
            return
        os.sched_setaffinity(0, {servers.LOAD_CORE})
        with tempfile.TemporaryDirectory() as folder, group() as started:
            stub = servers.start_stub(Path(folder))
            collector, port = start_collector(Path(folder))
            started += [one for one in (stub.process, collector) if one is not None]
            contenders = []
            for number, (mode, sample) in enumerate(MODES.items()):
                text = config(stub.target.port, port, sample)
                one = servers.start_gateway(Path(folder), text, name=f"gateway-{number}")
                assert one.process is not None
                started.append(one.process)
                contenders.append(msgspec.structs.replace(one, name=mode))
            Console(width=120).print(table(summary(runner.run(rounds(options, contenders)))))


if __name__ == "__main__":
    main()
