"""What checkpoints do to a pooled vector, or to each token's, before anyone sees it.

(rows, dim) float32 → (rows, out) float32. Source: sentence-transformers 6, `Dense` and `Normalize`; the
weights that ColBERT and BGE-M3 keep outside of it. Rule: of a file of weights nothing is ever run.
"""

from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from backends.errors import ModelUnavailable
from backends.torch.checkpoint import Projection

# As sentence-transformers writes their full names; only torch's own are ever made from a file's word.
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "torch.nn.modules.linear.Identity": nn.Identity,
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.GELU": nn.GELU,
    "torch.nn.modules.activation.SiLU": nn.SiLU,
    "torch.nn.modules.activation.Sigmoid": nn.Sigmoid,
}


class DenseConfig(msgspec.Struct, frozen=True):
    """The module's config.json."""

    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    use_residual: bool = False
    module_input_name: str = "sentence_embedding"


class Dense(nn.Module):
    """A linear layer and an activation, with a way around both where the config asks for it."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.in_features, config.out_features, bias=config.bias)
        self.activation_function = ACTIVATIONS[config.activation_function]()
        self.residual: nn.Module | None = None
        if config.use_residual:
            same = config.in_features == config.out_features
            self.residual = (
                nn.Identity() if same else nn.Linear(config.in_features, config.out_features, bias=False)
            )

    def forward(self, vectors: Tensor) -> Tensor:
        """(batch, in) → (batch, out)."""
        out: Tensor = self.activation_function(self.linear(vectors))
        return out if self.residual is None else out + self.residual(vectors)


class Normalize(nn.Module):
    """Scales each row to length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        """(batch, dim) → (batch, dim)."""
        return nn.functional.normalize(vectors, dim=-1)


def read_projections(
    checkpoint: Path, projections: Sequence[Projection], *, of_tokens: bool = False
) -> nn.Module:
    """The modules with their weights, in order. of_tokens: whether they are for each token's vector.

    Raises: ModelUnavailable.
    """
    return nn.Sequential(
        *(
            _dense(checkpoint / one.folder, of_tokens=of_tokens) if one.kind == "Dense" else Normalize()
            for one in projections
        )
    ).eval()


def read_linear(path: Path) -> nn.Linear:
    """One linear layer in a file of its own, as torch saves a state dict. Raises: ModelUnavailable."""
    try:
        return _linear(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, KeyError, UnpicklingError) as error:
        raise ModelUnavailable(f"the weights in {path} could not be read: {_first_line(error)}") from error


def read_inline_linear(checkpoint: Path) -> nn.Linear:
    """`linear.weight` among the network's own weights, as ColBERT keeps it. Raises: ModelUnavailable."""
    try:
        return _linear({"weight": _tensor(checkpoint, "linear.weight")})
    except (OSError, RuntimeError, KeyError, SafetensorError, UnpicklingError) as error:
        raise ModelUnavailable(f"{checkpoint} has no weight `linear.weight`, ColBERT's projection") from error


def _tensor(checkpoint: Path, name: str) -> Tensor:
    if not (checkpoint / "model.safetensors").is_file():
        return _weights(checkpoint)[name]
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        found: Tensor = file.get_tensor(name)
    return found


def _linear(state: dict[str, Tensor]) -> nn.Linear:
    rows, columns = state["weight"].shape
    layer = nn.Linear(columns, rows, bias="bias" in state)
    layer.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return layer.eval()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _dense(folder: Path, *, of_tokens: bool) -> Dense:
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=DenseConfig)
        # What has no such name is a sentence's or a token's by the kind of its model.
        if not of_tokens and config.module_input_name != "sentence_embedding":
            raise ModelUnavailable(f"{folder} projects {config.module_input_name}, not the pooled vector")
        if config.activation_function not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ModelUnavailable(f"{folder} asks for {config.activation_function}; known are {known}")
        module = Dense(config)
        module.load_state_dict({name: tensor.float() for name, tensor in _weights(folder).items()})
    except (OSError, RuntimeError, msgspec.DecodeError, UnpicklingError) as error:
        raise ModelUnavailable(f"the Dense module in {folder} could not be read: {error}") from error
    return module


def _weights(folder: Path) -> dict[str, Tensor]:
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    found: dict[str, Tensor] = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return found
