"""The engine through the gateway beside what a user would pick instead: one run, one checkpoint, same texts.

    .venv/bin/python -m loadtest.engine [--large] [--infinity] [--vllm] [--json FILE] [--plot FILE]

One contender runs at a time. sentence-transformers runs in a process of its own, called there; servers are
asked over HTTP on loopback, with vectors as base64. --large: a checkpoint of XLM-R large's shape, with random
weights, on which no time depends. Stops by itself.
"""

import argparse
import asyncio
import contextlib
import inspect
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import aiohttp
import msgspec
import torch
import transformers

from backends.checkpoints import DEFAULT_MODEL, locate_checkpoint
from backends.tokens import open_tokenizer
from backends.torch.precision import TYPICAL_TOKENS, best_kind
from loadtest.chart import bars
from tests.real.servers import prepare_command, run_server

PORT = 16411
KEY = "loadtest"
TEXTS, LONGEST_TOKENS = 1024, 250
CALL_TEXTS, BULK_CALLERS, TRICKLE_CALLERS, LONE_CALLS = 32, 16, 32, 60
SHORT = "How do I reset my password?"
SOURCES = ("json", "asyncio", "pathlib", "collections", "argparse", "logging", "email.message", "decimal")
POOLING = "1_Pooling/config.json"
BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    POOLING,
)
# The measured rate of matrix products is the best of so many tries of each.
TRIES = 20


class Figures(msgspec.Struct):
    """One contender: texts a second from the three kinds of callers, and how long one waits alone."""

    name: str
    bulk_per_s: float
    trickle_per_s: float | None = None
    lone_p50_ms: float | None = None
    lone_p95_ms: float | None = None
    started_s: float | None = None
    peak_mb: float | None = None


class ReloadRequest(msgspec.Struct, frozen=True):
    """Where a server takes OpenAI's embeddings call."""

    url: str
    model: str
    key: str = KEY


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Pieces of the standard library's documentation, of lengths as documents have them: most short."""
    dice = random.Random(seed)  # noqa: S311 - a seeded load
    words = " ".join(_docs()).split()
    texts = []
    for _ in range(count):
        length = min(180, max(3, round(dice.lognormvariate(3.2, 0.65))))
        start = dice.randrange(len(words) - length)
        texts.append(" ".join(words[start : start + length]))
    return texts


def xlm_r(**shape: int) -> transformers.XLMRobertaConfig:
    """Of the base model's shape where nothing else is said, with all-MiniLM's tokens."""
    return transformers.XLMRobertaConfig(
        vocab_size=30522,
        max_position_embeddings=514,
        type_vocab_size=1,
        pad_token_id=0,
        bos_token_id=101,
        eos_token_id=102,
        **shape,
    )


