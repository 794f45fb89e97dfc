"""Linear layers with weights of 8 bits and activations quantized per token, for processors.

A weight has one scale per output, and an activation one step and one smallest value per token: the numbers
of a token do not depend on its neighbors, and sums of integers are exact. oneDNN multiplies the integers.
Without VNNI or AMX it adds the products of two neighboring inputs in 16 bits and cuts off larger sums. The
scales of the weights then keep every such sum small enough.
Source of the smoothing: Xiao et al., SmoothQuant (2023), with an exponent of 0.5.

An encoder is quantized one layer at a time. The probe texts run through it twice: the first pass, in float32,
gives the reference and the largest input of each layer; the second is compared with the reference.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from backends.contract import Output, TermWeights, Truncate, Vectors
from backends.contract.errors import ModelUnavailable
from backends.recipe.rerank_template import RerankTemplate
from backends.reference_texts import REFERENCE_TEXTS, min_cosine
from backends.tokens.tokenizer import TextTokenizer
from backends.torch.inputs.pairs import PairEncoder
from backends.torch.inputs.sequences import LOGITS, Head, InputSequence, Row
from backends.torch.networks.attention import compute_without_blocks
from backends.torch.networks.precision import (
    TYPICAL_TOKENS,
    best_dtype,
    dtype_name,
    fastest_linear,
    is_plain_linear,
    replace_linears,
)

# Steps of an activation of 8 bits without a sign.
STEPS = 255
WEIGHT_MAX = 127
# A row's step is at least this share of its largest number: float32 has no more digits.
RELATIVE_STEP_MIN = 1e-6
CPU = torch.device("cpu")
# Instructions that multiply integers of 8 bits without cutting off sums.
EXACT_INSTRUCTIONS = ("amx_int8", "avx512_vnni", "avx_vnni", "avx10_1", "i8mm", "dotprod")
# Shape of the layer whose speed is measured, and the rounds of tries: other work on the processor may slow
# down one round, never all of them.
PROBE_ROWS, PROBE_WIDTH = 256, 1024
PROBE_ROUNDS, PROBE_TRIES = 5, 4


class KernelProbe(NamedTuple):
    """oneDNN's product of integers on this processor.

    saturates: True if sums of two products are cut off at 16 bits. seconds: processor time of a typical
    layer. other_seconds: that of the same layer in `other`, the number format that the engine would choose.
    """

    saturates: bool
    seconds: float
    other: torch.dtype
    other_seconds: float


class Int8Linear(nn.Module):
    """Linear layer with weights of 8 bits; its inputs and outputs are float32.

    peaks: (in,) float32, the largest magnitude of each input in typical texts, None if not known. saturates:
    as in `KernelProbe`.
    """

    def __init__(self, layer: nn.Linear, peaks: Tensor | None, *, saturates: bool) -> None:
        super().__init__()
        self.activation = getattr(layer, "activation", None)
        weight = layer.weight.detach().float()
        smoothing = torch.ones(layer.in_features) if peaks is None else _smoothing(weight, peaks)
        weight = weight / smoothing
        self._smoothing = smoothing
        self._scales = _weight_scales(weight, saturates=saturates)
        integers = (weight / self._scales.unsqueeze(1)).round_().to(torch.int8)
        self._sums = integers.sum(dim=1, dtype=torch.int32).float() * self._scales
        # Code of transformers asks a layer's weight for its number format.
        self.weight = _prepack(integers)
        self._zeros = torch.zeros(layer.out_features, dtype=torch.long)
        self._bias = (
            torch.zeros(layer.out_features)
            if layer.bias is None
            else layer.bias.detach().to(torch.float32, copy=True)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute (..., out) float32 of (..., in) of any float dtype."""
        rows = inputs.reshape(-1, inputs.shape[-1]) * self._smoothing
        # `torch.aminmax` of rows takes ten times as long as these two.
        low, high = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
        step_min = torch.maximum(high, -low).mul_(RELATIVE_STEP_MIN).clamp_(min=1e-30)
        step = torch.maximum((high - low).div_(STEPS), step_min)
        # Conversion cuts off digits, which rounds a number that is half a step larger.
        integers = (rows.sub_(low).mul_(step.reciprocal()).add_(0.5)).to(torch.uint8)
        products = _multiply(integers, self.weight, self._scales, self._zeros)
        out = torch.addcmul(self._bias, products, step).addcmul_(low, self._sums)
        out = out.view(*inputs.shape[:-1], out.shape[-1])
        return out if self.activation is None else self.activation(out)


