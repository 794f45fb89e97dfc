"""Networks of texts and other media: dual encoders with vectors of one space, and encoders of pages."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from backends.contract import Output
from backends.torch.inputs.sequences import InputSequence, Row
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
        return _stacked(sequences, self._device) or self._inputs.build(sequences)


class PageHead:
    """Head of a network of pages. Sequences of one shape are computed together, without padding."""

    def __init__(self, network: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._network: nn.Module = Autocast(network, dtype)
        self._device = device

    @torch.inference_mode()
    def run(self, sequences: Sequence[InputSequence], outputs: frozenset[Output]) -> list[Row]:
        """Compute rows with (tokens, dim) vectors of length 1."""
        del outputs
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for place, sequence in enumerate(sequences):
            groups[_shape(sequence)].append(place)
        rows: list[Row] = [Row()] * len(sequences)
        for places in groups.values():
            inputs = self._tensors([sequences[place] for place in places])
            vectors = self._network(**inputs).embeddings.float()
            scaled = nn.functional.normalize(vectors, dim=-1).cpu().numpy()
            for place, row in zip(places, scaled, strict=True):
                rows[place] = Row(multivector=row)
        return rows

    def _tensors(self, sequences: Sequence[InputSequence]) -> dict[str, Tensor]:
        """Return the inputs of sequences of one shape."""
        stacked = _stacked(sequences, self._device)
        if stacked:
            return stacked
        ids = torch.tensor([sequence.ids for sequence in sequences], device=self._device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _shape(sequence: InputSequence) -> tuple[Any, ...]:
    """Return the shape of a sequence's inputs; pages of one grid only share it."""
    if sequence.features is None:
        return ("text", len(sequence.ids))
    arrays = sequence.features.arrays
    grid = arrays.get("image_grid_thw")
    shapes = tuple(array.shape for array in arrays.values())
    return ("page", shapes, None if grid is None else tuple(grid.ravel().tolist()))


def _stacked(sequences: Sequence[InputSequence], device: torch.device) -> dict[str, Tensor]:
    """Return the features of sequences by name, empty for texts; all have features, or none has."""
    features = [sequence.features for sequence in sequences if sequence.features is not None]
    names = features[0].arrays if features else ()
    stacked = {name: np.concatenate([found.arrays[name] for found in features]) for name in names}
    return {name: torch.from_numpy(array).to(device) for name, array in stacked.items()}
