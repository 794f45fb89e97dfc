"""Forward passes and engine on a GPU: recorded passes next to launched ones, and sentence-transformers.

    python -m loadtest.gpu                    # all-MiniLM-L6-v2 and two large shapes; four minutes on an H100
    python -m loadtest.gpu --skip-large

The large checkpoints have the real shape and random weights. The ceiling is the time of a pass' matrix
products alone. sentence-transformers runs in this process, by PyTorch in bfloat16.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from backends.checkpoints.locations import DEFAULT_MODEL, locate_checkpoint
from backends.contract import Embed, EmbedReply
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.networks.pass_graphs import PassGraphs
from backends.torch.networks.precision import CastLinear
from backends.torch.passes.engine import Engine
from backends.torch.passes.loaded_model import LoadedModel
from backends.torch.passes.threads import ForwardThreads
from loadtest import checkpoints
from loadtest.checkpoints import LARGE_SHAPES, LargeShape
from loadtest.passes import in_turns, ratio
from loadtest.runtimes import DENSE, sequences_of

DEVICE = torch.device("cuda")
LENGTHS = ([8], [50], [510], [50] * 20, [510] * 2, [50] * 300, [510] * 30)
REPEATS = 15
TEXTS, CALL_TEXTS, BULK_CALLERS = 4096, 32, 64
SINGLE_CALLERS = (1, 8, 32)
# Texts of a call of sentence-transformers, and of its batches.
PEER_TEXTS, PEER_BATCHES = 2048, (32, 256)
LONE_TEXT = "How do I reset my password?"
LONE_CALLS = 200


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--skip-large", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each kind of callers")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    minilm = locate_checkpoint(DEFAULT_MODEL)
    shapes = {} if options.skip_large else LARGE_SHAPES
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in [("all-MiniLM-L6-v2", None), *shapes.items()]:
            checkpoint = minilm if shape is None else checkpoints.make_large(shape, Path(folder) / name)
            print(f"\n{name}", flush=True)
            for line in _lines(checkpoint, shape, options.seconds):
                print(f"  {line}", flush=True)


def _lines(checkpoint: Path, shape: LargeShape | None, seconds: float) -> Iterator[str]:
    texts, mean = checkpoints.texts_for(checkpoint, TEXTS)
    threads = ForwardThreads(DEVICE)
    started_s = time.perf_counter()
    loaded = _load(checkpoint, threads)
    took_s = time.perf_counter() - started_s
    yield "; ".join(loaded.capabilities.notes)
    held, used = torch.cuda.memory_reserved() / 1e6, torch.cuda.memory_allocated() / 1e6
    yield f"loaded in {took_s:.1f} s, {held:,.0f} MB held, {used:,.0f} of them in use"
    yield from _passes(checkpoint, loaded, shape, threads)
    yield f"texts of {mean:.0f} tokens on average"
    yield from asyncio.run(_engine_lines(loaded, texts, seconds, threads))
    del loaded
    yield from _peer_lines(checkpoint, texts)


def _load(checkpoint: Path, threads: ForwardThreads) -> LoadedModel:
    """Load as an engine process does, which measures on its own threads."""
    options = LoadOptions("bfloat16", "cuda")
    return load(checkpoint, "m", options, run_on_device=lambda run: threads.warm_up(run).result())


def _passes(
    checkpoint: Path, loaded: LoadedModel, shape: LargeShape | None, threads: ForwardThreads
) -> Iterator[str]:
    with patch.object(PassGraphs, "choose", lambda *_: "nothing is recorded"):
        launched = _load(checkpoint, threads)
    for lengths in LENGTHS:
        sequences = sequences_of(lengths)
        runs: dict[str, Callable[[], object]] = {
            "launched": partial(launched.head.run, sequences, DENSE),
            "recorded": partial(loaded.head.run, sequences, DENSE),
        }
        if shape is not None:
            runs["ceiling"] = _products(shape, sum(lengths))
        times = in_turns(runs, REPEATS)
        launched_ms, own_ms = (statistics.median(times[name]) * 1e3 for name in ("launched", "recorded"))
        line = f"{len(lengths):3} x {lengths[0]:3} tokens: {own_ms:6.2f} ms, {launched_ms:6.2f} launched"
        line += f", share of its time {ratio(times['recorded'], times['launched'])}"
        if shape is not None:
            line += f", products' share {ratio(times['ceiling'], times['recorded'])}"
        yield line


def _products(shape: LargeShape, tokens: int) -> Callable[[], None]:
    """Return the matrix products of a network alone, each with weights of its own, as one graph."""
    layers = [
        CastLinear(torch.nn.Linear(*sizes, bias=False), torch.bfloat16).to(DEVICE)
        for _ in range(shape.layers)
        for sizes in shape.products
    ]
    widths = {inputs for inputs, _ in shape.products}
    rows = {width: torch.randn(tokens, width, dtype=torch.bfloat16, device=DEVICE) for width in widths}

    @torch.inference_mode()
    def multiply() -> None:
        for layer, (width, _) in zip(layers, shape.products * shape.layers, strict=True):
            layer(rows[width])

    multiply()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply()

    def run() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return run


async def _engine_lines(
    loaded: LoadedModel, texts: Sequence[str], seconds: float, threads: ForwardThreads
) -> list[str]:
    engine = Engine(loaded, batch_tokens=loaded.batch_tokens, queue_tokens=10**9, threads=threads)
    lines = []
    calls = cycle([tuple(texts[i : i + CALL_TEXTS]) for i in range(0, len(texts), CALL_TEXTS)])
    bulk, _ = await _closed_loop(engine, calls, BULK_CALLERS, seconds)
    lines.append(f"engine, {BULK_CALLERS} callers of {CALL_TEXTS} texts: {bulk:,.0f} texts/s")
    for callers in SINGLE_CALLERS:
        rate, times = await _closed_loop(engine, cycle([(text,) for text in texts]), callers, seconds)
        lines.append(
            f"engine, {callers:2} callers of one text: {rate:,.0f} texts/s, p50 {_p50_ms(times):.2f} ms"
        )
    _, times = await _closed_loop(engine, cycle([(LONE_TEXT,)]), 1, seconds)
    lines.append(f"engine, a lone text of 8 tokens: p50 {_p50_ms(times):.2f} ms")
    return lines


async def _closed_loop(
    engine: Engine, calls: Iterator[tuple[str, ...]], callers: int, seconds: float
) -> tuple[float, list[float]]:
    """Return texts per second, and the seconds of each call."""
    times: list[float] = []
    texts = 0
    began_s = time.perf_counter()

    async def call() -> None:
        nonlocal texts
        while time.perf_counter() < began_s + seconds:
            inputs = next(calls)
            started_s = time.perf_counter()
            reply = await engine.run(Embed(inputs))
            assert isinstance(reply, EmbedReply)
            assert len(reply.vectors) == len(inputs)
            times.append(time.perf_counter() - started_s)
            texts += len(inputs)

    await asyncio.gather(*(call() for _ in range(callers)))
    return texts / (time.perf_counter() - began_s), times


def _peer_lines(checkpoint: Path, texts: Sequence[str]) -> Iterator[str]:
    # Not a dependency of the gateway.
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(str(checkpoint), device="cuda", model_kwargs={"dtype": torch.bfloat16})
    many = list(texts[:PEER_TEXTS])
    for batch in PEER_BATCHES:
        encode = partial(model.encode, many, batch_size=batch, show_progress_bar=False)
        encode()
        started_s = time.perf_counter()
        encode()
        rate = len(many) / (time.perf_counter() - started_s)
        yield f"sentence-transformers, batches of {batch}: {rate:,.0f} texts/s"
    times = []
    for _ in range(LONE_CALLS):
        started_s = time.perf_counter()
        model.encode([LONE_TEXT], show_progress_bar=False)
        times.append(time.perf_counter() - started_s)
    yield f"sentence-transformers, a lone text of 8 tokens: p50 {_p50_ms(times):.2f} ms"


def _p50_ms(times: Sequence[float]) -> float:
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
