"""Networks of a checkpoint's architecture without its weights, to find how a load would end.

What the engine does with a network is a question of the architecture: random weights in a few layers will do.
The names and shapes of the tensors stand in the headers of the files.
"""

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
import transformers

from backends.checkpoints.locations import missing_files
from backends.contract.errors import ModelUnavailable
from backends.recipe.recipe import Recipe
from backends.torch.inputs.pairs import answer_ids
from backends.torch.networks.heads import run_first_passes
from backends.torch.networks.opening import NetworkSource, OpenedNetwork, Placement
from backends.torch.networks.weight_files import StoredTensor
from backends.torch.refusals import refuse_on_error
from backends.torch.stock.architectures import read_config
from backends.torch.stock.construction import OPENERS, open_model
from backends.torch.stock.weights import (
    REMEDY,
    loading_options,
    random_network,
    refuse_differences,
)

logger = logging.getLogger(__name__)

# Keys of sizes that do not change how an architecture attends, and a small size for them.
SMALL_SIZES = {"intermediate_size": 64, "hidden_dim": 64, "d_ff": 64, "num_labels": 2}
VOCABULARY = 1024
LAYER_KEYS = ("num_hidden_layers", "n_layers", "num_layers")
LAYERS_MIN = 2
# Elements of the largest network that is built with all of its layers: 800 MB.
WHOLE_ELEMENTS_MAX = 200_000_000
PLACEMENT = Placement(torch.float32, torch.device("cpu"))


def try_network(source: NetworkSource) -> bool | None:
    """Open and run a network with random weights as a load does; return True if it is packed.

    It has two layers, or as many as it takes to have each type of layer. If that fails, all layers. None if
    only a load can tell. Raises: ModelUnavailable if a load would fail.
    """
    if source.recipe.kind in {"dual", "pages"}:
        # Its names and shapes were compared, and nothing of it is packed.
        return False
    config = read_config(source.checkpoint)
    source = _without_missing_modules(source)
    vocabulary = _needed_vocabulary(source, config)
    try:
        return _run(OPENERS[source.recipe.kind], source, _with_few_layers(config, vocabulary))
    except ModelUnavailable:
        raise
    except Exception as error:  # noqa: BLE001 - anything that a foreign configuration can break
        logger.info("no small network of %s: %s: %s", source.checkpoint, type(error).__name__, error)
    whole = _with_vocabulary(deepcopy(config), vocabulary)
    with torch.device("meta"):
        elements = sum(weight.numel() for weight in random_network(source.recipe.kind, whole).parameters())
    if elements > WHOLE_ELEMENTS_MAX:
        return None
    with refuse_on_error(f"the first passes through {source.checkpoint} failed"):
        return _run(open_model, source, whole)


def _run(opener: Any, source: NetworkSource, config: Any) -> bool:
    recipe = source.recipe
    # The same weights give the same answer.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = random_network(recipe.kind, config).eval()
        _spread(network)
    opened: OpenedNetwork = opener(network, source, PLACEMENT)
    passes = run_first_passes(
        opened.head, source.tokenizer, recipe.max_tokens, opened.outputs, int(config.vocab_size)
    )
    for _ in passes:
        pass
    return opened.packed


@torch.no_grad()
def _spread(network: torch.nn.Module) -> None:
    """Give each layer weights that change its input: with the usual ones a wrong layer goes unnoticed."""
    for weight in network.parameters():
        if weight.dim() > 1:
            weight.normal_(std=weight.shape[-1] ** -0.5)


def _without_missing_modules(source: NetworkSource) -> NetworkSource:
    """Leave out the modules behind and before pooling if their weights are not on this machine."""
    if not missing_files(source.checkpoint, with_code=False):
        return source
    recipe = source.recipe
    if recipe.kind in {"dense", "multivector"}:
        recipe = Recipe("dense", recipe.model_type, recipe.max_tokens, recipe.pooling)
    return source._replace(recipe=recipe)


def _needed_vocabulary(source: NetworkSource, config: Any) -> int:
    """Return the least number of token ids with which the network has all that its readers read."""
    if source.recipe.tables:
        return int(config.vocab_size)
    if source.recipe.kind != "language":
        return VOCABULARY
    answers = answer_ids(source.tokenizer, source.template)
    return max([VOCABULARY, *(id_ + 1 for id_ in answers if id_ is not None)])


def _with_few_layers(config: Any, vocabulary: int) -> Any:
    """Return a copy of the configuration with few layers and small tables."""
    config = _with_vocabulary(deepcopy(config), vocabulary)
    types = list(getattr(config, "layer_types", None) or ())
    layers = max([LAYERS_MIN, *(types.index(kind) + 1 for kind in set(types))])
    for key in LAYER_KEYS:
        count = getattr(config, key, None)
        if isinstance(count, int) and count > layers:
            setattr(config, key, layers)
            _cut_lists(config, count, layers)
    for key, size in SMALL_SIZES.items():
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, min(size, getattr(config, key)))
    return config


def _cut_lists(config: Any, count: int, layers: int) -> None:
    """Cut the lists with a value for each layer."""
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(config, key, value[:layers])


def _with_vocabulary(config: Any, vocabulary: int) -> Any:
    config.vocab_size = min(vocabulary, config.vocab_size)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value >= config.vocab_size:
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
