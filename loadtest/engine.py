"""Comparison of the built-in engine with its peers: one checkpoint, the same texts, one contender at a time.

    .venv/bin/python -m loadtest.engine --peers sentence-transformers,infinity,vllm
    .venv/bin/python -m loadtest.engine --peers sentence-transformers-onnx,sentence-transformers-openvino
    .venv/bin/python -m loadtest.engine --task rerank --peers infinity
    .venv/bin/python -m loadtest.engine --only "behind" --peers vllm --behind   # the gateway in front of vLLM

sentence-transformers runs in a process of its own and is called there, by PyTorch, ONNX Runtime or OpenVINO;
servers are called over HTTP on loopback, with vectors as base64. `python -m tests.real.servers infinity vllm
sentence-transformers` installs them once.
--behind also measures each server through the gateway, in turns with direct calls, on the same cores.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import cycle, repeat
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
import uvloop
from rich.console import Console

from backends.checkpoints.locations import DEFAULT_MODEL, locate_checkpoint
from backends.torch.networks.int8 import probe_kernel, refuse_slow
from backends.torch.networks.precision import TYPICAL_TOKENS, fastest_linear
from loadtest import checkpoints, results, tables
from loadtest.corpora import CallFactory, CallShape
from loadtest.generator import CallSender, LoadTarget, closed_loop
from loadtest.processes import free_port, peak_mb
from loadtest.recorder import Sample, SampleRecorder
from loadtest.results import Measure, spread
from tests.real.servers import environment, prepare_command, run_server

KEY = "loadtest"
CALL_TEXTS, SINGLE_CALLERS = 32, (8, 32)
# Far more than are in flight: the gateway computes identical texts in flight only once.
POOL_TEXTS, IN_PROCESS_TEXTS = 4096, 512
LONE_P50, LONE_P95 = "p50 ms, lone caller", "p95 ms, lone caller"
QUERY = "How do I read a JSON document from a file and change one of its keys?"
SHORT = "How do I reset my password?"
Runtime = Literal["torch", "onnx", "openvino"]
RUNTIMES: dict[str, Runtime] = {
    "sentence-transformers": "torch",
    "sentence-transformers-onnx": "onnx",
    "sentence-transformers-openvino": "openvino",
}
PEERS = (*RUNTIMES, "infinity", "vllm")
COSINE_MIN = 0.999
DTYPES = ("float32", "bfloat16")
GATEWAY_DTYPES = (*DTYPES, "int8")
# A server is idle once it answers a lone call within this time.
_SETTLING_S, _SETTLING_TRIES = 0.5, 10
# The measured rate of matrix products is the best of this many tries.
_TRIES = 20

Task = Literal["embed", "rerank"]
PATHS: dict[Task, str] = {"embed": "/v1/embeddings", "rerank": "/v1/rerank"}
UNITS: dict[Task, str] = {"embed": "texts/s", "rerank": "pairs/s"}
# A pair costs more than a text.
BULK_CALLERS: dict[Task, int] = {"embed": 16, "rerank": 8}


class Contender(msgspec.Struct, frozen=True):
    """A server, where it takes calls, and how to start its process.

    direct: the server itself, where the contender is the gateway in front of it.
    """

    name: str
    target: LoadTarget
    model: str
    start: Callable[[], contextlib.AbstractContextManager[int]]
    direct: "Contender | None" = None


class Job(msgspec.Struct, frozen=True):
    """The calls of a run, and for how long each kind of callers sends them. callers: of CALL_TEXTS texts."""

    task: Task
    texts: list[str]
    repeats: int
    seconds: float
    callers: int


# Values of the repeats, by measure.
Figures = dict[str, list[float]]


async def measure_turns(job: Job, servers: Sequence[Contender]) -> list[Figures]:
    """Measure bulk, single and lone callers of each server, in turns within each repeat."""
    found: list[Figures] = [defaultdict(list) for _ in servers]
    for turn in range(job.repeats):
        turns = list(zip(servers, found, strict=True))
        for server, figures in turns if turn % 2 == 0 else reversed(turns):
            bulk = await _sample(job, server, job.callers, CALL_TEXTS)
            figures[f"{UNITS[job.task]}, bulk"].append(bulk.per_s * CALL_TEXTS)
            for callers in SINGLE_CALLERS:
                single = await _sample(job, server, callers, 1)
                figures[f"{UNITS[job.task]}, {callers} single callers"].append(single.per_s)
            lone = await _sample(job, server, 1, 1)
            figures[LONE_P50].append(lone.p50_ms)
            figures[LONE_P95].append(lone.p95_ms)
    return found


async def _sample(job: Job, server: Contender, callers: int, inputs: int) -> Sample:
    """Run a closed loop over the texts, once the server has finished the calls that the last one abandoned.

    Raises: RuntimeError where a call fails.
    """
    query = QUERY if job.task == "rerank" else ""

    def sender(inputs: int) -> CallSender:
        texts = repeat(SHORT) if callers == 1 else cycle(job.texts)
        calls = CallFactory(texts, CallShape(inputs, model=server.model, query=query))
        return CallSender(server.target, calls, SampleRecorder({}))

    for _ in range(_SETTLING_TRIES):
        if (await closed_loop(sender(1), 1, _SETTLING_S, 0)).calls:
            break
    sample = await closed_loop(sender(inputs), callers, job.seconds, job.seconds / 5)
    if sample.failed or not sample.calls:
        raise RuntimeError(f"{server.name}: {sample.calls} calls answered, {sample.failures} failed")
    return sample


def in_process(checkpoint: Path, job: Job, runtime: Runtime, dtype: str) -> tuple[Figures, list[float]]:
    """Measure sentence-transformers in a process that it has for itself; return the vector of SHORT too.

    Raises: subprocess.CalledProcessError.
    """
    folder = Path(sys.prefix) if runtime == "torch" else environment("sentence-transformers")
    order = {
        "checkpoint": str(checkpoint),
        "backend": runtime,
        "dtype": dtype,
        "task": job.task,
        "texts": job.texts[:IN_PROCESS_TEXTS],
        "query": QUERY,
        "short": SHORT,
        "repeats": job.repeats,
    }
    command = [folder / "bin/python", Path(__file__).with_name("in_process.py")]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        command, input=json.dumps(order), stdout=subprocess.PIPE, text=True, check=True, env=offline
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    figures = {
        f"{UNITS[job.task]}, bulk": found["rates"],
        LONE_P50: found["p50_ms"],
        LONE_P95: found["p95_ms"],
        "peak MB": [found["peak_mb"]],
    }
    return figures, found["vector"]


def of_sentence_transformers(options: argparse.Namespace, checkpoint: Path, job: Job) -> Iterator[Measure]:
    """Measure each runtime of sentence-transformers that the command line names.

    Raises: SystemExit if one gives other vectors than the first.
    """
    expected: list[float] = []
    for peer, runtime in RUNTIMES.items():
        for dtype in DTYPES if runtime == "torch" else ("",):
            if peer not in options.peers:
                continue
            # ONNX Runtime computes in float32, and OpenVINO as it chooses.
            name = f"{peer} {dtype}".rstrip()
            figures, vector = in_process(checkpoint, job, runtime, dtype)
            expected = expected or vector
            if vector and _cosine(vector, expected) < COSINE_MIN:
                raise SystemExit(f"{name}: its vectors differ from those before")
            yield from measures(name, figures)


def _seconds(run: Callable[[Any], object], inputs: object) -> float:
    started_s = time.perf_counter()
    run(inputs)
    return time.perf_counter() - started_s


def _cosine(left: Sequence[float], right: Sequence[float]) -> float:
    return float(np.dot(left, right) / np.linalg.norm(left) / np.linalg.norm(right))


def matrix_ceiling(checkpoint: Path, tokens: float) -> tuple[float, float]:
    """Return GFLOP/s of the model's matrix products in bfloat16, and texts/s if nothing else took time."""
    config = json.loads((checkpoint / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = ((hidden, hidden, 4), (hidden, inner, 1), (inner, hidden, 1))
    operations = sum(2 * a * b * times for a, b, times in shapes)
    spent_s = sum(times * _product_s(a, b) / TYPICAL_TOKENS for a, b, times in shapes)
    return operations / spent_s / 1e9, 1 / (spent_s * config["num_hidden_layers"] * tokens)


@torch.inference_mode()
def _product_s(inputs: int, outputs: int) -> float:
    layer = fastest_linear(torch.device("cpu"), torch.bfloat16)(
        torch.nn.Linear(inputs, outputs), torch.bfloat16
    )
    rows = torch.randn(TYPICAL_TOKENS, inputs, dtype=torch.bfloat16)
    return min(_seconds(layer, rows) for _ in range(_TRIES))


@contextlib.contextmanager
def gateway(upstream: str, port: int, folder: Path) -> Iterator[int]:
    """Run a gateway with one upstream and yield its process id."""
    config = folder / f"router-{port}.yaml"
    config.write_text(
        f"listen: 127.0.0.1:{port}\nupstreams: {{m: {{{upstream}}}}}\nmodels: {{m: {{upstream: m}}}}\n"
    )
    command = [sys.executable, "-m", "gateway", "serve", "-c", str(config)]
    health = f"http://127.0.0.1:{port}/readyz"
    with run_server(command, {"GATEWAY_API_KEY": KEY}, health, config.with_suffix(".log")) as pid:
        yield pid


def contenders(options: argparse.Namespace, checkpoint: Path, folder: Path) -> Iterator[Contender]:
    """Yield every server of the command line."""
    path = PATHS[options.task]
    refused = refuse_slow(probe_kernel())
    if refused:
        print(f"not measured: {refused}")
    variants = {dtype: f"dtype: {dtype}" for dtype in (DTYPES if refused else GATEWAY_DTYPES)}
    # An extra, which a machine with a GPU does not need.
    if find_spec("openvino"):
        variants |= {f"{dtype}, OpenVINO": f"dtype: {dtype}, runtime: openvino" for dtype in DTYPES}
    for name, settings in variants.items():
        port = free_port()
        start = partial(gateway, f"backend: torch, model: {checkpoint}, {settings}", port, folder)
        yield Contender(f"this gateway {name}", _target(port, path), "m", start)
    for peer in (peer for peer in options.peers if peer not in RUNTIMES):
        for dtype in DTYPES if peer == "infinity" else ("bfloat16",):
            yield from _peer(options, peer, dtype, checkpoint, folder)


def _peer(
    options: argparse.Namespace, peer: Literal["infinity", "vllm"], dtype: str, checkpoint: Path, folder: Path
) -> Iterator[Contender]:
    """Yield a peer, and the gateway in front of it where --behind asks for that."""
    port, outer_port = free_port(), free_port()
    base, name = f"http://127.0.0.1:{port}", {"infinity": "Infinity", "vllm": "vLLM"}[peer]
    embed_path = "/embeddings" if peer == "infinity" else "/v1/embeddings"
    flags = ["--dtype", dtype] if peer == "infinity" else []
    command, variables = prepare_command(peer, checkpoint, port, flags)
    start = partial(run_server, command, variables, f"{base}/health", folder / f"{peer}.log")
    target = _target(port, embed_path if options.task == "embed" else "/rerank")
    direct = Contender(f"{name} {dtype}", target, checkpoint.name, start)
    yield direct
    if options.behind:
        upstream = f"backend: {peer}, replicas: ['{base}'], tokenizer: {checkpoint}"
        if options.window:
            upstream += f", in_flight_batches: {options.window}"
        outer = partial(gateway, upstream, outer_port, folder)
        target = _target(outer_port, PATHS[options.task])
        yield Contender(f"{name} {dtype} behind this gateway", target, "m", outer, direct)


def _target(port: int, path: str) -> LoadTarget:
    return LoadTarget(port, {"authorization": f"Bearer {KEY}"}, path, checked=False)


def measure(contender: Contender, job: Job) -> list[Measure]:
    """Start a contender, measure it, stop it."""
    turns = [contender, *([contender.direct] if contender.direct else [])]
    started_s = time.perf_counter()
    with contextlib.ExitStack() as stack:
        # The gateway starts after the server behind it.
        pid = [stack.enter_context(server.start()) for server in reversed(turns)][-1]
        start_s = time.perf_counter() - started_s
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = measures(contender.name, *runner.run(measure_turns(job, turns)))
        figures = {"starts in, s": [start_s], "peak MB": [peak_mb(pid)]}
        return found + measures(contender.name, figures)


def measures(name: str, figures: Figures, baseline: Figures | None = None) -> list[Measure]:
    """Summarize one contender's figures as measures, with ratios to the baseline paired by repeat."""
    found = []
    for title, values in figures.items():
        base = baseline[title] if baseline else []
        ratios = [value / other for value, other in zip(values, base, strict=False)]
        compared = (spread(base), spread(ratios)) if base else (None, None)
        found.append(Measure(name, title, spread(values), *compared))
    return found


def run(options: argparse.Namespace, checkpoint: Path, folder: Path) -> list[Measure]:
    """Measure the ceiling of this machine, sentence-transformers, and every server."""
    texts, tokens = checkpoints.texts_for(checkpoint, POOL_TEXTS)
    job = Job(options.task, texts, options.repeats, options.seconds, options.callers)
    print(f"{len(texts)} texts of {tokens:.1f} tokens on average, {torch.get_num_threads()} cores")
    before = matrix_ceiling(checkpoint, tokens)
    found: list[Measure] = []
    found += of_sentence_transformers(options, checkpoint, job)
    for contender in contenders(options, checkpoint, folder):
        if not options.only or options.only in contender.name:
            print(f"{contender.name} …", file=sys.stderr)
            found += measure(contender, job)
    # On a machine that others use too, the rate of the products falls between start and end.
    pairs = zip(before, matrix_ceiling(checkpoint, tokens), strict=True)
    # Of reranks the tokens of a pair are not known here.
    titles = ("GFLOP/s", "texts/s, bulk") if options.task == "embed" else ("GFLOP/s",)
    ceilings = zip(titles, pairs, strict=False)
    name, note = "matrix products in bfloat16 alone", "at the start and the end"
    return [*(Measure(name, title, spread(pair), note=note) for title, pair in ceilings), *found]


def main() -> None:
    """Measure, print and write the result."""
    options = _options()
    # On SIGTERM the servers of this process end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.task == "rerank":
            checkpoint = checkpoints.make_reranker(folder / "reranker")
        else:
            checkpoint = locate_checkpoint(options.model)
        found = run(options, checkpoint, folder)
    Console(width=170).print(tables.listed(found))
    kind = "engine-rerank" if options.task == "rerank" else "engine"
    results.write(results.new_result(kind, found), options.out)


def _options() -> argparse.Namespace:
    parser = results.argument_parser(__doc__)
    parser.add_argument("--task", choices=("embed", "rerank"), default="embed")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="hub id or folder of a BERT-shaped checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="measured period of each sample; 10, reranks 60")
    parser.add_argument("--callers", type=int, help="callers in bulk; 16, reranks 8")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=[], help=", ".join(PEERS))
    parser.add_argument("--behind", action="store_true", help="also each server behind the gateway")
    parser.add_argument("--window", type=int, help="batches in flight behind the gateway; learned")
    parser.add_argument("--only", help="servers whose name contains this")
    options = parser.parse_args()
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    options.callers = options.callers or BULK_CALLERS[options.task]
    options.seconds = options.seconds or (10 if options.task == "embed" else 60)
    return options


if __name__ == "__main__":
    main()
