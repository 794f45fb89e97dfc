"""Networks defined by a checkpoint's own code: classes, output, and proof that padding changes nothing.

The code runs with padding, one pass at a time. Its files are read from a folder; nothing is fetched here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor, nn
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_outputs import ModelOutput

from backends.contract.errors import ModelUnavailable
from backends.torch.networks.own_code import OwnCode
from backends.torch.networks.rows import PROBE_TOLERANCE, difference_of_shorter, run_padded_and_alone
from backends.torch.refusals import refuse_on_error

OutputField: TypeAlias = Literal["last_hidden_state", "logits"]
# Switches of published code that select another implementation of the same network. gte's needs xformers for
# these two, which exists for CUDA only.
PORTABLE_VALUES: dict[str, dict[str, Any]] = {
    "new": {"use_memory_efficient_attention": False, "unpad_inputs": False},
}
# Lengths of the probe's sequences, the longest of which has no padding.
PROBE_LENGTHS = (11, 4)


class TrustedCode(NamedTuple):
    """Code that the operator permits, and the folder with its files."""

    code: OwnCode
    folder: Path


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
