"""Quantization of a loaded encoder to 8 bits, one layer at a time, and the proof of its fidelity.

The probe texts run through the encoder twice. The first pass, in float32, gives the reference and the largest
input of each layer; the second is compared with the reference.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from backends.contract import Output, TermWeights, Truncate, Vectors
from backends.contract.errors import ModelUnavailable
from backends.recipe.rerank_template import RerankTemplate
from backends.reference_texts import REFERENCE_TEXTS, min_cosine
from backends.tokens.tokenizer import TextTokenizer
from backends.torch.inputs.pairs import PairEncoder
from backends.torch.inputs.sequences import LOGITS, Head, InputSequence, Row
from backends.torch.networks.blocks import compute_without_blocks
from backends.torch.networks.int8 import Int8Linear, probe_kernel
from backends.torch.networks.precision import is_plain_linear, replace_linears

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
