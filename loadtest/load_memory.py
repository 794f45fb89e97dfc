"""Peak memory of loading a model, on a checkpoint of a billion random weights in several files.

    .venv/bin/python -m loadtest.load_memory --dtype bfloat16 --stored bfloat16

Only anonymous memory counts: pages of files that are mapped can be dropped and read again. The checkpoint has
the shape of Qwen3 (14 layers of 2,048, a vocabulary of 151,936), takes 2 or 4 GB on disk, and is deleted.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from rich.console import Console

from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.memory import held_bytes, keep_freed
from loadtest.checkpoints import copy_tokenizer

CONFIG = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
FORMATS = ("float32", "bfloat16")
SAMPLE_EVERY_S, LOAD_TIMEOUT_S = 0.002, 600.0


class Peak(NamedTuple):
    """Memory of one load in megabytes: at its most, and held by the loaded network."""

    peak: float
    held: float


def main() -> None:
    """Make the checkpoint, load it in each number format in a process of its own, and print the peaks."""
    options = _options()
    if options.folder:
        _load(options.folder, options.dtype)
        return
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), getattr(torch, options.stored))
        for dtype in [options.dtype] if options.dtype else FORMATS:
            peak = measure_load(Path(folder), dtype)
            console.print(
                f"stored as {options.stored}, loaded as {dtype}: peak {peak.peak:.0f} MB, "
                f"held {peak.held:.0f} MB, ratio {peak.peak / peak.held:.2f}"
            )


def make_checkpoint(folder: Path, stored: torch.dtype) -> None:
    """Write the checkpoint with random weights, in files of at most 300 MB."""
    torch.manual_seed(0)
    network = transformers.AutoModel.from_config(transformers.Qwen3Config(**CONFIG), dtype=stored)
    network.save_pretrained(folder, max_shard_size="300MB")
    copy_tokenizer(folder)


def measure_load(folder: Path, dtype: str) -> Peak:
    """Load the checkpoint in another process, and observe its anonymous memory until it reports the end."""
    command = [sys.executable, "-m", "loadtest.load_memory", "--folder", str(folder), "--dtype", dtype]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        process.stdout.readline()
        (before,) = _anonymous_mb(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        samples = list(_samples(process, before))
        out, _ = process.communicate(timeout=LOAD_TIMEOUT_S)
    finally:
        process.kill()
        process.wait(timeout=LOAD_TIMEOUT_S)
    return Peak(max(samples), json.loads(out)["held_mb"])


def _samples(process: "subprocess.Popen[str]", before: float) -> Iterator[float]:
    deadline = time.monotonic() + LOAD_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        yield from (mb - before for mb in _anonymous_mb(process.pid))
        time.sleep(SAMPLE_EVERY_S)


def _anonymous_mb(pid: int) -> list[float]:
    """Return a process's anonymous memory in megabytes; empty if it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return [int(line.split()[1]) / 1000 for line in lines if line.startswith("RssAnon:")]


def _load(folder: Path, dtype: str) -> None:
    """Load the checkpoint once the parent is ready, and print the memory that the network holds."""
    keep_freed()
    torch.set_num_threads(1)
    print("ready", flush=True)
    sys.stdin.readline()
    model = load(folder, "loadtest", LoadOptions(dtype, "cpu"))  # type: ignore[arg-type]
    print(json.dumps({"held_mb": held_bytes(model.head) / 1e6}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", choices=(*FORMATS, "int8"), help="number format to load, by default each")
    parser.add_argument("--stored", choices=FORMATS, default="bfloat16", help="number format on disk")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
