"""Real Infinity and real vLLM, alone and behind the gateway: single texts from more and more callers.

    .venv/bin/python -m loadtest.real infinity vllm

The server, the gateway and the load share all cores, as they would on one host: what the gateway costs is
taken from the server. Direct and through the gateway take turns, so that both see the same disturbances.
"""

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.table import Table

from backends.checkpoints import DEFAULT_MODEL, locate_checkpoint
from loadtest import corpora, servers
from loadtest.corpora import Calls
from loadtest.generator import Load, Recorder, Sample, Target, closed_loop
from loadtest.processes import group
from loadtest.servers import KEY
from tests.real.servers import Server, serve_model

CALLERS = (1, 8, 32, 128)
# One server is never asked the same text twice, directly or through the gateway.
MIXTURE: Literal["queries"] = "queries"
# The generator calls /v1/embeddings, which Infinity serves below a prefix only.
PREFIX: dict[Server, str] = {"infinity": "/v1", "vllm": ""}


class Row(msgspec.Struct, frozen=True):
    """One server at one number of callers: medians over the repeats, and the spread of the ratio."""

    server: str
    callers: int
    direct_per_s: float
    gateway_per_s: float
    ratio: float
    ratio_least: float
    ratio_most: float
    direct_p50_ms: float
    gateway_p50_ms: float
    failed: int


def config(server: Server, url: str, checkpoint: Path) -> str:
    """The gateway's router.yaml, without `listen`."""
    return (
        f"upstreams: {{real: {{backend: {server}, replicas: ['{url}'], tokenizer: {checkpoint}}}}}\n"
        "models: {real: {upstream: real}}\n"
        f"tenants: {{one: {servers.tenant(KEY)}}}\n"
    )


async def compared(
    server: Server, direct: Target, ours: Target, callers: int, options: argparse.Namespace
) -> Row:
    """Direct and through the gateway, in turns."""
    pairs: list[tuple[Sample, Sample]] = []
    for repeat in range(options.repeats):
        seed = 10 * callers + 1000 * repeat
        before = await _sample(direct, callers, seed, options.seconds)
        pairs.append((before, await _sample(ours, callers, seed + 1, options.seconds)))
    ratios = [through.per_s / max(before.per_s, 0.01) for before, through in pairs]
    return Row(
        server=server,
        callers=callers,
        direct_per_s=statistics.median(before.per_s for before, _ in pairs),
        gateway_per_s=statistics.median(through.per_s for _, through in pairs),
        ratio=statistics.median(ratios),
        ratio_least=min(ratios),
        ratio_most=max(ratios),
        direct_p50_ms=statistics.median(before.p50_ms for before, _ in pairs),
        gateway_p50_ms=statistics.median(through.p50_ms for _, through in pairs),
        failed=sum(one.failed for pair in pairs for one in pair),
    )


async def _sample(target: Target, callers: int, seed: int, seconds: float) -> Sample:
    calls = Calls(corpora.texts(MIXTURE, seed), model=target.model)
    return await closed_loop(Load(target, calls, Recorder({}), 0), callers, seconds, 1.0)


def run(server: Server, options: argparse.Namespace) -> list[Row]:
    """One server, at every number of callers."""
    folder = Path(tempfile.mkdtemp())
    checkpoint = folder / "all-MiniLM-L6-v2"
    checkpoint.symlink_to(locate_checkpoint(DEFAULT_MODEL))
    flags = ["--url-prefix", PREFIX[server]] if PREFIX[server] else []
    with serve_model(server, checkpoint, flags) as url, group() as started:
        gateway = servers.start_gateway(folder, config(server, url + PREFIX[server], checkpoint))
        assert gateway.process is not None
        started.append(gateway.process)
        gateway.process.spread()
        direct = Target(urlsplit(url).port or 80, model=checkpoint.name, checked=False)
        ours = msgspec.structs.replace(gateway.target, model="real", checked=False)
        return [asyncio.run(compared(server, direct, ours, count, options)) for count in options.callers]


def main() -> None:
    """Print the table; with --out, write it as JSON too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", nargs="+", choices=["infinity", "vllm"])
    parser.add_argument("--callers", type=int, nargs="+", default=list(CALLERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [row for server in options.servers for row in run(server, options)]
    table = Table(
        "server", "callers", "direct/s", "gateway/s", "ratio", "p50 direct", "p50 gateway", "failed"
    )
    for row in rows:
        spread = f"{row.ratio:.2f} ({row.ratio_least:.2f}-{row.ratio_most:.2f})"
        figures = (f"{one:.1f}" for one in (row.direct_per_s, row.gateway_per_s))
        waits = (f"{one:.1f} ms" for one in (row.direct_p50_ms, row.gateway_p50_ms))
        table.add_row(row.server, str(row.callers), *figures, spread, *waits, str(row.failed))
    Console(width=120).print(table)
    if options.out is not None:
        options.out.write_bytes(msgspec.json.encode(rows))


if __name__ == "__main__":
    main()
