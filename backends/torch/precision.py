"""Matrix products in one number format, everything between them in float32.

Rounding the sums between layers too would make a text's vector depend on the batch that it shares. Linear
layers cast what they are given themselves, so that no autocast has to watch every operation.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# The rows of a product that oneDNN lays weights out for; it computes others with the same layout.
TYPICAL_TOKENS = 1024


class Product(nn.Module):
    """A linear layer in its own number format, whatever it is given."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
        self.bias = (
            None if layer.bias is None else nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) of any float dtype → (..., out) in the layer's own."""
        return linear(inputs.to(self.weight.dtype), self.weight, self.bias)


class ArrangedProduct(nn.Module):
    """The same with weights in the order in which oneDNN reads them: 1.1 times as fast for many tokens, and
    three times for a few (measured in bfloat16 on AVX-512).
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        weight = layer.weight.detach().to(dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS)  # noqa: SLF001
        self._bias = None if layer.bias is None else layer.bias.detach().to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) of any float dtype → (..., out) in the layer's own."""
        return torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 - what torch.compile itself emits
            inputs.to(self._dtype), self._weight, self._bias, "none", [], ""
        )


def convert(network: nn.Module, kind: type[Product | ArrangedProduct], dtype: torch.dtype) -> None:
    """Put every linear layer of a network into a number format, one by one: few are held twice at a time."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, kind(child, dtype))


def best_kind(device: torch.device) -> type[Product | ArrangedProduct]:
    """How linear layers run fastest there without a compiler."""
    arranged = device.type == "cpu" and torch.backends.mkldnn.is_available()
    return ArrangedProduct if arranged else Product


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
