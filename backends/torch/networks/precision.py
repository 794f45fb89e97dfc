"""Number format of computation: the default of a device, and linear layers that compute in it.

Rounding the sums between layers too would make a text's vector depend on the other texts of its batch. The
layers cast their inputs themselves, so that autocast does not have to intercept every operation.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from backends.torch.networks.measuring import fastest

# Rows for which oneDNN lays out weights; it computes any other number with the same layout.
TYPICAL_TOKENS = 1024
# Activations that oneDNN computes inside a matrix product, before rounding: its algorithm and variant.
# By the class's module and name: transformers is not imported for networks that need none of it.
FUSED_ACTIVATIONS: dict[str, tuple[str, str]] = {
    "transformers.activations.GELUActivation": ("gelu", "none"),
    "transformers.activations.GELUTanh": ("gelu", "tanh"),
    "transformers.activations.NewGELUActivation": ("gelu", "tanh"),
    "transformers.activations.FastGELUActivation": ("gelu", "tanh"),
    "transformers.activations.SiLUActivation": ("swish", ""),
    "torch.nn.modules.activation.SiLU": ("swish", ""),
    "torch.nn.modules.activation.ReLU": ("relu", ""),
    "torch.nn.modules.activation.Tanh": ("tanh", ""),
}
# The same computed by torch.
ACTIVATIONS: dict[tuple[str, str], Callable[[], nn.Module]] = {
    ("gelu", "none"): nn.GELU,
    ("gelu", "tanh"): partial(nn.GELU, "tanh"),
    ("swish", ""): nn.SiLU,
    ("relu", ""): nn.ReLU,
    ("tanh", ""): nn.Tanh,
}
NO_ACTIVATION = ("none", "")
# Rows, inputs and outputs of the product with which activations are measured: 50 ms at 30 GFLOP/s.
PROBE_PRODUCT = (128, 256, 1024)


class WideLinear(nn.Linear):
    """Linear layer that computes in float32, whatever the number format in which its weights are held.

    A network is compared with its faster form in float32, before its layers are replaced.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute (..., out) float32 of (..., in) of any float dtype."""
        bias = None if self.bias is None else self.bias.float()
        return linear(inputs.float(), self.weight.float(), bias)


class WideEmbedding(nn.Embedding):
    """Embedding that returns float32, whatever the number format in which its vectors are held."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors (..., dim) float32 of (...) ids."""
        return super().forward(ids).float()


class ActivatedLinear(WideLinear):
    """Linear layer followed by an activation; shares the weights of the layer that it is made of."""

    def __init__(self, layer: nn.Linear, activation: nn.Module) -> None:
        # The weights are those of `layer`: none are allocated here.
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.activation = activation

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute (..., out) of (..., in)."""
        activated: Tensor = self.activation(super().forward(inputs))
        return activated


def join_layers(layers: Sequence[nn.Linear]) -> WideLinear:
    """Join several layers of the same input into one; their outputs are concatenated."""
    first = layers[0]
    outputs, has_bias = sum(layer.out_features for layer in layers), first.bias is not None
    joined = WideLinear(first.in_features, outputs, has_bias, device="meta")
    joined.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
    if has_bias:
        joined.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    return joined


class CastLinear(nn.Module):
    """Linear layer that casts its inputs to its own number format."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = getattr(layer, "activation", None)
        self.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
        self.bias = (
            None if layer.bias is None else nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute (..., out) in the layer's dtype of (..., in) of any float dtype."""
        out = linear(inputs.to(self.weight.dtype), self.weight, self.bias)
        return out if self.activation is None else self.activation(out)


class PrepackedLinear(nn.Module):
    """Linear layer that casts its inputs, with weights in the order in which oneDNN reads them.

    1.1 times as fast as `CastLinear` for many tokens, three times for a few (bfloat16 on AVX-512). An
    activation is computed inside the product, unless oneDNN is slower at it than torch. In other formats than
    float32 it always is, because the product's result would be rounded before it.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        activation = getattr(layer, "activation", None)
        self._fused = NO_ACTIVATION if activation is None else inner_activation(activation, dtype)
        self._activation = activation if self._fused is NO_ACTIVATION else None
        self._dtype = dtype
        weight = layer.weight.detach().to(dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS)  # noqa: SLF001
        self._bias = None if layer.bias is None else layer.bias.detach().to(dtype, copy=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute (..., out) in the layer's dtype of (..., in) of any float dtype."""
        algorithm, variant = self._fused
        out: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 - torch.compile emits it too
            inputs.to(self._dtype), self._weight, self._bias, algorithm, [], variant
        )
        return out if self._activation is None else self._activation(out)

    def multiplied(self, inputs: Tensor, factor: Tensor) -> Tensor:
        """Compute the product of the outputs, before they are rounded, and (..., out) in their dtype."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(  # noqa: SLF001
            inputs.to(self._dtype), factor, self._weight, self._bias, "mul"
        )
        return out


def multiplied(layer: nn.Module, inputs: Tensor, factor: Tensor) -> Tensor:
    """Compute the product of a linear layer's outputs and (..., out), which is overwritten."""
    if isinstance(layer, PrepackedLinear):
        return layer.multiplied(inputs, factor)
    return factor.mul_(layer(inputs))


