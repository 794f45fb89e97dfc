"""Number formats of weights in memory, from that of the computation and that of the files.

transformers reads each tensor into the number format of the empty network that it builds first. Therefore a
weight never exists in a wider format than the one in which it is held.
"""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from backends.recipe.recipe import ModelKind
from backends.torch.networks.precision import WideEmbedding, WideLinear, layers_in_float32

# Kinds without a layer that shares the vectors of the token embedding and computes in float32.
UNTIED: frozenset[ModelKind] = frozenset({"dense", "multivector", "classifier"})
NARROW = frozenset({torch.bfloat16, torch.float16})


class WeightFormats(NamedTuple):
    """Number formats of an encoder's weights; all others, norms and heads among them, are float32.

    products: of its linear layers. embedding: of its token embedding.
    """

    products: torch.dtype
    embedding: torch.dtype = torch.float32

    @classmethod
    def of(cls, products: torch.dtype, stored: Collection[torch.dtype], kind: ModelKind) -> "WeightFormats":
        """Return the formats for a number format of products and those of the files.

        The token embedding keeps the format of the files, because a lookup loses nothing by that.
        """
        narrow = len(stored) == 1 and set(stored) <= NARROW
        if products == torch.int8:
            # Layers are quantized one at a time, after a pass with the weights of the files.
            products = next(iter(stored)) if narrow else torch.float32
        return cls(products, *stored) if narrow and kind in UNTIED else cls(products)


def class_with_formats(network_class: type[Any], formats: WeightFormats) -> type[Any]:
    """Return a class of transformers whose empty networks have these formats."""

    class Formatted(network_class):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            encoder: Any = getattr(self, self.base_model_prefix, self)
            wide = layers_in_float32(self, formats.products)
            set_formats(encoder, _token_embedding(encoder), formats, wide)

    Formatted.__name__ = network_class.__name__
    Formatted.__module__ = network_class.__module__
    return Formatted


def copy_from_files(networks: Iterable[nn.Module], stored: Collection[torch.dtype]) -> None:
    """Copy weights that are still pages of a file, which may be changed or removed while the model serves.

    stored: number formats of the files; weights in others were copied when they were read. Only one weight
    exists twice at a time.
    """
    weights = {
        id(weight): weight for network in networks for weight in (*network.parameters(), *network.buffers())
    }
    for weight in weights.values():
        # A pass computed tables such as those of positions: they are no pages of a file.
        if weight.device.type == "cpu" and weight.dtype in stored and not weight.is_inference():
            weight.data = weight.data.clone()


def _token_embedding(encoder: Any) -> Any:
    """Return the layer of token vectors, None for a network of two encoders that names none."""
    try:
        return encoder.get_input_embeddings()
    except NotImplementedError:
        return None


def set_formats(
    encoder: nn.Module, embedding: Any, formats: WeightFormats, wide: Collection[str] = ()
) -> None:
    """Give the layers of an empty encoder their formats.

    embedding: its layer of token vectors, which may be of another kind. wide: names of layers in float32.
    """
    for name, layer in encoder.named_modules():
        # A pooler works on few vectors, as a head does.
        is_wide = name.startswith("pooler.") or name.rsplit(".", 1)[-1] in wide
        if type(layer) is nn.Linear and not is_wide:
            layer.to(formats.products).__class__ = WideLinear
    if type(embedding) is nn.Embedding:
        embedding.to(formats.embedding).__class__ = WideEmbedding
