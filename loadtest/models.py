"""Many models in one engine under a budget that holds few, called at random.

    .venv/bin/python -m loadtest.models [--models 10] [--holds 3] [--seconds 600] [--callers 4]

The checkpoints are made here: all-MiniLM's shape, random weights, each its own. Told are the engine's
resident memory over time, loads and evictions, what was answered, how long callers waited, and whether every
reply had the vector that its model gave before; then what one model's caller feels while others are loaded.
"""

import argparse
import asyncio
import collections
import random
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import httpx
import msgspec
import numpy as np

from backends.checkpoints import DEFAULT_MODEL, locate_checkpoint
from backends.tokens import open_tokenizer
from backends.torch.memory import TOKENIZER_BYTES_A_WORD, files_bytes
from loadtest.processes import usage
from loadtest.serving import GatewayProcess, client, percentile

KEY = "loadtest"
TEXT = "How do I reset my password, and who can do it for me?"
SAMPLE_EVERY_S = 0.2
CURVE_POINTS = 12
# Files of weights and what is made of them are not of the very same size.
SLACK_BYTES = 2_000_000
# A reply counts as its model's own vector from this cosine on.
SAME = 0.9999


class Call(msgspec.Struct, frozen=True):
    """One answer. outcome: "ok", "other vector" or an error's kind."""

    model: int
    outcome: str
    took_s: float


def make_checkpoints(folder: Path, count: int) -> list[Path]:
    """Copies of the default model with random weights."""
    import torch
    import transformers

    source = locate_checkpoint(DEFAULT_MODEL)
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(source)
    made = []
    for number in range(count):
        place = folder / f"model-{number}"
        shutil.copytree(source, place, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "onnx"))
        torch.manual_seed(number)
        transformers.AutoModel.from_config(config, dtype=torch.float32).save_pretrained(place)
        made.append(place)
    return made


def router_yaml(checkpoints: Sequence[Path], dtype: str, memory_bytes: int) -> str:
    """Nothing is loaded before it is asked for."""
    lines = ["listen: 127.0.0.1:0", f"engine: {{memory_bytes: {memory_bytes}}}", "upstreams:"]
    lines += [
        f"  m{n}: {{backend: torch, model: {path}, dtype: {dtype}, preload: false}}"
        for n, path in enumerate(checkpoints)
    ]
    return "\n".join([*lines, "models:", *(f"  m{n}: {{upstream: m{n}}}" for n in range(len(checkpoints)))])


