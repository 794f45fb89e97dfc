"""Encoder that computes no padding: padded batches outside, tokens concatenated inside."""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from backends.recipe.positions import COMPUTED_POSITIONS, OFFSET_POSITIONS
from backends.torch.networks.pass_graphs import PassGraphs
from backends.torch.networks.rounding import spare_tokens
from backends.torch.networks.transfers import to_device


class PackedLayout:
    """Positions of a padded batch's tokens. mask: (rows, longest), 1 = a token, padded on the right.

    Spare tokens follow, which round up the number of tokens. They belong to no sequence.
    """

    def __init__(self, mask: Tensor, device: torch.device) -> None:
        """device: where the tokens are computed; the mask may be on the host."""
        self._shape = mask.shape
        self._index = mask.flatten().nonzero().squeeze(1)
        self._tokens = len(self._index)
        self._is_full = self._tokens == mask.numel()
        self._spare = spare_tokens(self._tokens) if device.type == "cpu" else 0
        self._columns = int(mask.shape[1])
        self.starts = self._starts_of(mask)
        self.longest = self._columns

    def key_options(self, attended: Tensor) -> dict[str, Any]:
        """Return options of attention for a batch in which not all tokens are attended to.

        attended: of the mask's shape, 1 = attended to.
        """
        return {
            "attended": attended.flatten()[self._index].nonzero().squeeze(1),
            "cu_seq_lens_k": self._starts_of(attended),
            "max_length_k": self.longest,
        }

    def positions(self) -> Tensor:
        """Return the position of each token in its sequence, from 0: (1, tokens)."""
        return self._with_spare(self._index % self._columns)

    def pack(self, padded: Tensor) -> Tensor:
        """Return the tokens of (rows, longest) as (1, tokens)."""
        tokens = padded.flatten()
        return self._with_spare(tokens if self._is_full else tokens[self._index])

    def unpack(self, tokens: Tensor) -> Tensor:
        """Return (1, tokens, dim) as (rows, longest, dim), with zeros for padding."""
        if self._is_full:
            return tokens[0, : self._tokens].unflatten(0, self._shape)
        padded = tokens.new_zeros(self._shape.numel(), tokens.shape[-1])
        padded[to_device(self._index, tokens.device)] = tokens[0, : self._tokens]
        return padded.unflatten(0, self._shape)

    def _with_spare(self, tokens: Tensor) -> Tensor:
        return (pad(tokens, (0, self._spare)) if self._spare else tokens).unsqueeze(0)

    def _starts_of(self, mask: Tensor) -> Tensor:
        """Return the start of each concatenated sequence, and the end of the last: int32."""
        return pad(mask.sum(dim=1).cumsum(0, dtype=torch.int32), (1, 0))


class PackedOutput(NamedTuple):
    """PackedOutput of an encoder, which heads of transformers read by name and by place."""

    last_hidden_state: Tensor
    pooler_output: Tensor | None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None


class LonePasses(Protocol):
    """Runtime next to PyTorch for passes of one text."""

    def compute(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor | None:
        """Return (1, tokens, dim) float32, or None if PyTorch is to compute the pass."""


class PackedEncoder(nn.Module):
    """Encoder without padding; other modules call it like the encoder of transformers that it wraps.

    padding_position: index of the position of padding tokens, after which positions begin, in RoBERTa's
    family; None if positions begin at 0. lone: computes some of the passes of one text. graphs: recorded
    passes on a GPU.
    """

    def __init__(self, encoder: Any, padding_position: int | None) -> None:
        super().__init__()
        self.encoder: Any = encoder
        self._padding_position = padding_position
        self.lone: LonePasses | None = None
        self.graphs: PassGraphs | None = None
        self.device: torch.device = next(encoder.parameters()).device
        self.vocabulary: int = encoder.config.vocab_size
        # Of some families it is None.
        table = getattr(encoder.config, "max_position_embeddings", None)
        first = 0 if padding_position is None else padding_position + 1
        self.positions_max: float = table - first if isinstance(table, int) else math.inf
        # A pooler needs padded rows, which the packed encoder does not have.
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
    ) -> PackedOutput:
        """Run the encoder on (rows, longest) int64 tensors, padded on the right, on the host or the device.

        tokens: mask of all tokens, if not all are attended to.
        """
        hidden = None
        if self.lone is not None and tokens is None:
            hidden = self.lone.compute(input_ids, token_type_ids)
        if hidden is None:
            hidden = self.compute_packed(input_ids, attention_mask, token_type_ids, tokens)
        pooled = None if self.pooler is None else self._pool(hidden)
        return PackedOutput(hidden, pooled)

    def compute_packed(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden state (rows, longest, dim), as PyTorch computes it."""
        layout = PackedLayout(attention_mask if tokens is None else tokens, self.device)
        inputs: dict[str, Any] = {
            "input_ids": layout.pack(input_ids),
            "position_ids": self._positions(layout, input_ids),
            "cu_seq_lens_q": layout.starts,
            "max_length_q": layout.longest,
        }
        if tokens is not None:
            inputs |= layout.key_options(attention_mask)
        if token_type_ids is not None:
            inputs["token_type_ids"] = layout.pack(token_type_ids)
        hidden = None if self.graphs is None else self.graphs.compute(inputs)
        if hidden is None:
            placed = {
                name: to_device(value, self.device) if isinstance(value, Tensor) else value
                for name, value in inputs.items()
            }
            hidden = self.encoder(**placed).last_hidden_state
        return layout.unpack(hidden)

    def _pool(self, hidden: Tensor) -> Tensor:
        """Return the pooler's (rows, dim), whose parts ALBERT applies in the encoder's code."""
        if isinstance(self.pooler, nn.Linear):
            pooled: Tensor = self.encoder.pooler_activation(self.pooler(hidden[:, 0]))
        else:
            pooled = self.pooler(hidden)
        return pooled

    def _positions(self, layout: PackedLayout, input_ids: Tensor) -> Tensor:
        if self._padding_position is None:
            return layout.positions()
        # RoBERTa's family counts no padding token, and a text may contain one by its name.
        counts = (input_ids != self._padding_position).long()
        return layout.pack(counts.cumsum(1) * counts + self._padding_position)

    def restore(self) -> None:
        """Put the pooler back into the encoder."""
        if self.pooler is not None:
            self.encoder.pooler = self.pooler


def padding_position(config: Any) -> int | None:
    """Return the position of padding tokens in RoBERTa's family, None in others."""
    # ESM with rotary positions counts every token.
    is_computed = getattr(config, "position_embedding_type", None) in COMPUTED_POSITIONS
    is_offset = config.model_type in OFFSET_POSITIONS and not is_computed
    return (config.pad_token_id or 0) if is_offset else None
