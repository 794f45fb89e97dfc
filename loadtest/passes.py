"""Forward passes of the engine alone: what share of the matrix products' rate large networks reach.

    python -m loadtest.passes                 # XLM-R large and Qwen3-Embedding-0.6B, two minutes
    python -m loadtest.passes --cuttings      # also the ways to cut attention, on all-MiniLM-L6-v2, in turns

Checkpoints have the real shape and random weights. The ceiling is the time of a pass' matrix products alone,
of the same number of tokens, measured in turns with the passes.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from backends.checkpoints.locations import DEFAULT_MODEL, locate_checkpoint
from backends.torch.inputs.sequences import Head, InputSequence
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.memory import keep_freed
from backends.torch.networks import attention
from backends.torch.networks.precision import fastest_linear
from loadtest import checkpoints
from loadtest.checkpoints import LARGE_SHAPES, LargeShape
from loadtest.runtimes import DENSE, bulk_lengths, sequences_of

LENGTHS = ([50], [510], [50] * 20, [510] * 2)
# The first turns of a shape prepare oneDNN's code.
UNCOUNTED = 2


def products(shape: LargeShape, tokens: int) -> Callable[[], None]:
    """Return the matrix products of a network alone, each with weights of its own, in bfloat16."""
    kind = fastest_linear(torch.device("cpu"), torch.bfloat16)
    layers = [
        kind(torch.nn.Linear(inputs, outputs, bias=False), torch.bfloat16)
        for _ in range(shape.layers)
        for inputs, outputs in shape.products
    ]
    sizes = {inputs for inputs, _ in shape.products}
    rows = {size: torch.randn(tokens, size, dtype=torch.bfloat16) for size in sizes}
    inputs = [rows[size] for _ in range(shape.layers) for size, _ in shape.products]

    @torch.inference_mode()
    def run() -> None:
        for layer, values in zip(layers, inputs, strict=True):
            layer(values)

    return run


def in_turns(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each run in each turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + UNCOUNTED):
        for name, run in runs.items():
            started_s = time.perf_counter()
            run()
            if turn >= UNCOUNTED:
                times[name].append(time.perf_counter() - started_s)
    return times


def ratio(values: Sequence[float], base: Sequence[float]) -> str:
    """Return the median ratio of paired times, with its quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(values, base, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def shares(folder: Path, repeats: int) -> Iterator[str]:
    """Yield a line for each large shape and each batch."""
    for name, shape in LARGE_SHAPES.items():
        head = load(checkpoints.make_large(shape, folder / name), "m", LoadOptions("bfloat16", "cpu")).head
        for lengths in LENGTHS:
            sequences = sequences_of(lengths)
            runs: dict[str, Callable[[], object]] = {
                "ceiling": products(shape, sum(lengths)),
                "pass": partial(head.run, sequences, DENSE),
            }
            times = in_turns(runs, repeats)
            took_ms = statistics.median(times["pass"]) * 1e3
            share = ratio(times["ceiling"], times["pass"])
            yield f"{name:14} {len(lengths):3} x {lengths[0]:3} tokens: {took_ms:7.1f} ms, share {share}"


def cuttings(repeats: int) -> Iterator[str]:
    """Yield a line for each way to cut attention, and each batch; ratios to the first way."""
    checkpoint = locate_checkpoint(DEFAULT_MODEL)
    head = load(checkpoint, "m", LoadOptions("bfloat16", "cpu")).head
    chosen = attention.fastest_cutting(torch.bfloat16)
    for lengths in ([50], [250], [46] * 23, bulk_lengths()):
        sequences = sequences_of(lengths)
        runs = {str(cutting): _with_cutting(cutting, head, sequences) for cutting in attention.CUTTINGS}
        times = in_turns(runs, repeats)
        first = next(iter(times.values()))
        for cutting in attention.CUTTINGS:
            mark = "*" if cutting == chosen else " "
            yield (
                f"{mark} {len(lengths):2} texts, {sum(lengths):4} tokens, blocks of {cutting.block_tokens}, "
                f"keys in multiples of {cutting.key_multiple:2}: {ratio(times[str(cutting)], first)}"
            )


def _with_cutting(
    cutting: attention.Cutting, head: Head, sequences: Sequence[InputSequence]
) -> Callable[[], object]:
    def run() -> None:
        with patch.object(attention, "fastest_cutting", lambda _: cutting):
            head.run(sequences, DENSE)

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cuttings", action="store_true")
    options = parser.parse_args()
    keep_freed()
    torch.set_num_threads(options.threads)
    if options.cuttings:
        for line in cuttings(options.repeats * 5):
            print(line, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for line in shares(Path(folder), options.repeats):
            print(line, flush=True)


if __name__ == "__main__":
    main()