def make_large(folder: Path) -> Path:
    """XLM-R large, mean pooling. Its tokenizer is smaller than the real one's: the encoder does the same."""
    source = locate_checkpoint(DEFAULT_MODEL)
    config = xlm_r(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    torch.manual_seed(0)
    transformers.XLMRobertaModel(config).eval().save_pretrained(folder)
    for name in BESIDE:
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(source / name, target)
    pooling = json.loads((source / POOLING).read_text()) | {"word_embedding_dimension": config.hidden_size}
    (folder / POOLING).write_text(json.dumps(pooling))
    return folder


def texts_for(checkpoint: Path, count: int) -> tuple[list[str], float]:
    """So many texts that the model takes whole, since not every server cuts; and their mean in tokens."""
    many = make_texts(count * 2)
    lengths = open_tokenizer(checkpoint, LONGEST_TOKENS + 1).count(many)
    kept = [(text, n) for text, n in zip(many, lengths, strict=True) if n <= LONGEST_TOKENS][:count]
    return [text for text, _ in kept], statistics.mean(n for _, n in kept)


def _docs() -> Iterator[str]:
    for source in SOURCES:
        module = import_module(source)
        for _, member in sorted(inspect.getmembers(module)):
            yield inspect.getdoc(member) or ""


def in_process(checkpoint: Path, texts: list[str], dtype: str, repeats: int) -> Figures:
    """sentence-transformers in this process, batches of 32; it sorts by length itself."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(checkpoint), device="cpu", model_kwargs={"dtype": dtype})
    model.encode(texts[:64], batch_size=CALL_TEXTS, show_progress_bar=False)
    rates = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        model.encode(texts, batch_size=CALL_TEXTS, show_progress_bar=False)
        rates.append(len(texts) / (time.perf_counter() - started_s))
    waits_ms = []
    for _ in range(LONE_CALLS):
        started_s = time.perf_counter()
        model.encode([SHORT], show_progress_bar=False)
        waits_ms.append((time.perf_counter() - started_s) * 1e3)
    found = Figures(f"sentence-transformers {dtype}", statistics.median(rates), None, *_wait_ms(waits_ms))
    return msgspec.structs.replace(found, peak_mb=peak_mb(os.getpid()))


async def over_http(name: str, asked: ReloadRequest, texts: list[str], repeats: int) -> Figures:
    """Bulk, trickle and a lone caller against one server."""
    headers = {"authorization": f"Bearer {asked.key}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:

        async def call(inputs: Sequence[str]) -> None:
            body = {"model": asked.model, "input": list(inputs), "encoding_format": "base64"}
            async with session.post(asked.url, json=body) as answer:
                told = await answer.json()
                if answer.status != 200 or len(told["data"]) != len(inputs):
                    raise RuntimeError(f"{name} answered {answer.status}: {str(told)[:300]}")

        calls = [texts[i : i + CALL_TEXTS] for i in range(0, len(texts), CALL_TEXTS)]
        await _drive(call, calls[:8], BULK_CALLERS)
        bulk = [len(texts) / await _drive(call, calls, BULK_CALLERS) for _ in range(repeats)]
        single = [[text] for text in texts]
        trickle = [len(texts) / await _drive(call, single, TRICKLE_CALLERS) for _ in range(repeats)]
        waits_ms = [await _drive(call, [[SHORT]], 1) * 1e3 for _ in range(LONE_CALLS)]
    return Figures(name, statistics.median(bulk), statistics.median(trickle), *_wait_ms(waits_ms))


async def _drive(
    call: Callable[[Sequence[str]], Awaitable[None]], calls: Sequence[Sequence[str]], callers: int
) -> float:
    """All calls, from so many callers that each wait for their answer; seconds."""
    waiting = iter(calls)

    async def caller() -> None:
        for inputs in waiting:
            await call(inputs)

    started_s = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return time.perf_counter() - started_s


def _wait_ms(waits_ms: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(waits_ms)
    return statistics.median(ordered), ordered[int(len(ordered) * 0.95)]


def ceiling(checkpoint: Path, tokens: float) -> tuple[float, float]:
    """GFLOP/s of the model's matrix products in bfloat16, and texts a second if nothing else took time."""
    config = json.loads((checkpoint / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = ((hidden, hidden, 4), (hidden, inner, 1), (inner, hidden, 1))
    work = sum(2 * a * b * times for a, b, times in shapes)
    spent_s = sum(times * _product_s(a, b) / TYPICAL_TOKENS for a, b, times in shapes)
    return work / spent_s / 1e9, 1 / (spent_s * config["num_hidden_layers"] * tokens)


@torch.inference_mode()
def _product_s(inputs: int, outputs: int) -> float:
    layer = best_kind(torch.device("cpu"), torch.bfloat16)(torch.nn.Linear(inputs, outputs), torch.bfloat16)
    rows = torch.randn(TYPICAL_TOKENS, inputs, dtype=torch.bfloat16)
    found = []
    for _ in range(TRIES):
        started_s = time.perf_counter()
        layer(rows)
        found.append(time.perf_counter() - started_s)
    return min(found)


@contextlib.contextmanager
def gateway(checkpoint: Path, options: str, folder: Path) -> Iterator[int]:
    """The gateway with one engine; tells its process id."""
    config = folder / "router.yaml"
    config.write_text(
        f"listen: 127.0.0.1:{PORT}\n"
        f"upstreams: {{m: {{backend: torch, model: {checkpoint}{options}}}}}\n"
        "models: {m: {upstream: m}}\n"
    )
    command = [sys.executable, "-m", "gateway", "serve", "-c", str(config)]
    health = f"http://127.0.0.1:{PORT}/readyz"
    with run_server(command, {"GATEWAY_API_KEY": KEY}, health, folder / "gateway.log") as pid:
        yield pid


def peak_mb(pid: int) -> float:
    """Highest resident memory of a process and its descendants, summed, in MB."""
    total, waiting = 0.0, [pid]
    while waiting:
        one = waiting.pop()
        folder = Path(f"/proc/{one}")
        for line in (folder / "status").read_text().splitlines():
            if line.startswith("VmHWM"):
                total += int(line.split()[1]) / 1024
        for task in (folder / "task").iterdir():
            waiting += [int(child) for child in (task / "children").read_text().split()]
    return total


Contender = tuple[str, ReloadRequest, Callable[[], contextlib.AbstractContextManager[int]]]


def contenders(options: argparse.Namespace, checkpoint: Path, folder: Path) -> Iterator[Contender]:
    """Every server that was asked for, and how to start it."""
    ours = ReloadRequest(f"http://127.0.0.1:{PORT}/v1/embeddings", "m")
    modes = {"float32": ", dtype: float32", "bfloat16": ", dtype: bfloat16"}
    if options.compile:
        modes["bfloat16, compile"] = ", dtype: bfloat16, compile: true"
    for name, settings in modes.items():
        yield f"this gateway {name}", ours, partial(gateway, checkpoint, settings, folder)
    health, log = f"http://127.0.0.1:{PORT}/health", folder / "peer.log"
    if options.infinity:
        theirs = ReloadRequest(f"http://127.0.0.1:{PORT}/embeddings", checkpoint.name)
        for dtype in ("float32", "bfloat16"):
            start = prepare_command("infinity", checkpoint, PORT, ["--dtype", dtype])
            yield f"Infinity {dtype}", theirs, partial(run_server, *start, health, log)
    if options.vllm:
        start = prepare_command("vllm", checkpoint, PORT)
        theirs = ReloadRequest(f"http://127.0.0.1:{PORT}/v1/embeddings", checkpoint.name)
        yield "vLLM bfloat16", theirs, partial(run_server, *start, health, log)


def measured(contender: Contender, texts: list[str], repeats: int) -> Figures:
    """Start it, ask it, stop it."""
    name, asked, started = contender
    at_s = time.perf_counter()
    with started() as pid:
        took_s = time.perf_counter() - at_s
        found = asyncio.run(over_http(name, asked, texts, repeats))
        return msgspec.structs.replace(found, started_s=took_s, peak_mb=peak_mb(pid))


def table(found: Sequence[Figures]) -> Iterator[str]:
    """Markdown: one row each."""
    yield "| | bulk, texts/s | 32 single callers, texts/s | lone caller p50 / p95, ms | start, s | peak, MB |"
    yield "|---|---|---|---|---|---|"
    for one in found:
        trickle = "" if one.trickle_per_s is None else f"{one.trickle_per_s:.0f}"
        lone = "" if one.lone_p50_ms is None else f"{one.lone_p50_ms:.1f} / {one.lone_p95_ms:.1f}"
        start = "" if one.started_s is None else f"{one.started_s:.0f}"
        peak = "" if one.peak_mb is None else f"{one.peak_mb:.0f}"
        yield f"| {one.name} | {one.bulk_per_s:.0f} | {trickle} | {lone} | {start} | {peak} |"


def main() -> None:
    """Measure, print, and write what was asked for."""
    options = _options()
    # However this process is asked to end, its servers end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        _measure(options, make_large(Path(folder)) if options.large else locate_checkpoint(options.model))


def _measure(options: argparse.Namespace, checkpoint: Path) -> None:
    texts, mean = texts_for(checkpoint, options.texts)
    print(f"{len(texts)} texts of {mean:.1f} tokens on average, {torch.get_num_threads()} cores")
    rate, texts_per_s = ceiling(checkpoint, mean)
    print(f"bfloat16 matrix products alone: {rate:.0f} GFLOP/s, so {texts_per_s:.0f} texts/s at most")
    found = [Figures("ceiling of this machine", texts_per_s)]
    if options.in_process:
        for dtype in ("float32", "bfloat16"):
            with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                found.append(alone.submit(in_process, checkpoint, texts, dtype, options.repeats).result())
            print(f"{found[-1].name}: {found[-1].bulk_per_s:.0f} texts/s", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        for contender in contenders(options, checkpoint, Path(folder)):
            if options.only and options.only not in contender[0]:
                continue
            found.append(measured(contender, texts, options.repeats))
            print(f"{found[-1].name}: {found[-1].bulk_per_s:.0f} texts/s", file=sys.stderr)
    print("\n".join(table(found)))
    # A machine that others use too shows it here: the rate falls.
    print(f"matrix products again, at the end: {ceiling(checkpoint, mean)[0]:.0f} GFLOP/s")
    if options.json:
        options.json.write_text(json.dumps([msgspec.to_builtins(one) for one in found], indent=1))
    if options.plot:
        options.plot.write_text(bars("texts a second, bulk", [(one.name, one.bulk_per_s) for one in found]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="hub id or folder of a BERT-shaped checkpoint")
    parser.add_argument(
        "--large", action="store_true", help="a checkpoint of XLM-R large's shape, in its place"
    )
    parser.add_argument("--texts", type=int, default=TEXTS)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="also with `compile: true`")
    parser.add_argument("--in-process", action="store_true", help="also sentence-transformers")
    parser.add_argument("--infinity", action="store_true")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--only", help="servers whose name holds this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
