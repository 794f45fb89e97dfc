"""Encoder that computes no padding: padded batches outside, tokens concatenated inside.

Support of an architecture is not looked up in a list but tested once, when its model is loaded.
"""

import logging
import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from backends.recipe.lengths import COMPUTED_POSITIONS, OFFSET_POSITIONS
from backends.torch.networks.attention import PACKED, register, watched_attention, watched_masks
from backends.torch.networks.pass_graphs import PassGraphs
from backends.torch.networks.rounding import spare_tokens
from backends.torch.networks.rows import special_ids
from backends.torch.networks.transfers import to_device

logger = logging.getLogger(__name__)

# Three lengths with the longest in the middle, so that a mix-up of any two changes the result. Their sum is a
# number of tokens that is rounded up.
PROBE_LENGTHS = (5, 11, 3)
# Tokens of another probe beyond a window, and the most products that it may cost: a second on two cores.
BEYOND_WINDOW = 6
PROBE_PRODUCTS_MAX = 25_000_000_000
# Positions of a table that a usual batch exceeds.
SHORT_TABLE = 1024
# float32 noise stays below 1e-5 of a vector's length; a sequence that attends to its neighbor is far above.
PROBE_TOLERANCE = 1e-3


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


class LonePasses(Protocol):
    """Runtime next to PyTorch for passes of one text."""

    def compute(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor | None:
        """Return (1, tokens, dim) float32, or None if PyTorch is to compute the pass."""


class PackedEncoder(nn.Module):
    """Encoder of transformers without padding; other modules call it like the encoder that it wraps.

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
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Run the encoder on (rows, longest) int64 tensors, padded on the right, on the host or the device.

        tokens: mask of all tokens, if not all are attended to.
        """
        hidden = None
        if self.lone is not None and tokens is None:
            hidden = self.lone.compute(input_ids, token_type_ids)
        if hidden is None:
            hidden = self.compute_packed(input_ids, attention_mask, token_type_ids, tokens)
        pooled = None if self.pooler is None else self._pool(hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden, pooler_output=pooled)

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
            placed = {name: self._placed(value) for name, value in inputs.items()}
            hidden = self.encoder(**placed).last_hidden_state
        return layout.unpack(hidden)

    def _placed(self, value: Any) -> Any:
        return to_device(value, self.device) if isinstance(value, Tensor) else value

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


@torch.inference_mode()
def pack(encoder: Any, padding_position: int | None) -> PackedEncoder | None:
    """Return the encoder without padding, or None if its vectors would differ from those with padding.

    encoder: a transformers model that computes in float32. padding_position: as `PackedEncoder` takes it.
    The comparison fails for models with attention of their own, for those that do not take positions as an
    input, and for those with a window or chunks in their masks alone.
    """
    stock = encoder.config._attn_implementation  # noqa: SLF001 - it has no public name
    register()
    lengths: tuple[int, ...] | None = PROBE_LENGTHS
    reason, windows = None, set[int]()
    while lengths is not None and reason is None:
        reason, found = _compared(encoder, padding_position, lengths, stock)
        windows |= found
        lengths = _lengths_beyond(encoder, windows, lengths)
    packed = PackedEncoder(encoder, padding_position)
    if reason is None:
        encoder.set_attn_implementation(PACKED)
        return packed
    logger.info("%s computes padding too: %s", type(encoder).__name__, reason)
    packed.restore()
    return None


def _compared(
    encoder: Any, padding_position: int | None, lengths: tuple[int, ...], stock: str
) -> tuple[str | None, set[int]]:
    """Compare a network without padding with itself; return the reason against it, and its windows.

    lengths: of the sequences. stock: name of the attention with padding, which is set at the end.
    """
    inputs = _probe(encoder, lengths)
    stock_output = encoder(**inputs)
    packed = PackedEncoder(encoder, padding_position)
    try:
        encoder.set_attn_implementation(PACKED)
        with watched_attention() as seen, watched_masks() as masked:
            output = packed(**inputs)
        repeats = _repeats(encoder.config, int(inputs["attention_mask"].sum()))
        if repeats and lengths == PROBE_LENGTHS:
            packed(**{name: value.repeat(repeats, 1) for name, value in inputs.items()})
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", set()
    finally:
        packed.restore()
        encoder.set_attn_implementation(stock)
    windows = {options.window for options in seen if options.window}
    # A window of both directions counts the token itself in the layers only.
    missing = {size for size in masked if not {size, size + 1} & windows}
    if missing:
        return f"only its masks have a window or chunks of {max(missing)} tokens", windows
    mask = inputs["attention_mask"].unsqueeze(-1)
    worst = _difference(stock_output.last_hidden_state * mask, output.last_hidden_state * mask)
    if packed.pooler is not None:
        worst = max(worst, _difference(stock_output.pooler_output, output.pooler_output))
    # Written so that it also rejects NaN.
    return None if worst < PROBE_TOLERANCE else f"its vectors differ by {worst:.1e}", windows


def _lengths_beyond(encoder: Any, windows: set[int], probed: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return lengths of a probe beyond the windows of a network, None if there is none, or it costs too much.

    probed: lengths of the former probe. A network with the same windows at a small size is compared by the
    tests of all types.
    """
    beyond = {window for window in windows if window >= max(probed)}
    words, positions = encoder.config.vocab_size, getattr(encoder.config, "max_position_embeddings", None)
    weights = sum(weight.numel() for weight in encoder.parameters() if weight.shape[:1] != (words,))
    most = min(
        PROBE_PRODUCTS_MAX // max(1, weights), positions - 2 if isinstance(positions, int) else math.inf
    )
    longest = max((window + BEYOND_WINDOW for window in beyond if window + BEYOND_WINDOW <= most), default=0)
    if beyond and not longest:
        logger.info("%s: a window of %d tokens was not probed", type(encoder).__name__, max(beyond))
    return (5, longest, 3) if longest else None


def _repeats(config: Any, tokens: int) -> int:
    """Return how often the probe makes up more tokens than a short table has positions; 0 for a long table.

    Some code, CLIP's for one, compares the tokens of a whole batch with its table.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or not 0 < positions <= SHORT_TABLE:
        return 0
    return positions // tokens + 1


def _difference(expected: Tensor, computed: Tensor) -> float:
    """Return the largest difference of two vectors, relative to the first; infinity if shapes differ."""
    if expected.shape != computed.shape:
        return math.inf
    return ((expected - computed).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-9)).max().item()


def _probe(encoder: Any, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return sequences of random ids, one of them with special tokens."""
    config = encoder.config
    device = next(encoder.parameters()).device
    pad_id = config.pad_token_id or 0
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(config.vocab_size, 1000) - 1, mask.shape, generator=generator)
    ids = torch.where(mask, ids + (ids >= pad_id), pad_id)
    named = special_ids(config)[: lengths[1] - 3]
    ids[1, 2 : 2 + len(named)] = torch.tensor(named, dtype=ids.dtype)
    return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
