"""An encoder that computes no padding: rectangles at its edges, tokens end to end inside.

Whether an architecture takes that is not looked up but tried, once, when its model is loaded.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_outputs import BaseModelOutputWithPooling

from backends.torch.attention import PACKED, register

logger = logging.getLogger(__name__)

# Three lengths, none first or last the longest, so that a mix-up of any two shows; and of a number of tokens
# that is rounded up.
PROBE_LENGTHS = (5, 11, 3)
# What a product's number of rows is a multiple of, and of how many binary digits a smaller one is.
ROUND, DIGITS = 32, 4
# float32 noise stays below 1e-5 of a vector's length; a sequence that sees its neighbour is far above.
PROBE_TOLERANCE = 1e-3


class Rows:
    """Where the tokens of a rectangle lie. mask: (rows, longest), 1 = a token, padded on the right.

    Behind them lie spare ones, a sequence by themselves, which make their number a round one.
    """

    def __init__(self, mask: Tensor) -> None:
        self._shape = mask.shape
        self._index = mask.flatten().nonzero().squeeze(1)
        self._tokens = len(self._index)
        self._spare = spare(self._tokens) if mask.device.type == "cpu" else 0
        self._columns = int(mask.shape[1])
        self.starts = self._starts(mask)
        self.longest = max(self._columns, self._spare)

    def seen(self, attended: Tensor) -> dict[str, Any]:
        """What attention is told where not all tokens are looked at. attended: as the mask, 1 = looked at."""
        looked_at = pad(attended.flatten()[self._index], (0, self._spare), value=1)
        return {
            "seen": looked_at.nonzero().squeeze(1),
            "cu_seq_lens_k": self._starts(attended),
            "max_length_k": self.longest,
        }

    def positions(self) -> Tensor:
        """(1, tokens): each sequence counts from 0."""
        return self._filled(self._index % self._columns)

    def pack(self, rectangle: Tensor) -> Tensor:
        """(rows, longest) → (1, tokens)."""
        return self._filled(rectangle.flatten()[self._index])

    def unpack(self, tokens: Tensor) -> Tensor:
        """(1, tokens, dim) → (rows, longest, dim), zeros where there is no token."""
        rectangle = tokens.new_zeros(self._shape.numel(), tokens.shape[-1])
        rectangle[self._index] = tokens[0, : self._tokens]
        return rectangle.unflatten(0, self._shape)

    def _filled(self, tokens: Tensor) -> Tensor:
        return pad(tokens, (0, self._spare)).unsqueeze(0)

    def _starts(self, mask: Tensor) -> Tensor:
        """Where each sequence starts when all lie end to end, and where the last ends: int32."""
        lengths = mask.sum(dim=1, dtype=torch.int32)
        if self._spare:
            lengths = pad(lengths, (0, 1), value=self._spare)
        return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def spare(tokens: int) -> int:
    """How many make it a round number: of four binary digits, or a multiple of 32.

    For every number of rows that it has not multiplied lately oneDNN writes code anew. That takes up to half
    as long as the product itself, and more than a small one, and keeps half a megabyte.
    """
    return -tokens % min(ROUND, 1 << max(0, tokens.bit_length() - DIGITS))


class Packed(nn.Module):
    """A transformers encoder behind its own face: other modules call it like the one it replaces.

    first_position: what the encoder calls a sequence's first position; RoBERTa's family starts past 0.
    """

    def __init__(self, encoder: Any, first_position: int) -> None:
        super().__init__()
        self.encoder: Any = encoder
        self._first_position = first_position
        # A pooler takes whole rows. What the encoder returns has none.
        self.pooler: Any = getattr(encoder, "pooler", None)
        if self.pooler is not None:
            encoder.pooler = None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        tokens: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPooling:
        """All rectangles are (rows, longest) int64, padded on the right.

        tokens: where there are tokens, if more than are attended to.
        """
        rows = Rows(attention_mask if tokens is None else tokens)
        inputs: dict[str, Any] = {
            "input_ids": rows.pack(input_ids),
            "position_ids": rows.positions() + self._first_position,
            "cu_seq_lens_q": rows.starts,
            "max_length_q": rows.longest,
        }
        if tokens is not None:
            inputs |= rows.seen(attention_mask)
        if token_type_ids is not None:
            inputs["token_type_ids"] = rows.pack(token_type_ids)
        hidden = rows.unpack(self.encoder(**inputs).last_hidden_state)
        pooled = None if self.pooler is None else self.pooler(hidden)
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)

    def release_to_system(self) -> None:
        """Leave the encoder as it was."""
        if self.pooler is not None:
            self.encoder.pooler = self.pooler


@torch.inference_mode()
def pack(encoder: Any, first_position: int) -> Packed | None:
    """The encoder without padding, or None if its vectors would be others than with padding.

    encoder: a float32 transformers model. Models whose attention is their own, or whose positions are not
    told to them, show it here.
    """
    inputs = _probe(encoder)
    expected = encoder(**inputs).last_hidden_state
    stock = encoder.config._attn_implementation  # noqa: SLF001 - the one place where it is kept
    register()
    packed = Packed(encoder, first_position)
    try:
        encoder.set_attn_implementation(PACKED)
        found = packed(**inputs).last_hidden_state
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        difference = ((expected - found) * inputs["attention_mask"].unsqueeze(-1)).norm(dim=-1)
        worst = (difference / expected.norm(dim=-1).clamp(min=1e-9)).max().item()
        if worst < PROBE_TOLERANCE:
            return packed
        reason = f"its token vectors differ by {worst:.1e}"
    logger.info("%s computes padding too: %s", type(encoder).__name__, reason)
    packed.release_to_system()
    encoder.set_attn_implementation(stock)
    return None


def _probe(encoder: Any) -> dict[str, Tensor]:
    """Sequences of any ids but the padding's."""
    config = encoder.config
    device = next(encoder.parameters()).device
    pad_id = config.pad_token_id or 0
    mask = torch.arange(max(PROBE_LENGTHS)) < torch.tensor(PROBE_LENGTHS).unsqueeze(1)
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(config.vocab_size, 1000) - 1, mask.shape, generator=seeded)
    ids = torch.where(mask, ids + (ids >= pad_id), pad_id)
    return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
