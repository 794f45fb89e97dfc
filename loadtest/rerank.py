"""Reranking by a cross-encoder of bge-reranker-base's shape, through the gateway, beside its peers.

    .venv/bin/python -m loadtest.rerank [--infinity] [--vllm] [--json FILE]

The weights are random: no time depends on them. One contender runs at a time; sentence-transformers in this
process, servers over HTTP on loopback. Stops by itself.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch
import transformers

from backends.checkpoints import DEFAULT_MODEL, locate_checkpoint
from loadtest.engine import KEY, PORT, gateway, make_texts, peak_mb, xlm_r
from tests.real.servers import prepare_command, run_server

QUERY = "How do I read a JSON document from a file and change one of its keys?"
DOCUMENTS, CALL_DOCUMENTS, CALLERS = 512, 32, 8
TOKENIZER_FILES = ("tokenizer.json", "special_tokens_map.json", "vocab.txt")


class Figures(msgspec.Struct):
    """One contender: pairs a second, and what its processes held at most."""

    name: str
    pairs_per_s: float
    peak_mb: float | None = None


def make_checkpoint(folder: Path) -> Path:
    """XLM-R base with one label. The tokenizer is smaller than its own: the encoder does the same work."""
    source = locate_checkpoint(DEFAULT_MODEL)
    config = xlm_r(num_labels=1)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.eval().save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(source / name, folder / name)
    told = json.loads((source / "tokenizer_config.json").read_text())
    names = {"model_max_length": 512, "model_input_names": ["input_ids", "attention_mask"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(told | names))
    return folder


def in_process(checkpoint: Path, documents: list[str], dtype: str, repeats: int) -> Figures:
    """sentence-transformers, batches of 32; it sorts by length itself."""
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(checkpoint), device="cpu", model_kwargs={"dtype": dtype})
    pairs = [(QUERY, document) for document in documents]
    model.predict(pairs[:CALL_DOCUMENTS])
    rates = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        model.predict(pairs, batch_size=CALL_DOCUMENTS, show_progress_bar=False)
        rates.append(len(pairs) / (time.perf_counter() - started_s))
    return Figures(f"sentence-transformers {dtype}", statistics.median(rates))


async def over_http(asked: "Asked", documents: list[str], repeats: int) -> float:
    """Pairs a second from callers that each wait for their scores."""
    calls = [documents[i : i + CALL_DOCUMENTS] for i in range(0, len(documents), CALL_DOCUMENTS)]
    headers = {"authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def caller(waiting: Iterator[list[str]]) -> None:
            for texts in waiting:
                async with session.post(asked.url, json=asked.body(texts)) as answer:
                    if answer.status != 200:
                        raise RuntimeError(f"{asked.url}: {answer.status} {(await answer.text())[:300]}")
                    await answer.read()

        async def everything(some: list[list[str]]) -> float:
            waiting, started_s = iter(some), time.perf_counter()
            await asyncio.gather(*(caller(waiting) for _ in range(CALLERS)))
            return time.perf_counter() - started_s

        await everything(calls[:2])
        return statistics.median([len(documents) / await everything(calls) for _ in range(repeats)])


class Asked(msgspec.Struct, frozen=True):
    """Where a server reranks, and in which words: TEI's `texts`, or `documents` with a model's name."""

    url: str
    model: str | None = None

    def body(self, texts: Sequence[str]) -> dict[str, Any]:
        """The request for one query's documents."""
        if self.model is None:
            return {"query": QUERY, "texts": texts}
        return {"query": QUERY, "documents": texts, "model": self.model}


Contender = tuple[str, Asked, Callable[[], contextlib.AbstractContextManager[int]]]


def contenders(options: argparse.Namespace, checkpoint: Path, folder: Path) -> Iterator[Contender]:
    """Every server that was asked for, and how to start it."""
    url = f"http://127.0.0.1:{PORT}/rerank"
    for dtype in ("float32", "bfloat16"):
        yield (
            f"this gateway {dtype}",
            Asked(url),
            partial(gateway, checkpoint, f", dtype: {dtype}", folder),
        )
    health, log = f"http://127.0.0.1:{PORT}/health", folder / "peer.log"
    if options.infinity:
        for dtype in ("float32", "bfloat16"):
            start = prepare_command("infinity", checkpoint, PORT, ["--dtype", dtype])
            yield (
                f"Infinity {dtype}",
                Asked(url, checkpoint.name),
                partial(run_server, *start, health, log),
            )
    if options.vllm:
        start = prepare_command("vllm", checkpoint, PORT)
        yield "vLLM bfloat16", Asked(url, checkpoint.name), partial(run_server, *start, health, log)


def measured(contender: Contender, documents: list[str], repeats: int) -> Figures:
    """Start it, ask it, stop it."""
    name, asked, started = contender
    with started() as pid:
        rate = asyncio.run(over_http(asked, documents, repeats))
        return Figures(name, rate, peak_mb(pid))


def table(found: Sequence[Figures]) -> Iterator[str]:
    """Markdown: one row each."""
    yield "| | pairs/s | peak, MB |"
    yield "|---|---|---|"
    for one in found:
        peak = "" if one.peak_mb is None else f"{one.peak_mb:.0f}"
        yield f"| {one.name} | {one.pairs_per_s:.1f} | {peak} |"


def main() -> None:
    """Measure, print, and write what was asked for."""
    options = _options()
    # However this process is asked to end, its servers end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    documents = make_texts(options.documents)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "reranker")
        found = [
            in_process(checkpoint, documents, dtype, options.repeats) for dtype in ("float32", "bfloat16")
        ]
        found += [
            measured(contender, documents, options.repeats)
            for contender in contenders(options, checkpoint, Path(folder))
        ]
    print("\n".join(table(found)))
    if options.json:
        options.json.write_text(json.dumps([msgspec.to_builtins(one) for one in found], indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--infinity", action="store_true")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