def require_int8(device: torch.device, *, compiled: bool) -> None:
    """Raise if a model cannot gain from 8 bits here.

    Raises: ModelUnavailable with the reason.
    """
    if device.type != "cpu":
        raise ModelUnavailable(
            f"`dtype: int8` needs `device: cpu`, and the device is {device}; leave one of them out"
        )
    if compiled:
        raise ModelUnavailable("`compile` does not serve models with `dtype: int8`; leave one of them out")
    refusal = refuse_slow(probe_kernel())
    if refusal is not None:
        raise ModelUnavailable(refusal)


def refuse_slow(probe: KernelProbe) -> str | None:
    """Return why 8 bits are no gain on this processor, None if they are."""
    if probe.seconds < probe.other_seconds:
        return None
    times = f"{probe.seconds * 1e3:.1f} ms against {probe.other_seconds * 1e3:.1f} ms a layer"
    name = dtype_name(probe.other)
    return (
        f"`dtype: int8` is not faster than {name} on this processor ({times}; {_instructions()}); "
        f"leave `dtype` out, or set `dtype: {name}`"
    )


@cache
def probe_kernel() -> KernelProbe:
    """Measure the product of integers once per process. Raises: ModelUnavailable if it is absent or wrong."""
    try:
        saturates = not _is_exact(_wide_weights())
        if saturates and not _is_exact(_limited_weights()):
            raise ModelUnavailable(
                f"`dtype: int8` needs exact products of integers, which this processor with PyTorch "
                f"{torch.__version__} does not give ({_instructions()}); leave `dtype` out"
            )
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        raise ModelUnavailable(
            f"`dtype: int8` needs oneDNN's products of integers, and PyTorch {torch.__version__} has none "
            f"for this processor ({_instructions()}); leave `dtype` out"
        ) from error
    threads_before = torch.get_num_threads()
    # Processor time of one thread hardly depends on other work.
    torch.set_num_threads(1)
    try:
        return _measure(saturates=saturates)
    finally:
        torch.set_num_threads(threads_before)


def gain(probe: KernelProbe) -> str:
    """Return the speed of a layer in words."""
    times = probe.other_seconds / probe.seconds
    return f"{times:.1f} times as fast as {dtype_name(probe.other)} in a typical layer ({_instructions()})"


def _instructions() -> str:
    has = torch.cpu.get_capabilities()
    found = [name for name in EXACT_INSTRUCTIONS if has.get(name)]
    return "it has " + ", ".join(found) if found else "it has neither VNNI nor AMX"


def _smoothing(weight: Tensor, peaks: Tensor) -> Tensor:
    """Return factors (in,) that move differences between inputs into the weights."""
    floor = 1e-5
    factors = (weight.abs().amax(dim=0).clamp_(min=floor) / peaks.clamp(min=floor)).sqrt_()
    return factors / factors.median()


def _weight_scales(weight: Tensor, *, saturates: bool) -> Tensor:
    """Return the scale of each output (out,), so that no sum of two products is cut off.

    255 times the sum of two weights must stay below 2^15. Activations have no sign, so only weights of equal
    signs add up. Rounding adds at most 1 to a sum of 127.
    """
    largest = weight.abs().amax(dim=1)
    if saturates:
        pairs = pad(weight, (0, weight.shape[1] % 2)).unflatten(1, (-1, 2)).sum(dim=2)
        largest = torch.maximum(largest, pairs.abs_().amax(dim=1))
    return largest.div_(WEIGHT_MAX).clamp_(min=1e-30)