class Asking:
    """Callers of one gateway, and what they were answered."""

    def __init__(self, session: httpx.AsyncClient) -> None:
        self._session = session
        self._vectors: dict[int, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
        self.calls: list[Call] = []

    async def ask(self, model: int) -> Call:
        """One text, one model."""
        began_s = time.perf_counter()
        answer = await self._session.post("/v1/embeddings", json={"model": f"m{model}", "input": TEXT})
        call = Call(model, self._outcome(model, answer), time.perf_counter() - began_s)
        self.calls.append(call)
        return call

    async def at_random(self, models: int, seconds: float, seed: int) -> None:
        """One caller that asks one model after another."""
        dice = random.Random(seed)  # noqa: S311 - a seeded load
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            await self.ask(dice.randrange(models))

    def _outcome(self, model: int, answer: httpx.Response) -> str:
        told = answer.json()
        if answer.status_code != 200:
            return f"{answer.status_code} {told['error']['code']}"
        vector = np.array(told["data"][0]["embedding"])
        expected = self._vectors.setdefault(model, vector)
        return "ok" if float(vector @ expected) > SAME else "other vector"


async def sample(pid: int, found: list[tuple[float, float]]) -> None:
    """Seconds since the start and resident MB of a process, until cancelled."""
    began_s = time.monotonic()
    while True:
        found.append((time.monotonic() - began_s, usage([pid]).rss_bytes / 1e6))
        await asyncio.sleep(SAMPLE_EVERY_S)


async def measure(gateway: GatewayProcess, options: argparse.Namespace) -> AsyncIterator[str]:
    """Both parts, and what they showed."""
    pid = engine_of(gateway)
    yield f"the engine before any model: {usage([pid]).rss_bytes / 1e6:.0f} MB resident"
    async with client(gateway.url, KEY) as session:
        rss: list[tuple[float, float]] = []
        sampling = asyncio.create_task(sample(pid, rss))
        asking = Asking(session)
        await asyncio.gather(
            *(asking.at_random(options.models, options.seconds, seed) for seed in range(options.callers))
        )
        sampling.cancel()
        for line in (*_told_of_calls(asking.calls), *_told_of_memory(rss), *await _told_of_models(session)):
            yield line
        for line in await neighbour(session, options):
            yield line


def engine_of(gateway: GatewayProcess) -> int:
    """The engine's process."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in gateway.processes}
    return next(pid for pid, line in lines.items() if b"backends.torch.server" in line)


async def neighbour(session: httpx.AsyncClient, options: argparse.Namespace) -> list[str]:
    """What a caller of one model waits, alone and while another caller has the others loaded in turn."""
    asking = Asking(session)
    await asking.ask(0)
    waits = {}
    for title, others in (("alone", False), ("while others load", True)):
        ends_s = time.monotonic() + options.neighbour_seconds
        loading = asyncio.create_task(_in_turn(Asking(session), options.models, ends_s if others else 0))
        took = []
        while time.monotonic() < ends_s:
            took.append((await asking.ask(0)).took_s)
        await loading
        waits[title] = _waits(took)
    missed = sum(one.outcome != "ok" for one in asking.calls)
    return [f"a neighbour's call {title}: {told}" for title, told in waits.items()] + [
        f"the neighbour's calls that were not answered well: {missed}"
    ]


async def _in_turn(asking: Asking, models: int, ends_s: float) -> None:
    model = 0
    while time.monotonic() < ends_s:
        model = model % (models - 1) + 1
        await asking.ask(model)


def _told_of_calls(calls: Sequence[Call]) -> Iterator[str]:
    outcomes = collections.Counter(one.outcome for one in calls)
    yield f"{len(calls)} calls: {dict(outcomes)}"
    yield f"all calls: {_waits([one.took_s for one in calls])}"


def _told_of_memory(rss: Sequence[tuple[float, float]]) -> Iterator[str]:
    step = max(1, len(rss) // CURVE_POINTS)
    curve = ", ".join(f"{at_s:.0f} s {mb:.0f}" for at_s, mb in rss[::step])
    yield f"resident MB over time: {curve}"
    second = [mb for _, mb in rss[len(rss) // 2 :]]
    yield (
        f"resident MB: median {statistics.median(mb for _, mb in rss):.0f}, "
        f"most {max(mb for _, mb in rss):.0f}, most in the second half {max(second):.0f}"
    )


async def _told_of_models(session: httpx.AsyncClient) -> Iterator[str]:
    # What workers know of an engine is a second old.
    await asyncio.sleep(1.5)
    text = (await session.get("/metrics")).text
    sums: collections.Counter[str] = collections.Counter()
    for labels, value in re.findall(r"^gateway_model_((?:un)?loads_total{.+}) (\S+)$", text, re.MULTILINE):
        sums[re.sub(r",?upstream=\"[^\"]*\"", "", labels)] += int(float(value))
    return iter([f"{name} {count}" for name, count in sums.items()])


def _waits(took_s: Sequence[float]) -> str:
    told = " / ".join(f"{percentile(took_s, percent) * 1e3:.0f}" for percent in (50, 95, 99))
    return f"{told} / {max(took_s) * 1e3:.0f} ms (p50 / p95 / p99 / most) of {len(took_s)}"


async def tell(gateway: GatewayProcess, options: argparse.Namespace) -> None:
    """Print each line when it is known."""
    async for line in measure(gateway, options):
        print(line, flush=True)


def main() -> None:
    """Make, serve, ask, tell."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        checkpoints = make_checkpoints(Path(folder), options.models)
        words = open_tokenizer(checkpoints[0], 256).vocabulary_size
        one_bytes = files_bytes(checkpoints[0]) + words * TOKENIZER_BYTES_A_WORD
        memory_bytes = one_bytes * options.holds + SLACK_BYTES
        config = Path(folder) / "router.yaml"
        config.write_text(router_yaml(checkpoints, options.dtype, memory_bytes))
        with GatewayProcess(config, {"GATEWAY_API_KEY": KEY}) as gateway:
            print(
                f"{options.models} models of {one_bytes / 1e6:.0f} MB, budget {memory_bytes / 1e6:.0f} MB",
                flush=True,
            )
            asyncio.run(tell(gateway, options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--holds", type=int, default=3, help="how many of them the budget holds")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--neighbour-seconds", type=float, default=20.0)
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


if __name__ == "__main__":
    main()
