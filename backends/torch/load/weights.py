"""Reading of a network's weights, proven: every tensor of the network is in the files, and the reverse."""

from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import transformers

from backends.contract.errors import ModelUnavailable
from backends.recipe.adapter_choice import Adapter
from backends.recipe.files import CheckpointFiles
from backends.recipe.native_forms import native_form
from backends.recipe.options import Runtime
from backends.recipe.recipe import ModelKind, Recipe
from backends.recipe.rerank_template import RerankTemplate
from backends.tokens.tokenizer import TextTokenizer
from backends.torch.load.adapters import merge_adapter
from backends.torch.load.formats import WeightFormats, class_with_formats
from backends.torch.load.weight_names import TensorDifferences, describe_faults
from backends.torch.networks.architectures import AUTO_CLASSES
from backends.torch.networks.native_configs import read_config
from backends.torch.networks.own_network import TrustedCode, read_own_class
from backends.torch.networks.weight_files import network_files, stored_formats
from backends.torch.refusals import refuse_on_error


class NetworkSource(NamedTuple):
    """Checkpoint with its recipe, its tokenizer and the template of the pairs that it scores.

    code: the checkpoint's own, which the operator permits and its network needs. adapter: merged into the
    weights.
    """

    checkpoint: Path
    recipe: Recipe
    tokenizer: TextTokenizer
    template: RerankTemplate
    code: TrustedCode | None = None
    adapter: Adapter | None = None


class Placement(msgspec.Struct, frozen=True):
    """Number format of a network's matrix products, its device, and True if it is compiled.

    runtime: what computes passes of one text.
    """

    dtype: torch.dtype
    device: torch.device
    compiled: bool = False
    runtime: Runtime = "torch"


class LoadedNetwork(NamedTuple):
    """Network with its weights, and the number formats of the files that some of them may still lie in."""

    network: Any
    stored: frozenset[torch.dtype]


# Class of transformers that builds each kind of network.
MODEL_CLASSES: dict[ModelKind, Any] = {
    kind: getattr(transformers, name) for kind, name in AUTO_CLASSES.items()
}
# Classes of networks of which AutoModel builds more, or nothing, by `model_type`: text encoders that are one
# half, and encoders of pages.
ENCODER_CLASSES: dict[str, Any] = {
    "t5": transformers.T5EncoderModel,
    "mt5": transformers.MT5EncoderModel,
    "umt5": transformers.UMT5EncoderModel,
    "colpali": transformers.ColPaliForRetrieval,
    "colqwen2": transformers.ColQwen2ForRetrieval,
}
REMEDY = "fetch its files again; if they are complete, this engine does not have the model"
NUMBER_REMEDY = "fetch its files again; if they are those of a training of yours, the training diverged"


def load_network(source: NetworkSource, placement: Placement) -> LoadedNetwork:
    """Return the network as transformers builds it, on the processor, with all of its weights.

    Raises: ModelUnavailable if the files are damaged, or do not hold exactly the network's tensors.
    """
    transformers.utils.logging.disable_progress_bar()
    # It reports missing tensors in a hundred lines; `refuse_differences` raises a short error.
    transformers.utils.logging.set_verbosity_error()
    with refuse_on_error(f"{source.checkpoint} could not be loaded", REMEDY):
        network_class, config = _class_of(source)
        stored = stored_formats(network_files(source.checkpoint))
        formats = WeightFormats.of(placement.dtype, stored, source.recipe.kind)
        # Code of a checkpoint may use the weights of a layer without its `forward`.
        formatted = class_with_formats(network_class, formats) if source.code is None else network_class
        loaded = _read(source, formatted, config)
    if not isinstance(loaded, tuple):
        raise _refusal(source, "cannot be proven: its own code does not report which weights it lacks")
    network, info = loaded
    network.__class__ = network_class
    refuse_differences(source, network, info)
    _require_finite(source, network)
    if source.adapter is not None:
        merge_adapter(network, source.checkpoint, source.adapter)
    return LoadedNetwork(network.eval(), stored)


def loading_options(checkpoint: Path) -> dict[str, Any]:
    """Return options by which transformers finds a network's tensors under other names."""
    form = native_form(CheckpointFiles(checkpoint).config)
    return {} if form is None else {"key_mapping": dict(form.names)}


def random_network(kind: ModelKind, config: Any) -> Any:
    """Return the network of a configuration of transformers with random weights in float32."""
    builder = _builder(kind, config)
    if builder in ENCODER_CLASSES.values():
        return builder(config)
    return builder.from_config(config, dtype=torch.float32, trust_remote_code=False)


def _builder(kind: ModelKind, config: Any) -> Any:
    stock = MODEL_CLASSES[kind]
    return ENCODER_CLASSES.get(config.model_type, stock) if stock is transformers.AutoModel else stock


def _class_of(source: NetworkSource) -> tuple[Any, Any]:
    """Return the class of the network and its configuration."""
    if source.code is not None:
        return read_own_class(source.checkpoint, source.code)
    config = read_config(source.checkpoint)
    builder = _builder(source.recipe.kind, config)
    if builder in ENCODER_CLASSES.values():
        return builder, config
    with torch.device("meta"):
        return type(builder.from_config(deepcopy(config), trust_remote_code=False)), config


def _read(source: NetworkSource, network_class: Any, config: Any) -> Any:
    return network_class.from_pretrained(
        source.checkpoint,
        config=config,
        # Of all weights that have no format of their own.
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
        **loading_options(source.checkpoint),
        # Another shape is one of the differences that `refuse_differences` reports by name.
        ignore_mismatched_sizes=True,
    )


def refuse_differences(source: NetworkSource, network: Any, info: dict[str, Any]) -> None:
    """Raise if the tensors of the files are not those of the network.

    info: the loading info of transformers. Raises: ModelUnavailable.
    """
    form = native_form(CheckpointFiles(source.checkpoint).config)
    adapters = () if form is None else form.adapters
    unexpected = {name for name in info["unexpected_keys"] if not name.endswith(adapters)}
    info = {**info, "unexpected_keys": unexpected}
    parts = [name for name, _ in network.named_children()]
    differences = TensorDifferences.of(parts, info)
    faults = describe_faults(differences, source.recipe.kind, network.base_model_prefix)
    if faults:
        raise _refusal(source, f"is not a whole {type(network).__name__} ({faults})")


def _require_finite(source: NetworkSource, network: Any) -> None:
    """Raise if a weight is NaN or infinite. It takes a tenth of a second per gigabyte."""
    for name, weight in network.named_parameters():
        # Much faster than `isfinite` of each number, and NaN is passed on.
        if weight.numel() and not all(extreme.isfinite() for extreme in torch.aminmax(weight.detach())):
            fault = f"has a weight that is not a finite number: {name}"
            raise _refusal(source, fault, NUMBER_REMEDY)


def _refusal(source: NetworkSource, fault: str, remedy: str = REMEDY) -> ModelUnavailable:
    return ModelUnavailable(f"{source.checkpoint} {fault}; {remedy}")
