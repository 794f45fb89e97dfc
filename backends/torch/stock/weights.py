"""Networks of transformers, and those defined by a checkpoint's own code: their classes and weights, proven.

Every tensor of a network is in the files, and the reverse. Own code runs with padding, one pass at a time;
it is proven to give the same with and without it. Its files are read from a folder; nothing is fetched.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_outputs import ModelOutput

from backends.contract.errors import ModelUnavailable
from backends.recipe.files import CheckpointFiles
from backends.recipe.native_forms import native_form
from backends.recipe.recipe import ModelKind
from backends.torch.networks.formats import WeightFormats, class_with_formats
from backends.torch.networks.opening import NetworkSource, Placement, TrustedCode
from backends.torch.networks.weight_files import (
    TensorDifferences,
    describe_faults,
    first_infinite,
    network_files,
    stored_formats,
)
from backends.torch.refusals import refuse_on_error
from backends.torch.stock.adapters import merge_adapter
from backends.torch.stock.architectures import AUTO_CLASSES, read_config
from backends.torch.stock.rows import PROBE_TOLERANCE, difference_of_shorter, run_padded_and_alone

OutputField: TypeAlias = Literal["last_hidden_state", "logits"]
# Switches of published code that select another implementation of the same network. gte's needs xformers for
# these two, which exists for CUDA only.
PORTABLE_VALUES: dict[str, dict[str, Any]] = {
    "new": {"use_memory_efficient_attention": False, "unpad_inputs": False},
}
# Lengths of the probe's sequences, the longest of which has no padding.
PROBE_LENGTHS = (11, 4)


class OwnNetwork(nn.Module):
    """Network of a checkpoint's own code that returns its output under transformers' name.

    own: the code's model. field: the output that is read. Outputs may also be a dict or a tuple, in which it
    is the first value.
    """

    def __init__(self, own: Any, field: OutputField) -> None:
        super().__init__()
        self.own = own
        self.config: Any = own.config
        self.field = field
        if not hasattr(self.config, "pad_token_id"):
            self.config.pad_token_id = None

    def forward(self, **inputs: Tensor) -> ModelOutput:
        """Run the code on (rows, longest) tensors. Raises: ModelUnavailable if the output is missing."""
        output = self.own(**inputs)
        value = self._read(output)
        if not isinstance(value, Tensor):
            kind = type(output).__name__
            raise ModelUnavailable(f"`{type(self.own).__name__}` returns no `{self.field}` but {kind}")
        return ModelOutput({self.field: value})

    def _read(self, output: Any) -> Any:
        if isinstance(output, Mapping):
            return output.get(self.field)
        if isinstance(output, tuple | list):
            return output[0] if output else None
        return getattr(output, self.field, None)


def read_own_class(checkpoint: Path, trusted: TrustedCode) -> tuple[Any, Any]:
    """Run a checkpoint's code; return its class of the network and its configuration.

    Raises: whatever the code raises.
    """
    config = _open_config(checkpoint, trusted)
    for key, value in PORTABLE_VALUES.get(str(config.model_type), {}).items():
        setattr(config, key, value)
    network_class: Any = get_class_from_dynamic_module(
        trusted.code.model.local_name, trusted.folder, local_files_only=True
    )
    return network_class, config


def prove_own_network(network: OwnNetwork) -> None:
    """Run the code once. Raises: ModelUnavailable if it fails, or padding changes its output."""
    with refuse_on_error(f"the checkpoint's own code, `{type(network.own).__name__}`, failed"):
        _require_padding_invariance(network)


def _open_config(checkpoint: Path, trusted: TrustedCode) -> Any:
    reference = trusted.code.config
    if reference is None:
        return AutoConfig.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    config_class: Any = get_class_from_dynamic_module(
        reference.local_name, trusted.folder, local_files_only=True
    )
    return config_class.from_pretrained(checkpoint, local_files_only=True)


def _require_padding_invariance(network: OwnNetwork) -> None:
    """Compare a sequence in a padded batch with the same sequence alone. Raises: ModelUnavailable."""
    longest, short = PROBE_LENGTHS
    together, alone = run_padded_and_alone(network, longest, short)
    name = type(network.own).__name__
    of_tokens = network.field == "last_hidden_state"
    if together.shape[:-1] != ((2, longest) if of_tokens else (2,)):
        shape = tuple(together.shape)
        raise ModelUnavailable(f"`{name}` returns `{network.field}` {shape} for 2 texts of {longest} tokens")
    difference = difference_of_shorter(together, alone)
    # Written so that it also rejects NaN.
    if not difference < PROBE_TOLERANCE:
        raise ModelUnavailable(f"`{name}` gives a text other values next to a longer one ({difference:.1e})")


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
    infinite = first_infinite(network)
    if infinite is not None:
        raise _refusal(source, f"has a weight that is not a finite number: {infinite}", NUMBER_REMEDY)
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


def _refusal(source: NetworkSource, fault: str, remedy: str = REMEDY) -> ModelUnavailable:
    return ModelUnavailable(f"{source.checkpoint} {fault}; {remedy}")
