"""Language model without its encoder: token vectors in, logits of the vocabulary out.

The layers between the two are the architecture's own code. Knows nothing of batches or padding.
"""

from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast


class EncoderOutput(BaseModelOutputWithPast):  # type: ignore[misc]
    """Token vectors, and nothing in the other fields that heads pass on to their callers."""

    global_attentions = None
    entity_last_hidden_state = None
    entity_hidden_states = None
    decoder_hidden_states = None
    decoder_attentions = None
    cross_attentions = None
    encoder_last_hidden_state = None
    encoder_hidden_states = None
    encoder_attentions = None


class EncoderStandIn(nn.Module):
    """Replacement of the encoder that returns token vectors computed before, separately for each thread."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = local()

    def forward(self, *_: Any, **__: Any) -> EncoderOutput:
        """Return the thread's token vectors as an encoder would."""
        return EncoderOutput(last_hidden_state=self.thread.hidden)


def _widen(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.float() for tensor in inputs)


class LanguageHead(nn.Module):
    """Language model of transformers whose encoder was removed; `take_encoder` removes and returns it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self._stand_in = EncoderStandIn()

    def take_encoder(self) -> Any:
        """Return the encoder and put the stand-in into its place."""
        prefix = self._model.base_model_prefix
        encoder = getattr(self._model, prefix)
        setattr(self._model, prefix, self._stand_in)
        for layer in self._model.modules():
            if isinstance(layer, nn.LayerNorm):
                # The layer before it may return half precision, which a GPU rejects with float32 weights.
                layer.register_forward_pre_hook(_widen)
        return encoder

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the logits (tokens, vocabulary) of (tokens, dim), any float dtype."""
        self._stand_in.thread.hidden = hidden.unsqueeze(0)
        try:
            # Architectures only pass the ids on to their encoder.
            return self._model(input_ids=self._placeholder_ids(hidden)).logits[0]
        finally:
            self._stand_in.thread.hidden = None

    @staticmethod
    def _placeholder_ids(hidden: Tensor) -> Tensor:
        return torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