def _prepack(integers: Tensor) -> Tensor:
    """Return weights (out, in) in the order in which oneDNN reads them."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(integers, [TYPICAL_TOKENS, integers.shape[1]])
    return packed


def _multiply(integers: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return scaled products (rows, out) float32 of activations (rows, in) uint8 and prepacked weights."""
    products: Tensor = torch.ops.onednn.qlinear_pointwise(
        integers, 1.0, 0, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return products


def _wide_weights() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-WEIGHT_MAX, WEIGHT_MAX + 1, (64, 128), generator=generator).to(torch.int8)


def _limited_weights() -> Tensor:
    """Return weights at the bound of a sum of two; sums of other neighbors would be cut off."""
    quads = torch.tensor([[1, 127, 127, 1], [64, 64, 127, -127], [-127, -1, -64, -64], [-1, -127, -127, -1]])
    return quads.repeat(16, 32).to(torch.int8)


def _is_exact(weight: Tensor) -> bool:
    """Return True if products with the largest and with other activations have no error."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, STEPS + 1, (48, weight.shape[1]), generator=generator)
    rows[:8] = STEPS
    scales, zeros = torch.ones(len(weight)), torch.zeros(len(weight), dtype=torch.long)
    packed, expected = _prepack(weight), rows.double() @ weight.double().T
    # Few rows may take another kernel. Below 2^24 float32 holds every integer.
    return all(
        torch.equal(_multiply(part.to(torch.uint8), packed, scales, zeros).double(), expected[: len(part)])
        for part in (rows, rows[:1])
    )


@torch.inference_mode()
def _measure(*, saturates: bool) -> KernelProbe:
    """Measure a typical layer in both number formats, until 8 bits are faster or the rounds are over."""
    other = best_dtype(CPU)
    layer = nn.Linear(PROBE_WIDTH, PROBE_WIDTH)
    quantized = Int8Linear(layer, None, saturates=saturates)
    rows = torch.randn(PROBE_ROWS, PROBE_WIDTH)
    contenders: tuple[Callable[[Tensor], Tensor], ...] = (quantized, fastest_linear(CPU, other)(layer, other))
    best = [float("inf")] * len(contenders)
    for _ in range(PROBE_ROUNDS):
        for _ in range(PROBE_TRIES):
            best = [min(pair) for pair in zip(best, _times(contenders, rows), strict=True)]
        if best[0] < best[1]:
            break
    return KernelProbe(saturates, best[0], other, best[1])


def _times(contenders: tuple[Callable[[Tensor], Tensor], ...], rows: Tensor) -> Iterator[float]:
    for compute in contenders:
        started_s = time.thread_time()
        compute(rows)
        yield time.thread_time() - started_s


# Least cosine of the probe texts' outputs to those in float32.
MIN_COSINE = 0.995


class ProbeTexts(NamedTuple):
    """Sequences of the probe texts and the outputs that are compared."""

    sequences: Sequence[InputSequence]
    outputs: frozenset[Output]

    @classmethod
    def of(
        cls, tokenizer: TextTokenizer, template: RerankTemplate, outputs: frozenset[Output]
    ) -> "ProbeTexts":
        """Tokenize the probe texts, as pairs if the model gives logits. outputs: those of the model."""
        if outputs:
            encoded = tokenizer.encode(REFERENCE_TEXTS, Truncate.RIGHT)
        else:
            pairs = [(query, document) for query in REFERENCE_TEXTS[1:3] for document in REFERENCE_TEXTS]
            encoded = PairEncoder(tokenizer, template).encode(pairs, Truncate.RIGHT)
        rows = zip(encoded.ids, encoded.type_ids, strict=True)
        # Token vectors are compared where they are all that the model gives.
        compared = (outputs - {Output.TOKENS}) or outputs or LOGITS
        return cls([InputSequence(ids, type_ids) for ids, type_ids in rows], compared)


def quantize(encoder: Any, head: Head, probe: ProbeTexts) -> float:
    """Replace the linear layers of an encoder; return the least cosine of the outputs to float32.

    head: runs the encoder. Raises: ModelUnavailable if the cosine is below MIN_COSINE.
    """
    kernel = probe_kernel()
    with _recorded_peaks(encoder) as peaks:
        expected = head.run(probe.sequences, probe.outputs)
    with _without_pooler(encoder):
        replace_linears(
            encoder, lambda layer, _: Int8Linear(layer, peaks.pop(layer, None), saturates=kernel.saturates)
        )
    compute_without_blocks(encoder)
    computed = head.run(probe.sequences, probe.outputs)
    cosine = _least_cosine(expected, computed, probe.outputs)
    # Written so that it also rejects NaN.
    if not cosine >= MIN_COSINE:
        raise ModelUnavailable(
            f"`dtype: int8` changes the model too much: the cosine to float32 on the probe texts is "
            f"{cosine:.4f}, and {MIN_COSINE} is needed; leave `dtype` out"
        )
    return cosine


@contextmanager
def _recorded_peaks(encoder: nn.Module) -> Iterator[dict[nn.Module, Tensor]]:
    """Record the largest magnitude of each input (in,) of each linear layer."""
    peaks: dict[nn.Module, Tensor] = {}

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found = inputs[0].detach().float().flatten(0, -2).abs().amax(dim=0)
        known = peaks.get(layer)
        peaks[layer] = found if known is None else torch.maximum(known, found)

    layers = [module for module in encoder.modules() if is_plain_linear(module)]
    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    # A reference to a layer would keep its weights in memory when it is replaced.
    del layers
    try:
        yield peaks
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _without_pooler(encoder: Any) -> Iterator[None]:
    """Keep a pooler, which works on few vectors as a head does, out of the layers to replace."""
    pooler = getattr(encoder, "pooler", None)
    if not isinstance(pooler, nn.Module):
        yield
        return
    encoder.pooler = None
    try:
        yield
    finally:
        encoder.pooler = pooler


def _least_cosine(expected: Sequence[Row], computed: Sequence[Row], outputs: frozenset[Output]) -> float:
    """Return the least cosine of all outputs; logits of all texts count as one vector."""
    pairs = list(zip(expected, computed, strict=True))
    cosines = []
    for output in outputs:
        vectors = [tuple(VECTORS[output](row) for row in pair) for pair in pairs]
        if outputs == LOGITS and vectors[0][0].size < LOGITS_MAX:
            vectors = [tuple(np.concatenate(side) for side in zip(*vectors, strict=True))]
        cosines += [min_cosine(*_same_length(*pair)) for pair in vectors]
    return min(cosines)


def _same_length(first: Vectors, second: Vectors) -> tuple[Vectors, Vectors]:
    """Return two vectors as rows (1, n), the shorter one filled up with zeros."""
    length = max(first.size, second.size)
    return (
        np.pad(first, (0, length - first.size)).reshape(1, -1),
        np.pad(second, (0, length - second.size)).reshape(1, -1),
    )


def _weights_by_term(row: Row) -> Vectors:
    terms: TermWeights | None = row.terms
    assert terms is not None
    weights = np.zeros(int(terms.indices.max(initial=0)) + 1, dtype=np.float32)
    weights[terms.indices] = terms.values
    return weights


def _flat(vectors: Vectors | None) -> Vectors:
    assert vectors is not None
    return vectors.reshape(-1)


# Fewer numbers than this are no vector but the logits of a text.
LOGITS_MAX = 16
VECTORS: dict[Output, Callable[[Row], Vectors]] = {
    Output.DENSE: lambda row: _flat(row.dense),
    Output.SPARSE: _weights_by_term,
    Output.MULTIVECTOR: lambda row: _flat(row.multivector),
    Output.TOKENS: lambda row: _flat(row.token_vectors),
}
