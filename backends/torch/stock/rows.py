"""Networks whose output for a text depends on the other texts of a batch, run one text at a time."""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import BigBirdModel
from transformers.modeling_outputs import ModelOutput

logger = logging.getLogger(__name__)

# Rotary embeddings whose frequencies depend on the longest text of a batch.
ROTATIONS_BY_LENGTH = frozenset({"dynamic", "longrope"})
# Lengths of two sequences in a batch. Some networks cut only texts of more than a few tokens into blocks.
PROBE_LENGTHS = ((11, 4), (150, 70))
# Tokens that some networks treat in their own way, for example those that count a text's positions.
SPECIAL_ROLES = ("mask", "pad", "eos", "bos", "sep", "cls", "unk")
# float32 noise stays below 1e-5 of a vector's length.
PROBE_TOLERANCE = 1e-3


class SingleRows(nn.Module):
    """Network of transformers that runs each row of a batch in a pass of its own, without padding."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network: Any = network
        self._growing = tuple(module for module in network.modules() if "dynamic" in _rotations(module))

    def forward(self, attention_mask: Tensor, tokens: Tensor | None = None, **inputs: Tensor) -> ModelOutput:
        """Run (rows, longest) int64 tensors, padded on the right; zeros stand for padding.

        tokens: mask of all tokens, if not all are attended to.
        """
        lengths = (attention_mask if tokens is None else tokens).sum(dim=1).tolist()
        rows = [
            self._run(
                attention_mask=attention_mask[i : i + 1, :length],
                **{name: value[i : i + 1, :length] for name, value in inputs.items()},
            )
            for i, length in enumerate(lengths)
        ]
        if "logits" in rows[0]:
            return ModelOutput(logits=torch.cat([row.logits for row in rows]))
        longest = attention_mask.shape[1]
        vectors = [row.last_hidden_state for row in rows]
        padded = [pad(row, (0, 0, 0, longest - row.shape[1])) for row in vectors]
        return ModelOutput(last_hidden_state=torch.cat(padded))

    def _run(self, **inputs: Tensor) -> ModelOutput:
        for module in self._growing:
            _forget_longest(module)
        return self.network(**inputs)


def varies_by_length(model: Any) -> bool:
    """Return True if the positions of a text in a network depend on the longest text of a batch."""
    return any(_rotations(module) & ROTATIONS_BY_LENGTH for module in model.modules())


def attend_to_all_tokens(model: Any) -> None:
    """Have a network of sparse attention attend to all tokens.

    BigBird does so after its first short text: its vectors would depend on the texts before.
    """
    for module in model.modules():
        if isinstance(module, BigBirdModel):
            module.set_attention_type("original_full")


def needs_single_rows(network: Any, max_tokens: int) -> bool:
    """Return True if a text has another output next to a longer one. network: computes padding."""
    if varies_by_length(network):
        reason = "its positions depend on the longest text"
    else:
        lengths = [pair for pair in PROBE_LENGTHS if pair[0] <= max_tokens]
        differences = (difference_of_shorter(*run_padded_and_alone(network, *pair)) for pair in lengths)
        worst = max(differences, default=0.0)
        # Written so that it also rejects NaN.
        if worst < PROBE_TOLERANCE:
            return False
        reason = f"its output next to a longer text differs by {worst:.1e}"
    logger.info("%s runs one text at a time: %s", type(network).__name__, reason)
    return True


@torch.inference_mode()
def run_padded_and_alone(network: Any, longest: int, short: int) -> tuple[Tensor, Tensor]:
    """Run a batch of two random sequences, then the shorter one alone; return both outputs in float32."""
    config = network.config
    pad_id = config.pad_token_id or 0
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(config.vocab_size, 1000) - 1, (2, longest), generator=generator)
    ids += ids >= pad_id
    named = special_ids(config)[: short - 1]
    ids[1, 1 : 1 + len(named)] = torch.tensor(named, dtype=ids.dtype)
    mask = torch.ones_like(ids)
    ids[1, short:], mask[1, short:] = pad_id, 0
    device = next(network.parameters()).device
    ids, mask = ids.to(device), mask.to(device)
    return _output(network, ids, mask), _output(network, ids[1:, :short], mask[1:, :short])


def special_ids(config: Any) -> list[int]:
    """Return the ids of special tokens, which a text may contain by their names."""
    found = (getattr(config, f"{role}_token_id", None) for role in SPECIAL_ROLES)
    ids = (id_ for each in found for id_ in (each if isinstance(each, list | tuple) else (each,)))
    return [id_ for id_ in dict.fromkeys(ids) if type(id_) is int and 0 <= id_ < config.vocab_size]


def difference_of_shorter(together: Tensor, alone: Tensor) -> float:
    """Return the largest difference of the shorter sequence's vectors to those alone, relative to them."""
    alone = alone[0]
    row = together[1, : len(alone)] if together.dim() > 2 else together[1]
    return ((row - alone).norm(dim=-1) / alone.norm(dim=-1).clamp(min=1e-9)).max().item()


def _output(network: Any, ids: Tensor, mask: Tensor) -> Tensor:
    output = network(input_ids=ids, attention_mask=mask)
    value: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return value.float()


def _forget_longest(module: Any) -> None:
    """Set rotary positions that grow with the longest text so far to those of a short one.

    transformers does so before shorter texts than the network was made for, and for no others.
    """
    by_type = isinstance(module.rope_type, dict)
    for prefix in [f"{name}_" for name in module.rope_type] if by_type else [""]:
        original = getattr(module, f"{prefix}original_inv_freq", None)
        if original is None:
            continue
        frequencies = getattr(module, f"{prefix}inv_freq")
        setattr(module, f"{prefix}inv_freq", original.to(frequencies.device))
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _rotations(module: nn.Module) -> set[Any]:
    rope_type = getattr(module, "rope_type", None)
    return set(rope_type.values()) if isinstance(rope_type, dict) else {rope_type}
