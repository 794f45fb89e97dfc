"""What sentence-transformers checkpoints do to a pooled vector before anyone sees it.

(batch, dim) float32 → (batch, out) float32. Source: sentence-transformers 6, `Dense` and `Normalize`.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
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


def read_projections(checkpoint: Path, projections: Sequence[Projection]) -> nn.Module:
    """The modules with their weights, in order.

    Raises: ModelUnavailable.
    """
    return nn.Sequential(
        *(_dense(checkpoint / one.folder) if one.kind == "Dense" else Normalize() for one in projections)
    ).eval()


def _dense(folder: Path) -> Dense:
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=DenseConfig)
        if config.module_input_name != "sentence_embedding":
            raise ModelUnavailable(f"{folder} projects {config.module_input_name}, not the pooled vector")
        if config.activation_function not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ModelUnavailable(f"{folder} asks for {config.activation_function}; known are {known}")
        module = Dense(config)
        module.load_state_dict({name: tensor.float() for name, tensor in _weights(folder).items()})
    except (OSError, RuntimeError, msgspec.DecodeError) as error:
        raise ModelUnavailable(f"the Dense module in {folder} could not be read: {error}") from error
    return module


def _weights(folder: Path) -> dict[str, Tensor]:
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    found: dict[str, Tensor] = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return found
