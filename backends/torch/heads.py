"""A loaded network and what is read off its end: a pooled vector, or one logit.

Knows tensors; knows nothing of queues, callers or text.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from backends.contract import Vectors
from backends.torch.checkpoint import PoolingMode
from backends.torch.pooling import pool


class Head(Protocol):
    """Token ids in, one float32 row out for each sequence."""

    def run(self, ids: Sequence[list[int]], type_ids: Sequence[list[int]], skip: Sequence[int]) -> Vectors:
        """ids, type_ids: one list a sequence. skip: leading prompt tokens that pooling leaves out.

        Returns (n_sequences, width) float32 on the CPU: the pooled vector, or one logit.
        """


class Rectangle:
    """A batch in the shape that transformers models take."""

    def __init__(self, device: torch.device, pad_id: int, *, has_type_ids: bool) -> None:
        self._device = device
        self._pad_id = pad_id
        self._has_type_ids = has_type_ids

    def inputs(self, ids: Sequence[list[int]], type_ids: Sequence[list[int]]) -> dict[str, Tensor]:
        """(batch, longest) int64 tensors on the model's device, padded on the right."""
        tensors = {
            "input_ids": self._rectangle(ids, self._pad_id),
            "attention_mask": self._rectangle([[1] * len(one) for one in ids], 0),
        }
        if self._has_type_ids:
            tensors["token_type_ids"] = self._rectangle(type_ids, 0)
        return tensors

    def _rectangle(self, rows: Sequence[list[int]], fill: int) -> Tensor:
        longest = max(len(row) for row in rows)
        padded = [row + [fill] * (longest - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.long, device=self._device)


class Embedder:
    """An encoder whose token vectors are pooled, and whatever sentence-transformers puts after that."""

    def __init__(
        self, encoder: nn.Module, batch: Rectangle, modes: tuple[PoolingMode, ...], after: nn.Module
    ) -> None:
        self._encoder = encoder
        self._batch = batch
        self._modes = modes
        self._after = after

    @torch.inference_mode()
    def run(self, ids: Sequence[list[int]], type_ids: Sequence[list[int]], skip: Sequence[int]) -> Vectors:
        """(n_sequences, dim) float32, not normalized."""
        inputs = self._batch.inputs(ids, type_ids)
        hidden = self._encoder(**inputs).last_hidden_state
        mask = inputs["attention_mask"].clone()
        for row, tokens in enumerate(skip):
            mask[row, :tokens] = 0
        vectors: Vectors = self._after(pool(hidden, mask, self._modes)).cpu().numpy()
        return vectors


class CrossEncoder:
    """A sequence classifier with one label: query and document in, one logit out."""

    def __init__(self, classifier: nn.Module, batch: Rectangle) -> None:
        self._classifier = classifier
        self._batch = batch

    @torch.inference_mode()
    def run(self, ids: Sequence[list[int]], type_ids: Sequence[list[int]], skip: Sequence[int]) -> Vectors:
        """(n_sequences, 1) float32 logits; skip has no meaning for pairs."""
        del skip
        inputs = self._batch.inputs(ids, type_ids)
        logits: Vectors = self._classifier(**inputs).logits.float().cpu().numpy()
        return logits
