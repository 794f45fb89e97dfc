"""The end of a language model, apart from its encoder: token vectors in, logits of the vocabulary out.

Whatever stands between the two is the architecture's own code. Knows nothing of batches or padding.
"""

from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast


class Handed(nn.Module):
    """Stands where the encoder was, and hands on the token vectors that it is given in the same thread."""

    def __init__(self) -> None:
        super().__init__()
        self.given = local()

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPast:
        """What an encoder would return."""
        return BaseModelOutputWithPast(last_hidden_state=self.given.hidden)


def _widen(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(one.float() for one in inputs)


class LanguageHead(nn.Module):
    """A transformers language model without its encoder, which `take` gives."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self._handed = Handed()

    def take(self) -> Any:
        """The encoder, whose place is then empty."""
        prefix = self._model.base_model_prefix
        encoder = getattr(self._model, prefix)
        setattr(self._model, prefix, self._handed)
        for layer in self._model.modules():
            if isinstance(layer, nn.LayerNorm):
                # A product before it may give half precision; a GPU refuses that beside float32 weights.
                layer.register_forward_pre_hook(_widen)
        return encoder

    def forward(self, hidden: Tensor) -> Tensor:
        """(tokens, dim) of any float dtype → (tokens, vocabulary)."""
        self._handed.given.hidden = hidden.unsqueeze(0)
        try:
            # No architecture looks at the ids but to hand them to its encoder.
            return self._model(input_ids=self._ids(hidden)).logits[0]
        finally:
            self._handed.given.hidden = None

    @staticmethod
    def _ids(hidden: Tensor) -> Tensor:
        return torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
