"""Matrix products in one number format, everything between them in float32.

Rounding the sums between layers too would make a text's vector depend on the batch that it shares. Linear
layers cast what they are given themselves, so that no autocast has to watch every operation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import activations

# The rows of a product that oneDNN lays weights out for; it computes others with the same layout.
TYPICAL_TOKENS = 1024
# What oneDNN calls the activations that it computes inside a product, before anything is rounded.
INSIDE: dict[type[nn.Module], tuple[str, str]] = {
    activations.GELUActivation: ("gelu", "none"),
    activations.GELUTanh: ("gelu", "tanh"),
    activations.NewGELUActivation: ("gelu", "tanh"),
    activations.FastGELUActivation: ("gelu", "tanh"),
    activations.SiLUActivation: ("swish", ""),
    nn.SiLU: ("swish", ""),
    nn.ReLU: ("relu", ""),
    nn.Tanh: ("tanh", ""),
}
NOTHING = ("none", "")


class ActivatedLinear(nn.Linear):
    """A linear layer, whose weights it shares, and what is done to each number that it gives."""

    def __init__(self, layer: nn.Linear, activation: nn.Module) -> None:
        # The weights are another's: none are made here.
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.activation = activation

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) → (..., out)."""
        found: Tensor = self.activation(super().forward(inputs))
        return found


class Product(nn.Module):
    """A linear layer in its own number format, whatever it is given."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = getattr(layer, "activation", None)
        self.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
        self.bias = (
            None if layer.bias is None else nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) of any float dtype → (..., out) in the layer's own."""
        found = linear(inputs.to(self.weight.dtype), self.weight, self.bias)
        return found if self.activation is None else self.activation(found)


class ArrangedProduct(nn.Module):
    """The same with weights in the order in which oneDNN reads them: 1.1 times as fast for many tokens, and
    three times for a few (measured in bfloat16 on AVX-512).
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        activation = getattr(layer, "activation", None)
        self._inside = NOTHING if activation is None else INSIDE.get(type(activation), NOTHING)
        self._after = activation if self._inside is NOTHING else None
        self._dtype = dtype
        weight = layer.weight.detach().to(dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS)  # noqa: SLF001
        self._bias = None if layer.bias is None else layer.bias.detach().to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) of any float dtype → (..., out) in the layer's own."""
        name, form = self._inside
        found: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 - what torch.compile itself emits
            inputs.to(self._dtype), self._weight, self._bias, name, [], form
        )
        return found if self._after is None else self._after(found)


def convert(network: nn.Module, kind: type[Product | ArrangedProduct], dtype: torch.dtype) -> None:
    """Put every linear layer of a network into a number format, one by one: few are held twice at a time."""
    for parent in [one for one in network.modules() if not isinstance(one, nn.Linear)]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and type(child) in {nn.Linear, ActivatedLinear}:
                setattr(parent, name, kind(child, dtype))


def best_kind(device: torch.device, dtype: torch.dtype) -> type[Product | ArrangedProduct]:
    """How linear layers run fastest there without a compiler."""
    arranged = device.type == "cpu" and torch.backends.mkldnn.is_available() and _ARRANGES[dtype]()
    return ArrangedProduct if arranged else Product


# Whether oneDNN multiplies a number format on this processor.
_ARRANGES: dict[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    # Looked up when asked: a torch without oneDNN has none of them.
    torch.bfloat16: lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported(),  # noqa: SLF001, PLW0108
    torch.float16: lambda: torch.ops.mkldnn._is_mkldnn_fp16_supported(),  # noqa: SLF001, PLW0108
}


class Autocast(nn.Module):
    """A model that mixes number formats in code of its own, which autocast keeps in step."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._dtype = dtype
        self._device_type = next(model.parameters()).device.type
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.to(dtype)

    def forward(self, **inputs: Tensor) -> Any:
        """As the model's own."""
        with torch.autocast(
            self._device_type, self._dtype, enabled=self._dtype != torch.float32, cache_enabled=False
        ):
            return self.model(**inputs)
