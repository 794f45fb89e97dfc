"""Recorded forward passes of a packed encoder: one CUDA graph for each size class.

A pass of few tokens takes the processor longer to launch, operation by operation, than the GPU to compute. A
graph is launched at once. It always computes the same number of tokens and sequences: a pass takes the
smallest class in which it fits, with spare tokens of no sequence and with empty sequences. Any other pass is
launched as usual. Source: CUDA Graphs in PyTorch's notes on CUDA semantics.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from backends.torch.memory import is_exhausted, release_to_system

logger = logging.getLogger(__name__)

# Least and most tokens of a class, each of which has twice the tokens of the one before.
TOKENS_MIN, TOKENS_MAX = 16, 8192
# The attention kernel starts blocks for the longest sequence allowed, for each sequence. A class has either
# many short sequences or few of any length: blocks of both would take longer than the attention.
SHORT, TOKENS_PER_SHORT, TOKENS_PER_LONG = 128, 8, 64
# A recorded pass must take at most this share of the time of a launched one.
SHARE_MAX = 0.95
# Passes before a recording: they choose kernels, which a recording cannot. Rounds of measuring, in turns.
FIRST_PASSES, ROUNDS = 3, 7

# Runs a recorded pass again, with what its inputs hold by then. The output always has the same memory.
Replay: TypeAlias = Callable[[], Tensor]
Record: TypeAlias = Callable[[Callable[[], Tensor]], Replay]


class PassSize(NamedTuple):
    """Bounds of a pass: all tokens, sequences, and the tokens of the longest one."""

    tokens: int
    sequences: int
    longest: int

    def has_room(self, other: "PassSize") -> bool:
        """Return whether a pass of another size fits."""
        return all(most >= count for most, count in zip(self, other, strict=True))


class Packed(Protocol):
    """Packed encoder that computes (1, tokens, dim)."""

    def __call__(self, **inputs: Any) -> Any:
        """Return an output with `last_hidden_state`."""


class _Recorded(NamedTuple):
    """Pass of one size. words: (numbers,) int64, the named inputs and the starts of sequences."""

    size: PassSize
    words: Tensor
    replay: Replay


def sizes(tokens_max: int) -> Iterator[PassSize]:
    """Yield the size classes up to so many tokens, in the order in which a pass tries them."""
    tokens = TOKENS_MIN
    while tokens <= tokens_max:
        yield PassSize(tokens, tokens // TOKENS_PER_SHORT, min(tokens, SHORT))
        if tokens > SHORT:
            yield PassSize(tokens, tokens // TOKENS_PER_LONG, tokens)
        tokens *= 2


class PassGraphs:
    """Recorded passes of one encoder on one device.

    names: inputs with a number for each token. record: records a pass, by default as a CUDA graph.
    """

    def __init__(self, device: torch.device, names: Sequence[str], record: Record | None = None) -> None:
        self._device = device
        self._names = tuple(names)
        self._keys = {*names, "cu_seq_lens_q", "max_length_q"}
        self._recorder = (lambda: record) if record else _graph_recorder(device)
        self._recorded: list[_Recorded] = []
        # All passes share the memory of their inputs, outputs and what lies between.
        self._lock = Lock()

    @torch.inference_mode()
    def compute(self, inputs: dict[str, Any]) -> Tensor | None:
        """Compute (1, tokens, dim) of the inputs of a packed pass, None if no recorded pass has room.

        inputs: (1, tokens) int64 by their names, on the host or the device, and the options of attention.
        """
        # Of other inputs nothing was recorded, such as keys that are not attended to.
        if inputs.keys() != self._keys:
            return None
        tokens = int(inputs[self._names[0]].shape[1])
        size = PassSize(tokens, len(inputs["cu_seq_lens_q"]) - 1, inputs["max_length_q"])
        recorded = next((each for each in self._recorded if each.size.has_room(size)), None)
        if recorded is None:
            return None
        words = self._filled(inputs, recorded.size)
        with self._lock:
            recorded.words.copy_(words, non_blocking=True)
            return recorded.replay()[:, :tokens].clone()

    @torch.inference_mode()
    def choose(self, encoder: Packed, tokens_max: int = TOKENS_MAX) -> str:
        """Record passes up to the size at which a recorded one is no faster. Returns a note for operators."""
        self._recorded.clear()
        # A graph of an unloaded model must not end during a recording.
        gc.collect()
        record = self._recorder()
        reason = f"{tokens_max} is the most"
        for size in sizes(tokens_max):
            try:
                share = self._add(encoder, size, record)
            except RuntimeError as error:
                # Memory, and operations for which the processor waits for the GPU.
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                logger.info("a pass of %s was not recorded: %s", size, reason)
                if is_exhausted(error):
                    release_to_system()
                break
            if share > SHARE_MAX:
                reason = f"with {size.tokens} it takes {share:.2f} of the time of a launched one"
                # What is recorded of this size stays: the other form of it may be faster.
                self._recorded.pop()
                break
        if not self._recorded:
            return f"no pass is recorded as a CUDA graph: {reason}"
        most = self._recorded[-1].size.tokens
        return f"passes of up to {most} tokens are recorded as CUDA graphs; {reason}"

    def _add(self, encoder: Packed, size: PassSize, record: Record) -> float:
        """Record passes of one size; return the share of time that such a pass takes."""
        lengths = [size.longest] * (size.tokens // size.longest)
        starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        inputs: dict[str, Any] = {
            name: torch.zeros(1, size.tokens, dtype=torch.int64) for name in self._names
        } | {"cu_seq_lens_q": starts, "max_length_q": size.longest}
        words = self._filled(inputs, size).to(self._device)
        rows, all_starts = self._split(words, size)
        placed: dict[str, Any] = {
            name: row.unsqueeze(0) for name, row in zip(self._names, rows, strict=True)
        } | {"max_length_q": size.longest}

        def launch() -> Tensor:
            hidden: Tensor = encoder(**placed, cu_seq_lens_q=all_starts.int()).last_hidden_state
            return hidden

        self._recorded.append(_Recorded(size, words, record(launch)))
        contenders = (lambda: self.compute(inputs), launch)
        best = [float("inf")] * len(contenders)
        for _ in range(ROUNDS):
            best = [min(pair) for pair in zip(best, map(self._seconds, contenders), strict=True)]
        return best[0] / best[1]

    def _filled(self, inputs: dict[str, Any], size: PassSize) -> Tensor:
        """Return the words of a pass: its inputs with spare tokens, its starts with empty sequences."""
        given = inputs[self._names[0]]
        is_pinned = given.device.type == "cpu" and self._device.type == "cuda"
        count = len(self._names) * size.tokens + size.sequences + 1
        words = torch.zeros(count, dtype=torch.int64, device=given.device, pin_memory=is_pinned)
        rows, starts = self._split(words, size)
        for row, name in zip(rows, self._names, strict=True):
            row[: given.shape[1]] = inputs[name][0]
        found = inputs["cu_seq_lens_q"]
        starts[: len(found)] = found
        starts[len(found) :] = found[-1]
        return words

    def _split(self, words: Tensor, size: PassSize) -> tuple[Tensor, Tensor]:
        """Return (names, tokens) and (sequences + 1,) of the words of a pass."""
        rows, starts = words.split((len(self._names) * size.tokens, size.sequences + 1))
        return rows.view(len(self._names), size.tokens), starts

    def _seconds(self, compute: Callable[[], object]) -> float:
        self._wait()
        started_s = time.perf_counter()
        compute()
        self._wait()
        return time.perf_counter() - started_s

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _graph_recorder(device: torch.device) -> Callable[[], Record]:
    """Return what makes a recorder of CUDA graphs for each choice, whose graphs share memory."""
    # Each stream that multiplies keeps a work area of cuBLAS: 32 MiB on an H100.
    side = torch.cuda.Stream(device)
    # PyTorch takes no pool again whose last graph has ended.
    return lambda: partial(record_graph, side, torch.cuda.graph_pool_handle())


def record_graph(side: torch.cuda.Stream, pool: Any, launch: Callable[[], Tensor]) -> Replay:
    """Record a pass as a CUDA graph.

    side: stream to record on. pool: memory that recorded passes of one network share. Raises: RuntimeError if
    the pass has an operation that cannot be recorded.
    """
    before = torch.cuda.current_stream(side.device)
    side.wait_stream(before)
    with torch.cuda.stream(side):
        for _ in range(FIRST_PASSES):
            launch()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            output = launch()
        finally:
            graph.capture_end()
    before.wait_stream(side)

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay
