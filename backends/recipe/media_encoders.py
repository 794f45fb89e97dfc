"""Networks of other media than text: dual encoders of images or sound, and encoders of pages.

Pure. Source: configurations and processors of transformers 5.23, by `model_type`.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

from backends.contract.errors import ModelUnavailable
from backends.recipe.files import CheckpointFiles
from backends.recipe.recipe import QueryExpansion, QueryForm

Medium: TypeAlias = Literal["image", "audio"]
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class DualEncoder(NamedTuple):
    """Properties of a type of network.

    medium: what it reads next to texts. positions: tokens of its texts where config.json states none.
    offset: positions that hold no token. width_keys: places of the width of its vectors in config.json, and
    width: the default. pads: each text is padded to all positions.
    """

    medium: Medium
    positions: int
    width_keys: tuple[tuple[str, ...], ...]
    width: int
    offset: int = 0
    pads: bool = False


PROJECTED = (("projection_dim",),)
OF_TEXT = (("text_config", "projection_size"), ("text_config", "hidden_size"))
DUAL_ENCODERS = {
    "clap": DualEncoder("audio", 514, PROJECTED, 512, offset=2),
    "clip": DualEncoder("image", 77, PROJECTED, 512),
    "siglip": DualEncoder("image", 64, OF_TEXT, 768, pads=True),
    "siglip2": DualEncoder("image", 64, OF_TEXT, 768, pads=True),
}


def dual_encoder(files: CheckpointFiles) -> DualEncoder | None:
    """Return the properties of a checkpoint's network, None if it is of another type, or has own code."""
    if "auto_map" in files.config:
        return None
    return DUAL_ENCODERS.get(str(files.config.get("model_type", "")))


def text_positions(files: CheckpointFiles) -> int | None:
    """Return the most tokens of a text by the network's table, None for any other network."""
    found = dual_encoder(files)
    if found is None:
        return None
    stated = _text_config(files).get("max_position_embeddings", found.positions)
    if type(stated) is int and stated > found.offset:
        return stated - found.offset
    raise ModelUnavailable(
        f"{files.checkpoint}/config.json: `max_position_embeddings` is {stated!r}, no number of tokens"
    )


def dual_width(files: CheckpointFiles) -> int | None:
    """Return the width of the vectors, None for any other network."""
    found = dual_encoder(files)
    if found is None:
        return None
    values = (_value_at(files.config, keys) for keys in found.width_keys)
    return next((value for value in values if isinstance(value, int)), found.width)


def text_padding(files: CheckpointFiles, max_tokens: int) -> QueryExpansion | None:
    """Return how each text is padded, None if none is. Raises: ModelUnavailable if no file states it."""
    found = dual_encoder(files)
    if found is None or not found.pads:
        return None
    config = files.tokenizer_config
    if config.get("padding_side", "right") != "right":
        raise ModelUnavailable(
            f"{files.checkpoint}/tokenizer_config.json: `padding_side` is {config['padding_side']!r}; the "
            "built-in engine pads the texts of dual encoders on the right, as they were trained"
        )
    token = config.get("pad_token") or files.read_json("special_tokens_map.json").get("pad_token")
    if token is None:
        raise ModelUnavailable(
            f"{files.checkpoint} states no `pad_token`, which its texts are padded with; add it to "
            "tokenizer_config.json"
        )
    text = token["content"] if isinstance(token, dict) else str(token)
    # A tokenizer that returns no mask has the network attend to padding, as in training.
    attended = "attention_mask" not in config.get("model_input_names", ())
    return QueryExpansion(max_tokens, attended=attended, tokens=(text,))


def require_processor(files: CheckpointFiles) -> None:
    """Raise ModelUnavailable if no file states how images or sound become features."""
    if not any(files.has(name) for name in PROCESSOR_FILES):
        raise ModelUnavailable(
            f"{files.checkpoint} has no {PROCESSOR_FILES[0]}, which states how images or sound become "
            "features; copy it from the model that this one was trained from"
        )


def _text_config(files: CheckpointFiles) -> dict[str, Any]:
    found = files.config.get("text_config") or files.config.get("text_config_dict") or {}
    return found if isinstance(found, dict) else {}


def _value_at(config: dict[str, Any], keys: tuple[str, ...]) -> Any:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


PROCESSOR_FILE = "processor_config.json"
# Fillers behind a query, whose vectors count.
FILLERS = 10


class PageEncoder(NamedTuple):
    """Properties of a type of network.

    positions: most tokens of a query where config.json states none. query_prefix: text before a query where
    no file states it. begins: a query begins with the tokenizer's first token.
    """

    positions: int
    query_prefix: str
    begins: bool


PAGE_ENCODERS = {
    "colpali": PageEncoder(8192, "Question: ", begins=True),
    "colqwen2": PageEncoder(32_768, "Query: ", begins=False),
}


def page_encoder(files: CheckpointFiles) -> PageEncoder | None:
    """Return the properties of a checkpoint's network, None if it is of another type, or has own code."""
    if "auto_map" in files.config:
        return None
    return PAGE_ENCODERS.get(str(files.config.get("model_type", "")))


def query_positions(files: CheckpointFiles) -> int | None:
    """Return the most tokens of a query by the network's configuration, None for any other network."""
    found = page_encoder(files)
    if found is None:
        return None
    whole = _object(files.config, "vlm_config")
    for config in (_object(whole, "text_config"), whole):
        stated = config.get("max_position_embeddings")
        if type(stated) is int and stated > 0:
            return stated
    return found.positions


def query_form(files: CheckpointFiles) -> QueryForm:
    """Return the text around a query. Raises: ModelUnavailable if no file states the filler."""
    found = page_encoder(files)
    assert found is not None
    begin = _token(files, "bos_token") if found.begins else ""
    prefix = files.read_json(PROCESSOR_FILE).get("query_prefix") or found.query_prefix
    return QueryForm(begin + str(prefix), _token(files, "pad_token") * FILLERS + "\n")


def _token(files: CheckpointFiles, key: str) -> str:
    token = files.tokenizer_config.get(key) or files.read_json("special_tokens_map.json").get(key)
    if token is None:
        raise ModelUnavailable(
            f"{files.checkpoint} states no `{key}`, which its queries contain; add it to "
            "tokenizer_config.json"
        )
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _object(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}
