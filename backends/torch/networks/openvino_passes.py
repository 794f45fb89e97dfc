"""Passes of one text by OpenVINO, up to the length at which PyTorch is as fast.

A lone short text takes PyTorch longer to dispatch than to multiply. Batches stay with PyTorch, which computes
no padding and is faster at them. Source of the settings: OpenVINO 2026.4, CPU device.
"""

import inspect
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, pad

from backends.contract.errors import ModelUnavailable
from backends.recipe.options import DTypeName
from backends.torch.networks.rounding import spare_tokens

HINTS = {torch.float32: "f32", torch.bfloat16: "bf16"}
# Least cosine of each token's vector to PyTorch's: a text must have the same vector alone and in a batch.
COSINE_MIN = {torch.float32: 0.999999, torch.bfloat16: 0.9999}
# A pass must take at most this share of PyTorch's time.
SHARE_MAX = 0.95
# Lengths that are measured in this order, and the rounds of each in turns.
LENGTHS, ROUNDS = (8, 16, 32, 64, 128, 256, 512), 7
# Passes that take longer are not measured: at their length the dispatch does not count.
PASS_MAX_S = 0.1
SPARE_TRIED = 3
TRACED_TOKENS, TRACED_PADDING = 16, 3
NAME = "`runtime: openvino`"


class PackedNetwork(Protocol):
    """Encoder as PyTorch computes it, without padding. positions_max: the most tokens of a text."""

    vocabulary: int
    positions_max: float

    def compute_packed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the last hidden state of (rows, longest) ids."""


class Trial(NamedTuple):
    """Times of one pass of so many tokens, and the least cosine of its token vectors."""

    tokens: int
    own_s: float
    torch_s: float
    cosine: float


class OpenVinoPasses:
    """Copy of an encoder for passes of one text.

    model: OpenVINO's form of the encoder. dtype: of the products in PyTorch.
    """

    def __init__(self, model: Any, dtype: torch.dtype, *, has_type_ids: bool) -> None:
        self._model = model
        self._dtype = dtype
        self._has_type_ids = has_type_ids
        self._request: Any = None
        self._lock = Lock()
        self._threads = self._longest = 0

    @property
    def copied_bytes(self) -> int:
        """Bytes of the float32 weights, and of the compiled ones where OpenVINO computes."""
        weights = (node for node in self._model.get_ops() if node.get_type_name() == "Constant")
        bytes_ = sum(node.get_byte_size() for node in weights)
        return bytes_ + (0 if self._request is None else bytes_ * self._dtype.itemsize // 4)

    def compute(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor | None:
        """Return the last hidden state (1, tokens, dim) float32, None if PyTorch is to compute it."""
        is_taken = len(input_ids) == 1 and input_ids.shape[1] <= self._longest
        # A pass next to others has fewer threads.
        if not is_taken or torch.get_num_threads() != self._threads or not self._lock.acquire(blocking=False):
            return None
        try:
            return self._run(input_ids, token_type_ids)
        finally:
            self._lock.release()

    @torch.inference_mode()
    def choose(self, packed: PackedNetwork) -> str:
        """Compile for the number of threads that this thread has, and find the texts to compute.

        packed: the encoder as PyTorch computes it. Returns a note for operators.
        """
        with self._lock:
            self._longest, self._threads = 0, torch.get_num_threads()
            settings = {
                "INFERENCE_PRECISION_HINT": HINTS[self._dtype],
                "INFERENCE_NUM_THREADS": self._threads,
                "NUM_STREAMS": 1,
                # Several engine processes would pin their threads to the same cores.
                "ENABLE_CPU_PINNING": False,
            }
            compiled = _openvino().Core().compile_model(self._model, "CPU", settings)
            self._request = compiled.create_infer_request()
            trials: list[Trial] = []
            for tokens in LENGTHS:
                if tokens > packed.positions_max:
                    break
                trials.append(trial := self._try(packed, tokens))
                if not self._is_better(trial):
                    break
                self._longest = tokens
                if max(trial.own_s, trial.torch_s) > PASS_MAX_S:
                    break
            if not self._longest:
                # Its weights are not needed.
                self._request = None
        return self._note(trials)

    def _is_better(self, trial: Trial) -> bool:
        return trial.own_s <= SHARE_MAX * trial.torch_s and trial.cosine >= COSINE_MIN[self._dtype]

    def _note(self, trials: list[Trial]) -> str:
        last = trials[-1]
        if last.cosine < COSINE_MIN[self._dtype]:
            reason = f"with {last.tokens} tokens its vectors differ, cosine {last.cosine:.6f}"
        else:
            times = f"{last.own_s * 1e3:.1f} ms in place of {last.torch_s * 1e3:.1f} ms"
            reason = f"with {last.tokens} tokens it takes {times}"
        if not self._longest:
            return f"{NAME} has no effect: {reason}"
        return f"{NAME} computes single texts of up to {self._longest} tokens; {reason}"

    def _try(self, packed: PackedNetwork, tokens: int) -> Trial:
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, packed.vocabulary, (1, tokens), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        contenders: tuple[Callable[[], Tensor], ...] = (
            lambda: self._run(ids, None),
            lambda: packed.compute_packed(**inputs),
        )
        # The first pass of a length generates code.
        found, expected = (compute() for compute in contenders)
        best = [float("inf")] * len(contenders)
        for _ in range(ROUNDS):
            best = [min(pair) for pair in zip(best, map(_seconds, contenders), strict=True)]
        # A length with spare tokens, which the mask hides.
        inner = ids[:, : tokens - SPARE_TRIED]
        found = torch.cat((found, self._run(inner, None)), dim=1)
        expected = torch.cat((expected, packed.compute_packed(inner, torch.ones_like(inner))), dim=1)
        cosine = cosine_similarity(found.double(), expected.double(), dim=-1).min().item()
        return Trial(tokens, best[0], best[1], cosine)

    def _run(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        tokens = input_ids.shape[1]
        # For the same reason as in PyTorch: code is generated for each length.
        spare = spare_tokens(tokens)
        mask = np.ones((1, tokens + spare), np.int64)
        mask[:, tokens:] = 0
        inputs = [pad(input_ids, (0, spare)).numpy(), mask]
        if self._has_type_ids:
            types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            inputs.append(pad(types, (0, spare)).numpy())
        # The request overwrites its output in the next pass.
        return torch.from_numpy(self._request.infer(inputs)[0][:, :tokens].copy())


class _Traced(nn.Module):
    """Encoder with positional inputs and one output, as OpenVINO reads it."""

    def __init__(self, encoder: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.encoder = encoder
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the last hidden state of the inputs."""
        hidden: Tensor = self.encoder(**dict(zip(self.names, inputs, strict=True))).last_hidden_state
        return hidden.float()


