"""Comparison of one forward pass in the engine, ONNX Runtime and OpenVINO, in this process and in turns.

    pip install onnx onnxscript onnxruntime openvino      # in an environment of its own, next to the gateway
    python -m loadtest.runtimes --threads 1
    python -m loadtest.runtimes --threads 2 --dtype bfloat16    # ONNX Runtime keeps float32

A server of the kind that runs ONNX Runtime is approximated by batches of eight padded texts. With one thread,
other work on the machine hardly changes the processor times. Every runtime gives the mean of the token
vectors; a cosine below 0.9999 to the engine's vector, 0.9995 in bfloat16, ends the run.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModel

from backends.checkpoints.locations import DEFAULT_MODEL, locate_checkpoint
from backends.contract import Output
from backends.torch.inputs.sequences import InputSequence
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.memory import keep_freed

DENSE = frozenset({Output.DENSE})
BATCH = 8
DType = Literal["float32", "bfloat16"]
LONE_LENGTHS = (8, 50, 128, 250)
BULK_TOKENS, BULK_LENGTH, BULK_SPREAD, BULK_LONGEST = 1000, 40, 0.6, 254
COSINE_MIN: dict[DType, float] = {"float32": 0.9999, "bfloat16": 0.9995}
# Ids that every BERT vocabulary has, without special tokens.
IDS = range(1000, 29000)

Vectors = NDArray[np.float32]
Run = Callable[[Sequence[InputSequence]], Vectors]


class Pooled(nn.Module):
    """Network and mean of its token vectors, as one graph to export."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return (rows, dim) of (rows, longest) ids and their mask."""
        hidden = self.network(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).float()
        pooled: Tensor = (hidden * weights).sum(1) / weights.sum(1)
        return pooled


def export(checkpoint: Path, path: Path) -> None:
    """Write a checkpoint as an ONNX file with any number of rows and tokens."""
    ids = torch.randint(IDS.start, IDS.stop, (2, 16))
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    network = Pooled(AutoModel.from_pretrained(checkpoint, dtype=torch.float32)).eval()
    torch.onnx.export(
        network,
        (ids, torch.ones_like(ids)),
        path,
        input_names=["ids", "mask"],
        output_names=["vectors"],
        dynamic_shapes=(sizes, sizes),
        dynamo=True,
        external_data=False,
    )


def engine(checkpoint: Path, dtype: DType) -> Run:
    """Return the engine's pass."""
    head = load(checkpoint, "m", LoadOptions(device="cpu", dtype=dtype)).head

    def run(sequences: Sequence[InputSequence]) -> Vectors:
        return np.stack([row.dense for row in head.run(sequences, DENSE) if row.dense is not None])

    return run


def onnx_runtime(path: Path, threads: int) -> Run:
    """Return ONNX Runtime's passes, in batches of eight."""
    library = import_module("onnxruntime")
    options = library.SessionOptions()
    options.intra_op_num_threads = threads
    # Its threads would spin while another contender computes.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = library.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return in_batches(lambda ids, mask: session.run(None, {"ids": ids, "mask": mask})[0])


def open_vino(path: Path, threads: int, dtype: DType) -> Run:
    """Return OpenVINO's passes, in batches of eight."""
    core = import_module("openvino").Core()
    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": precision}
    request = core.compile_model(core.read_model(path), "CPU", settings).create_infer_request()
    return in_batches(lambda ids, mask: request.infer([ids, mask])[0].copy())


def in_batches(compute: Callable[[NDArray[np.int64], NDArray[np.int64]], Vectors]) -> Run:
    """Return a run of padded batches."""

    def run(sequences: Sequence[InputSequence]) -> Vectors:
        starts = range(0, len(sequences), BATCH)
        return np.concatenate([compute(*_padded(sequences[at : at + BATCH])) for at in starts])

    return run


def _padded(sequences: Sequence[InputSequence]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    shape = len(sequences), max(len(sequence.ids) for sequence in sequences)
    ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence.ids)], mask[row, : len(sequence.ids)] = sequence.ids, 1
    return ids, mask


def bulk_lengths() -> list[int]:
    """Return the lengths of mixed texts, longest first."""
    random = Random(0)  # noqa: S311 - no secret
    lengths: list[int] = []
    while sum(lengths) < BULK_TOKENS:
        lengths.append(min(BULK_LONGEST, max(6, int(BULK_LENGTH * random.lognormvariate(0, BULK_SPREAD)))))
    return sorted(lengths, reverse=True)


def sequences_of(lengths: Sequence[int]) -> list[InputSequence]:
    """Return sequences of random ids."""
    random = Random(0)  # noqa: S311 - no secret
    return [InputSequence(random.choices(IDS, k=length), [0] * length) for length in lengths]


def compare(
    runs: dict[str, Run], sequences: Sequence[InputSequence], repeats: int, cosine_min: float
) -> None:
    """Print the times of each run, and their ratios to those of the first in the same turn."""
    vectors = {name: run(sequences) for name, run in runs.items()}
    clocks = {"processor": time.process_time, "elapsed": time.perf_counter}
    times: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in runs} for clock in clocks}
    expected = next(iter(vectors.values()))
    for name, found in vectors.items():
        if cosine(found, expected) < cosine_min:
            raise SystemExit(f"{name}: its vectors differ, cosine {cosine(found, expected):.6f}")
    for _ in range(repeats):
        for name, run in runs.items():
            started_s = {clock: read() for clock, read in clocks.items()}
            run(sequences)
            for clock, read in clocks.items():
                times[clock][name].append(read() - started_s[clock])
    for name in runs:
        print(f"  {name:13} {'   '.join(_summary(times[clock], name) + f' {clock}' for clock in clocks)}")


def _summary(times: dict[str, list[float]], name: str) -> str:
    """Return the median time of a run, and its ratio to the first."""
    first = next(iter(times.values()))
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times[name], first, strict=True)], n=4)
    return f"{statistics.median(times[name]) * 1e3:7.1f} ms {middle:.2f} ({low:.2f}-{high:.2f})"


def cosine(found: Vectors, expected: Vectors) -> float:
    """Return the least cosine of two lists of vectors."""
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((found * expected).sum(axis=1) / lengths).min())


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dtype", choices=list(COSINE_MIN), default="float32")
    options = parser.parse_args()
    dtype: DType = options.dtype
    keep_freed()
    torch.set_num_threads(options.threads)
    checkpoint = Path(locate_checkpoint(DEFAULT_MODEL, None))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export(checkpoint, path)
        runs = {
            "engine": engine(checkpoint, dtype),
            "ONNX Runtime": onnx_runtime(path, options.threads),
            "OpenVINO": open_vino(path, options.threads, dtype),
        }
    for lengths in [*([length] for length in LONE_LENGTHS), bulk_lengths()]:
        print(f"{len(lengths)} texts, {sum(lengths)} tokens, {dtype}: median, ratio to the engine")
        compare(runs, sequences_of(lengths), options.repeats, COSINE_MIN[dtype])


if __name__ == "__main__":
    main()
