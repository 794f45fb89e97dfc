"""Networks of a checkpoint's architecture without its weights, to find how a load would end.

Padding is a question of the architecture: `pack` compares two computations of the same weights, and random
ones will do. The names and shapes of the tensors stand in the headers of the files.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from backends.torch.checkpoint import OFFSET_POSITIONS
from backends.torch.native_configs import read_config
from backends.torch.packing import pack
from backends.torch.refusals import refuse_on_error
from backends.torch.weight_files import StoredTensor
from backends.torch.weights import (
    REMEDY,
    NetworkSource,
    loading_options,
    random_network,
    refuse_differences,
)

logger = logging.getLogger(__name__)

# Keys of sizes that do not change how an architecture attends, and a small size for them.
SMALL_SIZES = {"vocab_size": 1024, "intermediate_size": 64, "hidden_dim": 64, "d_ff": 64, "num_labels": 2}
LAYER_KEYS = ("num_hidden_layers", "n_layers", "num_layers")
LAYERS_MIN = 2


def computes_without_padding(checkpoint: Path) -> bool | None:
    """Return True if the engine packs this architecture, None if only a load can tell.

    Builds two of its layers, or as many as it takes to have each type of layer, with random weights.
    """
    try:
        config = _small(read_config(checkpoint))
        encoder = random_network("dense", config).eval()
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = None
        first = (config.pad_token_id or 0) + 1 if config.model_type in OFFSET_POSITIONS else 0
        return pack(encoder, first) is not None
    except Exception as error:  # noqa: BLE001 - anything that a foreign configuration can break
        logger.info("no small network of %s: %s: %s", checkpoint, type(error).__name__, error)
        return None


def _small(config: Any) -> Any:
    """Return the configuration with few layers and small tables."""
    types = list(getattr(config, "layer_types", None) or ())
    layers = max([LAYERS_MIN, *(types.index(kind) + 1 for kind in set(types))])
    for key in LAYER_KEYS:
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, min(layers, getattr(config, key)))
    if types:
        config.layer_types = types[:layers]
    for key, size in SMALL_SIZES.items():
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, min(size, getattr(config, key)))
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value >= SMALL_SIZES["vocab_size"]:
            setattr(config, key, 0)
    return config


def refuse_unloadable(source: NetworkSource, tensors: Mapping[str, StoredTensor] | None) -> None:
    """Raise if transformers does not have the network, or if the files do not hold exactly its tensors.

    tensors: those of the network's files, None if they are not known. Raises: ModelUnavailable.
    """
    transformers.utils.logging.set_verbosity_error()
    with refuse_on_error(f"{source.checkpoint} could not be loaded", REMEDY):
        config = read_config(source.checkpoint)
        with torch.device("meta"):
            network = random_network(source.recipe.kind, config)
        if tensors is None:
            return
        # One number that stands for all of a tensor takes no memory.
        state = {name: torch.zeros(()).expand(tensor.shape) for name, tensor in tensors.items()}
        options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        options |= loading_options(source.checkpoint)
        network, info = type(network).from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, **options
        )
    refuse_differences(source, network, info)