@torch.inference_mode()
def convert(encoder: Any, dtype: torch.dtype) -> OpenVinoPasses | str:
    """Convert an encoder of transformers, before any of its parts is replaced; or return why that fails.

    dtype: of the products in PyTorch.
    """
    parameters: Mapping[str, Any] = inspect.signature(encoder.forward).parameters
    has_type_ids = "token_type_ids" in parameters
    names = ("input_ids", "attention_mask", *(("token_type_ids",) if has_type_ids else ()))
    ids = torch.ones(1, TRACED_TOKENS, dtype=torch.long)
    mask = torch.ones_like(ids)
    # Without padding in the trace, code of transformers could leave out the mask.
    mask[:, -TRACED_PADDING:] = 0
    example = (ids, mask, torch.zeros_like(ids))[: len(names)]
    library = _openvino()
    shapes = [library.PartialShape([1, -1])] * len(names)
    try:
        # Tracing warns of each size that becomes a constant; the trials find out whether one matters.
        with warnings.catch_warnings(), _kept_log():
            warnings.simplefilter("ignore")
            model = library.convert_model(_Traced(encoder, names).eval(), example_input=example, input=shapes)
    except Exception as error:  # noqa: BLE001 - of many types, from two libraries
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return f"{NAME} has no effect: a {type(encoder).__name__} cannot be converted: {reason}"
    return OpenVinoPasses(model, dtype, has_type_ids=has_type_ids)


@contextmanager
def _kept_log() -> Iterator[None]:
    """Restore the root logger, which a conversion sets to errors only, and leaves so if it fails."""
    root = logging.getLogger()
    level, filters, handlers = root.level, root.filters.copy(), root.handlers.copy()
    try:
        yield
    finally:
        root.setLevel(level)
        root.filters[:], root.handlers[:] = filters, handlers


def require_openvino(device: torch.device, dtype: DTypeName | None) -> None:
    """Raise ModelUnavailable, with the reason, if OpenVINO cannot serve a model here.

    dtype: the configured one.
    """
    if device.type != "cpu":
        raise ModelUnavailable(
            f"{NAME} needs `device: cpu`, and the device is {device}; leave one of them out"
        )
    if dtype is not None and getattr(torch, dtype) not in HINTS:
        raise ModelUnavailable(f"{NAME} needs `dtype: float32` or `bfloat16`; leave one of them out")
    try:
        _openvino()
    except ImportError as error:
        raise ModelUnavailable(
            f"{NAME} needs a package: .venv/bin/pip install 'openvino>=2026.2,<2027', or leave it out"
        ) from error


def _openvino() -> Any:
    """Import OpenVINO without its telemetry, which forks this process to send statistics to a vendor."""
    # None blocks the import.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return import_module("openvino")


def _seconds(compute: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    compute()
    return time.perf_counter() - started_s
