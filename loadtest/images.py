"""Images embedded per second: the gateway's engine, Infinity and transformers, in turns.

    .venv/bin/python -m loadtest.images
    .venv/bin/python -m loadtest.images --images 400 --peers ""      # without Infinity

CLIP of the shape of ViT-B/32 with random weights, in float32 on all cores, and JPEG images of 640 x 480. Both
servers get the same requests, from four callers with eight images each; transformers runs in this process
with its own processor and batches of eight. Each turn has a part of the images.
`python -m tests.real.servers infinity` installs Infinity once.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import transformers
from PIL import Image
from rich.console import Console

from loadtest import results, servers, tables
from loadtest.media_flood import PICTURE_SIDES
from loadtest.processes import process_group
from loadtest.results import Measure, spread
from tests.real.media_models import make_wide_clip
from tests.real.servers import serve_model

CALLERS, CALL_IMAGES, WARM_UP_IMAGES = 4, 8, 32
KEY = "sk-loadtest"
# Returns the vectors of some images.
Embed = Callable[[Sequence[bytes]], list[list[float]]]


def photos(count: int) -> list[bytes]:
    """Return JPEG images that differ."""
    dice = np.random.default_rng(0)
    width, height = PICTURE_SIDES
    found = []
    for _ in range(count):
        small = dice.integers(0, 255, (height // 16, width // 16, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(small).resize(PICTURE_SIDES).save(buffer, "JPEG")
        found.append(buffer.getvalue())
    return found


def over_http(url: str, body: Callable[[list[str]], dict[str, Any]], path: str) -> Embed:
    """Return what embeds images at a server."""

    async def send(images: Sequence[bytes]) -> list[list[float]]:
        uris = [f"data:image/jpeg;base64,{base64.b64encode(image).decode()}" for image in images]
        calls = [uris[start : start + CALL_IMAGES] for start in range(0, len(uris), CALL_IMAGES)]
        slots = asyncio.Semaphore(CALLERS)
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300, trust_env=False) as client:

            async def one(call: list[str]) -> list[list[float]]:
                async with slots:
                    reply = await client.post(path, json=body(call))
                reply.raise_for_status()
                return [item["embedding"] for item in reply.json()["data"]]

            replies = await asyncio.gather(*map(one, calls))
        return [vector for reply in replies for vector in reply]

    return lambda images: asyncio.run(send(images))


def in_process(checkpoint: Path) -> Embed:
    """Return what embeds images with transformers."""
    network = transformers.CLIPModel.from_pretrained(checkpoint).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(checkpoint, backend="pil")

    @torch.inference_mode()
    def embed(images: Sequence[bytes]) -> list[list[float]]:
        rows: list[list[float]] = []
        for start in range(0, len(images), CALL_IMAGES):
            opened = [Image.open(io.BytesIO(image)) for image in images[start : start + CALL_IMAGES]]
            found = network.get_image_features(**processor(images=opened, return_tensors="pt"))
            rows += torch.nn.functional.normalize(found.pooler_output, dim=-1).tolist()
        return rows

    return embed


def _request(uris: list[str]) -> dict[str, Any]:
    return {"model": "clip", "input": [{"image": uri} for uri in uris]}


@contextlib.contextmanager
def contenders(options: argparse.Namespace, checkpoint: Path, folder: Path) -> Iterator[dict[str, Embed]]:
    """Start every contender."""
    config = (
        f"upstreams: {{clip: {{backend: torch, model: {checkpoint}, dtype: float32}}}}\n"
        f"models: {{clip: {{upstream: clip}}}}\ntenants: {{load: {servers.tenant(KEY)}}}\n"
    )
    with process_group() as processes, contextlib.ExitStack() as peers:
        cores = f"0-{(os.cpu_count() or 1) - 1}"
        gateway = servers.start_gateway(folder, config, cores=cores)
        processes.append(gateway.process)
        url = f"http://127.0.0.1:{gateway.target.port}"
        found = {
            "gateway": over_http(url, _request, "/v1/embeddings"),
            "transformers": in_process(checkpoint),
        }
        if "infinity" in options.peers:
            name = checkpoint.name
            peer = peers.enter_context(serve_model("infinity", checkpoint))
            found["infinity"] = over_http(
                peer, lambda call: {"model": name, "input": call, "modality": "image"}, "/embeddings"
            )
        yield found


def compare(embeds: dict[str, Embed], images: Sequence[bytes], turns: int) -> list[Measure]:
    """Embed all images with each contender, in turns, and compare the vectors."""
    seconds: dict[str, list[float]] = {name: [] for name in embeds}
    least: dict[str, float] = dict.fromkeys(embeds, 1.0)
    size = len(images) // turns
    for embed in embeds.values():
        embed(images[:WARM_UP_IMAGES])
    for turn in range(turns):
        part = images[turn * size : (turn + 1) * size]
        vectors = {}
        for name in embeds if turn % 2 == 0 else reversed(embeds):
            started = time.perf_counter()
            vectors[name] = np.array(embeds[name](part))
            seconds[name].append(time.perf_counter() - started)
        expected = vectors["transformers"]
        for name, found in vectors.items():
            lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
            least[name] = min(least[name], float(((found * expected).sum(axis=1) / lengths).min()))
        print(f"turn {turn + 1} of {turns} done", flush=True)
    measures = []
    for name, taken in seconds.items():
        ratios = [other / own for own, other in zip(taken, seconds["transformers"], strict=True)]
        base = [size / other for other in seconds["transformers"]]
        note = f"least cosine to transformers {least[name]:.7f}"
        rates = spread([size / own for own in taken])
        measures.append(Measure(name, "images/s", rates, spread(base), spread(ratios), note))
    return measures


def main() -> None:
    """Start the contenders, measure, print and write the result."""
    parser = results.argument_parser(__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--peers", type=lambda text: text.split(","), default=["infinity"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        checkpoint = make_wide_clip(Path(name) / "clip")
        with contenders(options, checkpoint, Path(name)) as embeds:
            found = compare(embeds, photos(options.images), options.turns)
    Console(width=150).print(tables.listed(found, "images per second; the baseline is transformers"))
    results.write(results.new_result("images", found), options.out)


if __name__ == "__main__":
    main()
