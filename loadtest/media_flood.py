"""A text call next to a flood of pictures: its latency alone and in the flood, in turns.

    .venv/bin/python -m loadtest.media_flood
    .venv/bin/python -m loadtest.media_flood --tree ../before    # the gateway of another checkout

One gateway with the built-in engine serves CLIP ViT-B/32 with random weights and all-MiniLM-L6-v2. Tenants
of their own send pictures without a pause, and one text at a time with pauses. The victims are a text of
CLIP itself and a text of the other model, which shares the engine's process. All cores are used.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from PIL import Image
from rich.console import Console

from backends.checkpoints.locations import DEFAULT_MODEL, locate_checkpoint
from loadtest import checkpoints, results, servers, tables
from loadtest.processes import process_group
from loadtest.results import Measure, spread

FLOODING_CALLERS, CALL_PICTURES = 4, 8
PICTURE_SIDES = 640, 480
POOL_PICTURES = 64
PAUSE_S = 0.05
WARM_UP_S = 2.0
KEYS = {"flood": "sk-flood", "victim": "sk-victim"}
TEXT = "How do I read a JSON document from a file and change one of its keys?"
VICTIMS = {"clip": "a text of CLIP itself", "minilm": "a text of another model"}
Factory = Callable[[], dict[str, Any]]


class Turn(NamedTuple):
    """Latencies of a victim in one turn, in ms, and the pictures per second of the flood."""

    latencies_ms: list[float]
    pictures_per_s: float

    def percentile(self, percent: int) -> float:
        """Return a percentile of the latencies."""
        return float(np.percentile(self.latencies_ms, percent))


def gateway_config(clip: Path) -> str:
    """Return a configuration with both models in one engine process."""
    return (
        f"upstreams: {{clip: {{backend: torch, model: {clip}}}, "
        f"minilm: {{backend: torch, model: {locate_checkpoint(DEFAULT_MODEL)}}}}}\n"
        "models: {clip: {upstream: clip}, minilm: {upstream: minilm}}\n"
        f"tenants: {{flood: {servers.tenant(KEYS['flood'])}, victim: {servers.tenant(KEYS['victim'])}}}\n"
    )


def picture_calls() -> Callable[[], dict[str, Any]]:
    """Return a factory of bodies with pictures that differ."""
    dice = np.random.default_rng(0)
    width, height = PICTURE_SIDES
    pool = []
    for _ in range(POOL_PICTURES):
        small = dice.integers(0, 255, (height // 16, width // 16, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(small).resize(PICTURE_SIDES).save(buffer, "JPEG")
        pool.append({"image": f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"})

    def body() -> dict[str, Any]:
        chosen = dice.choice(POOL_PICTURES, CALL_PICTURES, replace=False)
        return {"model": "clip", "input": [pool[i] for i in chosen]}

    return body


class Flood:
    """Callers that send pictures without a pause."""

    def __init__(self, url: str, body: Factory) -> None:
        self.pictures = 0
        self._url = url
        self._body = body

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send until the block ends. Raises: httpx.HTTPStatusError."""
        async with client(self._url, "flood") as sender:
            callers = [asyncio.create_task(self._send(sender)) for _ in range(FLOODING_CALLERS)]
            try:
                yield
            finally:
                for caller in callers:
                    caller.cancel()
                await asyncio.gather(*callers, return_exceptions=True)

    async def _send(self, sender: httpx.AsyncClient) -> None:
        while True:
            (await sender.post("/v1/embeddings", json=self._body())).raise_for_status()
            self.pictures += CALL_PICTURES


def client(url: str, tenant: str) -> httpx.AsyncClient:
    """Return a client of one tenant."""
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False)


async def victim(url: str, model: str, seconds: float) -> list[float]:
    """Send one text at a time, and return the latencies in ms."""
    found, until = [], time.monotonic() + seconds
    async with client(url, "victim") as sender:
        while time.monotonic() < until:
            started = time.perf_counter()
            reply = await sender.post("/v1/embeddings", json={"model": model, "input": TEXT})
            found.append((time.perf_counter() - started) * 1000)
            reply.raise_for_status()
            await asyncio.sleep(PAUSE_S)
    return found


async def measure(url: str, body: Factory, model: str, seconds: float, *, flooded: bool) -> Turn:
    """Measure one turn."""
    if not flooded:
        return Turn(await victim(url, model, seconds), 0.0)
    flood = Flood(url, body)
    async with flood.running():
        await asyncio.sleep(WARM_UP_S)
        before, started = flood.pictures, time.monotonic()
        latencies = await victim(url, model, seconds)
        return Turn(latencies, (flood.pictures - before) / (time.monotonic() - started))


async def flood_alone(url: str, body: Factory, seconds: float) -> float:
    """Return the pictures per second of the flood without a victim."""
    flood = Flood(url, body)
    async with flood.running():
        await asyncio.sleep(WARM_UP_S)
        before = flood.pictures
        await asyncio.sleep(seconds)
        return (flood.pictures - before) / seconds


async def compare(urls: dict[str, str], options: argparse.Namespace) -> list[Measure]:
    """Measure all gateways in turns, and return the figures."""
    body = picture_calls()
    turns: dict[tuple[str, str, bool], list[Turn]] = {}
    alone: dict[str, list[float]] = {name: [] for name in urls}
    for repeat in range(options.repeats):
        for name in urls if repeat % 2 == 0 else reversed(urls):
            for model in VICTIMS:
                for flooded in (False, True):
                    turn = await measure(urls[name], body, model, options.seconds, flooded=flooded)
                    turns.setdefault((name, model, flooded), []).append(turn)
            alone[name].append(await flood_alone(urls[name], body, options.seconds))
        print(f"repeat {repeat + 1} of {options.repeats} done", flush=True)
    found = []
    for name in urls:
        for model, subject in VICTIMS.items():
            quiet, in_flood = turns[name, model, False], turns[name, model, True]
            for percent in (50, 95):
                values = [turn.percentile(percent) for turn in in_flood]
                base = [turn.percentile(percent) for turn in quiet]
                ratios = [value / before for value, before in zip(values, base, strict=True)]
                calls = statistics.median(len(turn.latencies_ms) for turn in in_flood)
                found.append(
                    Measure(
                        f"{name}: {subject}",
                        f"p{percent} ms in a flood of pictures",
                        spread(values),
                        spread(base),
                        spread(ratios),
                        f"{calls:.0f} calls a turn",
                    )
                )
            rates = [turn.pictures_per_s for turn in in_flood]
            found.append(Measure(f"{name}: {subject}", "pictures/s of the flood", spread(rates)))
        found.append(Measure(name, "pictures/s without a victim", spread(alone[name])))
    return found


def main() -> None:
    """Start the gateways, measure, print and write the result."""
    parser = results.argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8, help="measured period of each turn")
    parser.add_argument("--tree", type=lambda text: Path(text).resolve(), action="append", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, process_group() as processes:
        config = gateway_config(checkpoints.make_clip(Path(folder) / "clip"))
        urls = {}
        for name, tree in {"gateway": servers.ROOT, **{t.name: t for t in options.tree}}.items():
            cores = f"0-{(os.cpu_count() or 1) - 1}"
            running = servers.start_gateway(Path(folder), config, name=name, tree=tree, cores=cores)
            processes.append(running.process)
            urls[name] = f"http://127.0.0.1:{running.target.port}"
        found = asyncio.run(compare(urls, options))
    Console(width=170).print(tables.listed(found, "a text call, alone (baseline) and in a flood of pictures"))
    results.write(results.new_result("media_flood", found, []), options.out)


if __name__ == "__main__":
    main()
