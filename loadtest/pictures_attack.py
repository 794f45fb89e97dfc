"""A small picture next to pictures that were made to take long: its latency alone and under each attack.

    .venv/bin/python -m loadtest.pictures_attack
    .venv/bin/python -m loadtest.pictures_attack --tree ../before    # the gateway of another checkout

One gateway with the built-in engine serves CLIP ViT-B/32 with random weights on all cores. Two callers of one
tenant repeat an attack for a minute: a progressive JPEG of 88 megapixels with 8,006 scans, 20 PNGs of 88
megapixels in one bit, or JPEGs of 88 megapixels with as many scans as are read. Another tenant sends one
small picture at a time. Memory is that of the gateway and all its processes.
"""

import argparse
import asyncio
import base64
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from loadtest import checkpoints, results, servers, tables
from loadtest.media_flood import KEYS, client
from loadtest.processes import family, process_group, usage
from loadtest.results import Measure, spread
from tests.pictures import encoded, noise, one_bit_png, progressive_jpeg

SIDE, SCANS, SCANS_READ, PICTURES = 9_400, 8_006, 24, 20
CALLERS = 2
SAMPLE_S = 0.2
Pictures: TypeAlias = list[dict[str, str]]


class Turn:
    """Latencies of the victim in seconds, statuses of both, and the peak of memory in MB."""

    def __init__(self) -> None:
        self.latencies_s: list[float] = []
        self.victim_statuses: Counter[int] = Counter()
        self.attack_statuses: Counter[int] = Counter()
        self.peak_mb = 0.0


def uri(data: bytes, kind: str) -> dict[str, str]:
    """Return a picture as an object of `input`."""
    return {"image": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}


async def attack(url: str, pictures: Pictures, turn: Turn) -> None:
    """Repeat one call until cancelled; callers that are refused wait a moment."""
    async with client(url, "flood") as sender:
        while True:
            reply = await sender.post("/v1/embeddings", json={"model": "clip", "input": pictures})
            turn.attack_statuses[reply.status_code] += 1
            if reply.status_code < 500:
                await asyncio.sleep(0.05)


async def watch(pid: int, turn: Turn) -> None:
    """Sample the memory of a process and its descendants until cancelled."""
    while True:
        turn.peak_mb = max(turn.peak_mb, usage(family(pid)).rss_bytes / 1e6)
        await asyncio.sleep(SAMPLE_S)


async def measure(url: str, pid: int, calls: Sequence[Pictures], seconds: float) -> Turn:
    """Measure one turn."""
    turn, small = Turn(), uri(encoded(noise(64, 48)), "png")
    tasks = [asyncio.create_task(watch(pid, turn))]
    tasks += [asyncio.create_task(attack(url, pictures, turn)) for pictures in calls]
    await asyncio.sleep(1.0)
    until = time.monotonic() + seconds
    async with client(url, "victim") as sender:
        while time.monotonic() < until:
            started = time.perf_counter()
            reply = await sender.post("/v1/embeddings", json={"model": "clip", "input": [small]})
            turn.latencies_s.append(time.perf_counter() - started)
            turn.victim_statuses[reply.status_code] += 1
            await asyncio.sleep(0.2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return turn


async def compare(urls: dict[str, tuple[str, int]], options: argparse.Namespace) -> list[Measure]:
    """Measure all gateways in turns, and return the figures."""
    # Equal pictures, and equal calls of one tenant, would be computed once.
    callers = range(CALLERS)
    attacks: dict[str, list[Pictures]] = {
        "alone": [],
        f"{PICTURES} PNGs of one bit": [
            [uri(one_bit_png(SIDE - PICTURES * caller - place), "png") for place in range(PICTURES)]
            for caller in callers
        ],
        f"a JPEG of {SCANS_READ} scans": [
            [uri(progressive_jpeg(SIDE, SIDE, SCANS_READ - caller), "jpeg")] for caller in callers
        ],
        f"a JPEG of {SCANS} scans": [
            [uri(progressive_jpeg(SIDE, SIDE, SCANS - caller), "jpeg")] for caller in callers
        ],
    }
    found = []
    for name, (url, pid) in urls.items():
        for attack_name, calls in attacks.items():
            turn = await measure(url, pid, calls, options.seconds)
            latencies = turn.latencies_s
            note = (
                f"{len(latencies)} calls {dict(turn.victim_statuses)}; "
                f"attacker {dict(turn.attack_statuses)}; peak {turn.peak_mb:,.0f} MB"
            )
            print(name, attack_name, f"worst {max(latencies):.1f} s", note, flush=True)
            subject = f"{name}: {attack_name}"
            found.append(Measure(subject, "s of the victim's calls", spread(latencies), note=note))
            # What an attack has left in progress ends before the next turn.
            await asyncio.sleep(options.pause)
    return found


def main() -> None:
    """Start the gateways, measure, print and write the result."""
    parser = results.argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="measured period of each turn")
    parser.add_argument("--pause", type=float, default=15, help="seconds between two turns")
    parser.add_argument("--tree", type=lambda text: Path(text).resolve(), action="append", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, process_group() as processes:
        clip = checkpoints.make_clip(Path(folder) / "clip")
        config = (
            f"upstreams: {{clip: {{backend: torch, model: {clip}}}}}\n"
            "models: {clip: {upstream: clip}}\n"
            f"tenants: {{flood: {servers.tenant(KEYS['flood'])}, victim: {servers.tenant(KEYS['victim'])}}}\n"
        )
        urls = {}
        for name, tree in {"gateway": servers.ROOT, **{t.name: t for t in options.tree}}.items():
            cores = f"0-{(os.cpu_count() or 1) - 1}"
            running = servers.start_gateway(Path(folder), config, name=name, tree=tree, cores=cores)
            processes.append(running.process)
            urls[name] = f"http://127.0.0.1:{running.target.port}", running.process.process.pid
        found = asyncio.run(compare(urls, options))
    Console(width=170).print(tables.listed(found, "a small picture, alone and under attack"))
    results.write(results.new_result("pictures_attack", found, []), options.out)


if __name__ == "__main__":
    main()
