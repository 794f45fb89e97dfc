"""Longest inputs of a checkpoint: the limit that its files choose, within what its network can take.

Pure. Source: sentence-transformers 6.2, `Transformer`, where `max_seq_length` takes precedence over
`model_max_length`, and the smaller of that and `max_position_embeddings` applies otherwise.
"""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from backends.checkpoints.small_files import processor_arguments
from backends.checkpoints.static_models import find_static, max_tokens
from backends.contract.errors import ModelUnavailable
from backends.recipe.files import CheckpointFiles
from backends.recipe.media_encoders import query_positions, text_positions
from backends.recipe.positions import (
    COMPUTED_POSITIONS,
    DEBERTA_TYPES,
    DEFAULT_POSITIONS,
    OFFSET_POSITIONS,
    POSITION_KEYS,
    ROTARY_KEYS,
)
from backends.recipe.recipe import LateInteraction

# transformers writes this huge number where a tokenizer has no maximum.
NO_MAXIMUM = 10**9


def longest_input(files: CheckpointFiles) -> int:
    """Return the most tokens of an input. Raises: ModelUnavailable if no file states a limit."""
    static = find_static(files.checkpoint)
    if static is not None:
        return max_tokens(static, files.checkpoint)
    chosen = _chosen_length(files)
    positions = text_positions(files) or query_positions(files)
    if positions is not None:
        return min(_stated([positions, chosen or _tokenizer_length(files)]))
    limits = [_table_length(files), chosen] if chosen else [_positions(files), _tokenizer_length(files)]
    found = _stated(limits)
    if not found:
        raise ModelUnavailable("no file of the checkpoint says how many tokens the model takes")
    return min(found)


def within_network(late: LateInteraction, files: CheckpointFiles) -> LateInteraction:
    """Return the settings with no length above what the network can take."""
    limits = _stated([_table_length(files)])
    if not limits:
        return late
    limit, expansion = limits[0], late.expansion
    return replace(
        late,
        query_tokens=late.query_tokens and min(late.query_tokens, limit),
        document_tokens=late.document_tokens and min(late.document_tokens, limit),
        expansion=expansion and replace(expansion, length=min(expansion.length, limit)),
    )


def _chosen_length(files: CheckpointFiles) -> int | None:
    """Return the limit that sentence-transformers' settings state."""
    settings = files.transformer_config
    # PyLate saves the length that it happened to set for its last texts, without their marker.
    is_pylate = files.sentence_config.get("model_type") == "ColBERT"
    options = settings.get("processing_kwargs") or {}
    stated: Iterable[Any] = (
        (options.get("text") or {}).get("max_length"),
        processor_arguments(settings).get("model_max_length"),
        None if is_pylate else settings.get("max_seq_length"),
    )
    limits = [_checked(files, "the length in sentence_bert_config.json", limit) for limit in stated]
    return next((int(limit) for limit in limits if limit and limit < NO_MAXIMUM), None)


def _tokenizer_length(files: CheckpointFiles) -> Any:
    config = files.tokenizer_config
    # The name of versions before 3.
    stated = config.get("model_max_length", config.get("max_len"))
    return _checked(files, "`model_max_length` in tokenizer_config.json", stated)


def _checked(files: CheckpointFiles, place: str, length: Any) -> Any:
    """Return a stated length. Raises: ModelUnavailable if it is no number, or below 0."""
    if length is None or (type(length) in {int, float} and length >= 0):
        return length
    raise ModelUnavailable(f"{files.checkpoint}: {place} is {length!r}, which is no number of tokens")


def _positions(files: CheckpointFiles) -> int | None:
    config, model_type = files.config, str(files.config.get("model_type", ""))
    stated = config.get("max_position_embeddings", DEFAULT_POSITIONS.get(model_type))
    positions = config.get(POSITION_KEYS.get(model_type, ""), stated)
    offset = OFFSET_POSITIONS.get(model_type, 0)
    return positions - offset if isinstance(positions, int) and positions > offset else None


def _table_length(files: CheckpointFiles) -> int | None:
    """Return the most tokens that the network can take, None if it computes positions."""
    config = files.config
    computes = ROTARY_KEYS & config.keys() or config.get("position_embedding_type") in COMPUTED_POSITIONS
    if config.get("model_type") in DEBERTA_TYPES:
        computes = not config.get("position_biased_input", True)
    return None if computes else _positions(files)


def _stated(limits: Iterable[Any]) -> list[int]:
    return [int(limit) for limit in limits if limit and limit < NO_MAXIMUM]
