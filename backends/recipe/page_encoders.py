"""Encoders of pages: one vector per token of a query and per patch of a page's picture, as ColPali has them.

Pure. Source: processors of transformers 5.23 for ColPali and ColQwen2.
"""

from typing import Any, NamedTuple

from backends.contract.errors import ModelUnavailable
from backends.recipe.files import CheckpointFiles
from backends.recipe.recipe import QueryForm

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
