"""Dual encoders of transformers: passes over texts, pictures or recordings, with vectors of one space."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from backends.contract import Output
from backends.torch.inputs.sequences import InputSequence, Row
from backends.torch.media.stacking import stack_features
from backends.torch.networks.heads import InputBuilder
from backends.torch.networks.precision import Autocast

# Method of transformers by the first of a network's inputs that it reads.
METHODS = {
    "input_ids": "get_text_features",
    "pixel_values": "get_image_features",
    "input_features": "get_audio_features",
}


class Towers(nn.Module):
    """Network whose method depends on its inputs."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network: Any = network

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return (rows, dim) vectors of texts, or of pictures or recordings."""
        method = next(method for name, method in METHODS.items() if name in inputs)
        found = getattr(self.network, method)(**inputs)
        return found if isinstance(found, Tensor) else found.pooler_output


class DualHead:
    """Head of a dual encoder. inputs: builds the tensors of texts."""

    def __init__(self, network: Any, inputs: InputBuilder, device: torch.device, dtype: torch.dtype) -> None:
        self._towers = Autocast(Towers(network), dtype)
        self._inputs = inputs
        self._device = device

    @torch.inference_mode()
    def run(self, sequences: Sequence[InputSequence], outputs: frozenset[Output]) -> list[Row]:
        """Compute rows with a (dim,) dense vector."""
        del outputs
        rows: list[Row] = [Row()] * len(sequences)
        for is_text in (True, False):
            places = [i for i, sequence in enumerate(sequences) if (sequence.features is None) is is_text]
            if places:
                inputs = self._tensors([sequences[i] for i in places])
                vectors = self._towers(**inputs).float().cpu().numpy()
                for place, vector in zip(places, vectors, strict=True):
                    rows[place] = Row(vector)
        return rows

    def _tensors(self, sequences: Sequence[InputSequence]) -> dict[str, Tensor]:
        """Return the inputs of sequences that are all texts, or none of which is."""
        return stack_features(sequences, self._device) or self._inputs.build(sequences)