def inner_activation(activation: nn.Module, dtype: torch.dtype) -> tuple[str, str]:
    """Return oneDNN's algorithm and variant of an activation, or none if torch is to compute it."""
    kind = type(activation)
    if kind is nn.GELU:
        form = ("gelu", str(activation.approximate))
    else:
        form = FUSED_ACTIVATIONS.get(f"{kind.__module__}.{kind.__name__}", NO_ACTIVATION)
    is_inside = form is NO_ACTIVATION or dtype != torch.float32 or is_faster_inside(form)
    return form if is_inside else NO_ACTIVATION


@cache
def is_faster_inside(form: tuple[str, str]) -> bool:
    """Measure once per process whether oneDNN computes an activation faster than torch after the product.

    form: one of `ACTIVATIONS`. On an AVX2 processor GELU takes oneDNN three times as long as torch.
    """
    rows, inputs, outputs = PROBE_PRODUCT
    x, bias = torch.randn(rows, inputs), torch.zeros(outputs)
    apply = ACTIVATIONS[form]()
    weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn(outputs, inputs), rows)  # noqa: SLF001
    multiply = partial(torch.ops.mkldnn._linear_pointwise, x, weight, bias)  # noqa: SLF001
    algorithm, variant = form
    inside = partial(multiply, algorithm, [], variant)
    return fastest({True: inside, False: lambda: apply(multiply("none", [], ""))})


def replace_linears(
    network: nn.Module,
    linear_type: Callable[[nn.Linear, torch.dtype], nn.Module],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Replace every linear layer by one of a number format; only few weights exist twice at a time."""
    for parent in [module for module in network.modules() if not isinstance(module, nn.Linear)]:
        for name, child in list(parent.named_children()):
            if is_plain_linear(child):
                setattr(parent, name, linear_type(child, dtype))


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True for a linear layer without behavior of its own, which another can replace."""
    return type(module) in {nn.Linear, WideLinear, ActivatedLinear}


def fastest_linear(device: torch.device, dtype: torch.dtype) -> type[CastLinear | PrepackedLinear]:
    """Return the type of linear layer that is fastest on a device without a compiler."""
    prepacks = device.type == "cpu" and torch.backends.mkldnn.is_available() and _SUPPORTED[dtype]()
    return PrepackedLinear if prepacks else CastLinear


def best_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the device multiplies it in hardware, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type != "cpu":
        return torch.float32
    processor = torch.cpu.get_capabilities()
    in_hardware = processor.get("amx_bf16") or processor.get("avx512_bf16") or processor.get("sve_bf16")
    return torch.bfloat16 if in_hardware else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a number format, without its module."""
    return str(dtype).removeprefix("torch.")


# Number formats that oneDNN multiplies on this processor.
_SUPPORTED: dict[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    # Looked up when called: a torch without oneDNN has none of them.
    torch.bfloat16: lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported(),  # noqa: SLF001, PLW0108
    torch.float16: lambda: torch.ops.mkldnn._is_mkldnn_fp16_supported(),  # noqa: SLF001, PLW0108
}


class Float32Linear(nn.Linear):
    """Linear layer of float32 under autocast, for outputs beyond the range of float16."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute (..., out) float32 of (..., in) of any float dtype."""
        with torch.autocast(inputs.device.type, enabled=False):
            return super().forward(inputs.float())


def layers_in_float32(model: nn.Module, dtype: torch.dtype) -> frozenset[str]:
    """Return the names of layers whose outputs are beyond the range of a number format."""
    names = getattr(model, "_keep_in_fp32_modules", None) or ()
    return frozenset(names) if dtype == torch.float16 else frozenset()


class Autocast(nn.Module):
    """Model that mixes number formats in its own code, which autocast keeps consistent.

    In float16 the layers stay in float32 that transformers lists in `_keep_in_fp32_modules`. For int8 the
    linear layers stay as they are, to be replaced; they return float32, as all others do.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._dtype = torch.float32 if dtype == torch.int8 else dtype
        self._device_type = next(model.parameters()).device.type
        wide = layers_in_float32(model, dtype)
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and name.rsplit(".", 1)[-1] in wide:
                layer.__class__ = Float32Linear
            elif isinstance(layer, nn.Linear) and dtype != torch.int8:
                _fit_to_autocast(layer, dtype)
            elif type(layer) is WideEmbedding:
                # Masks take the number format of the model's first weights.
                layer.float().__class__ = nn.Embedding  # type: ignore[assignment]

    def forward(self, **inputs: Tensor) -> Any:
        """Run the model under autocast."""
        with torch.autocast(
            self._device_type, self._dtype, enabled=self._dtype != torch.float32, cache_enabled=False
        ):
            return self.model(**inputs)


def _fit_to_autocast(layer: nn.Linear, dtype: torch.dtype) -> None:
    """Cast a layer; autocast would narrow the operands that a wide layer widens."""
    layer.to(dtype)
    if type(layer) is WideLinear:
        layer.__class__ = nn.Linear  # type: ignore[assignment]
