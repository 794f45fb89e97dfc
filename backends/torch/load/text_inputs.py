"""Inputs of a network: those that its tokenizer gives for a text, and those that no text gives.

Of a network that the engine does not have itself, imports transformers' class, and reads its signature.
"""

from collections.abc import Iterator
from typing import Any

from backends.contract import ModelInput, Truncate
from backends.contract.errors import ModelUnavailable
from backends.recipe.bert_config import read_bert
from backends.recipe.files import CheckpointFiles
from backends.recipe.recipe import Recipe
from backends.tokens.tokenizer import TextTokenizer
from backends.torch.networks.opening import reads_type_ids

# Inputs of networks that read more than text.
OTHER_INPUTS = {
    "bbox": "the place of each word on a page",
    "xpath_tags_seq": "the place of each word in a page's markup",
    "visual_embeds": "vectors of an image",
    "visual_feats": "vectors of an image",
    "pixel_values": "an image",
    "input_features": "sound",
    "input_values": "sound",
    "input_shape_ids": "the shape of each Chinese character",
}
HALVES = "an encoder-decoder, of which the built-in engine serves the encoders of t5, mt5 and umt5 only"
# Networks of which the engine serves nothing, by `model_type`.
REFUSED_TYPES = {
    **dict.fromkeys(
        (
            *("blenderbot", "blenderbot-small", "fsmt", "longt5", "m2m_100", "marian", "nllb-moe", "pegasus"),
            *("pegasus_x", "prophetnet", "switch_transformers", "t5gemma", "t5gemma2", "xlm-prophetnet"),
        ),
        HALVES,
    ),
    **dict.fromkeys(("canine", "perceiver"), "which reads characters and has no tokenizer.json"),
    "dpr": "whose network gives a vector of a text and none of its tokens; give the model as "
    "sentence-transformers publishes it, under sentence-transformers/facebook-dpr-…",
    "reformer": "whose attention chooses keys at random, so that a text has another vector each time",
    "tapas": "whose network reads a table next to the text; the built-in engine has text only",
}
# Networks whose classifier reads a text at an end token, which a text may contain.
SPLIT_CLASSIFIERS = frozenset(
    {"bart", "bigbird_pegasus", "led", "mbart", "mt5", "mvp", "plbart", "t5", "umt5"}
)
PROBE_TEXT = "a b"


def refuse_network(files: CheckpointFiles, recipe: Recipe) -> None:
    """Raise ModelUnavailable if texts alone give the network nothing that the engine can read."""
    if recipe.kind in {"static", "dual", "pages"} or read_bert(files.config) is not None:
        return
    from backends.torch.stock.architectures import input_names

    model_type = recipe.model_type
    names = input_names(recipe.kind, model_type)
    found = next((OTHER_INPUTS[name] for name in OTHER_INPUTS if name in names), None)
    reason = REFUSED_TYPES.get(model_type) or _unknown_rotation(files)
    if recipe.kind == "classifier" and model_type in SPLIT_CLASSIFIERS:
        reason = "an encoder-decoder, whose classifier the built-in engine does not serve"
    if found is not None:
        reason = f"whose network reads {found} next to the text; the built-in engine has text only"
    if reason is not None:
        raise ModelUnavailable(f"{files.checkpoint} has `model_type` {model_type!r}, {reason}")


def _unknown_rotation(files: CheckpointFiles) -> str | None:
    """Return the reason against a checkpoint whose rotary positions transformers does not have."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from backends.torch.stock.configs import read_config

    try:
        stated = getattr(read_config(files.checkpoint), "rope_parameters", None)
    except Exception:  # noqa: BLE001 - a load gives the reason
        return None
    parameters = stated if isinstance(stated, dict) else {}
    layers = [part for part in parameters.values() if isinstance(part, dict)]
    kinds = [part["rope_type"] for part in (layers or [parameters]) if isinstance(part.get("rope_type"), str)]
    unknown = next((kind for kind in kinds if kind not in {"default", *ROPE_INIT_FUNCTIONS}), None)
    if unknown is None:
        return None
    known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
    return (
        f"and rotary positions of the type {unknown!r} in `rope_scaling` of its config.json, which "
        f"transformers does not have (it has: {known}); they are those of other code: serve it with a "
        "backend that runs this code, or state the type that computes the same"
    )


def table_rows(files: CheckpointFiles, recipe: Recipe) -> int | None:
    """Return the number of tokens that a network has vectors for, None if no file states it."""
    if recipe.kind == "static":
        # Its table is compared with the tokenizer when it is read.
        return None
    config: Any = read_bert(files.config) or _text_config(files)
    rows = getattr(config, "vocab_size", files.config.get("vocab_size"))
    return rows if isinstance(rows, int) and rows > 0 else None


def _text_config(files: CheckpointFiles) -> Any:
    from backends.torch.stock.configs import read_config

    try:
        return read_config(files.checkpoint).get_text_config()
    except Exception:  # noqa: BLE001 - a load gives the reason, and code of the checkpoint may read what this cannot
        return None


def type_id_notes(files: CheckpointFiles, recipe: Recipe, tokenizer: TextTokenizer) -> Iterator[str]:
    """Yield a note if versions of transformers differ in the type ids that they give a network.

    Raises: ModelUnavailable if an id is beyond the network's types.
    """
    if recipe.kind in {"static", "dual", "pages"}:
        return
    type_ids = tokenizer.traits.type_ids
    if not type_ids.given or not _takes_type_ids(files, recipe):
        return
    types = _types_of(files, recipe)
    probe: ModelInput = (PROBE_TEXT, PROBE_TEXT) if recipe.kind == "classifier" else PROBE_TEXT
    (ids,) = tokenizer.encode([probe], Truncate.RIGHT).type_ids
    if types is not None and reads_type_ids(types) and max(ids, default=0) >= types:
        raise ModelUnavailable(
            f"the tokenizer of {files.checkpoint} gives a token the type {max(ids)}, and the network has "
            f"{types} types; list `model_input_names` without `token_type_ids` in its tokenizer_config.json"
        )
    if type_ids.differs and (types is None or (any(ids) and types > 1)):
        version = type_ids.library
        origin = f"made with transformers {version}" if version else "that names no version of transformers"
        yield (
            f"the network gets `token_type_ids`, as transformers 4 gave them to a checkpoint {origin}; "
            "transformers 5 gives none. `model_input_names` in its tokenizer_config.json decides otherwise"
        )


def _takes_type_ids(files: CheckpointFiles, recipe: Recipe) -> bool:
    if read_bert(files.config) is not None:
        return True
    from backends.torch.stock.architectures import input_names

    names = input_names(recipe.kind, recipe.model_type)
    # The inputs of a checkpoint's own code are not known here.
    return not names or "token_type_ids" in names


def _types_of(files: CheckpointFiles, recipe: Recipe) -> int | None:
    """Return the number of types of a network, None if neither file nor class states it."""
    found = read_bert(files.config)
    if found is not None:
        return found.type_vocab_size
    from backends.torch.stock.architectures import default_of

    types: int | None = files.config.get("type_vocab_size", default_of(recipe.model_type, "type_vocab_size"))
    return types
