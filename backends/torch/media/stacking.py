"""Tensors of the features of several pictures or recordings."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from backends.torch.inputs.sequences import InputSequence


def stack_features(sequences: Sequence[InputSequence], device: torch.device) -> dict[str, Tensor]:
    """Return the features of sequences by name, empty for texts; all have features, or none has."""
    features = [sequence.features for sequence in sequences if sequence.features is not None]
    names = features[0].arrays if features else ()
    stacked = {name: np.concatenate([found.arrays[name] for found in features]) for name in names}
    return {name: torch.from_numpy(array).to(device) for name, array in stacked.items()}
