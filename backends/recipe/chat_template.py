"""Chat template of a checkpoint and the special tokens that it may name, read from the small files. Pure.

Source: transformers 5.23, tokenization_utils_base and the documentation of chat templates: the file
chat_template.jinja takes precedence over tokenizer_config.json, whose templates may have names.
"""

from typing import Any

from backends.contract.errors import ModelUnavailable
from backends.recipe.files import CheckpointFiles
from backends.recipe.recipe import ChatTemplate

TEMPLATE_FILE = "chat_template.jinja"
# The name of the template that is used unless a request names another one.
DEFAULT_NAME = "default"
TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_chat_template(files: CheckpointFiles) -> ChatTemplate | None:
    """Return the checkpoint's chat template, None without one. Raises: ModelUnavailable."""
    source = _file_text(files) if files.has(TEMPLATE_FILE) else _configured(files)
    return None if source is None else ChatTemplate(source, _special_tokens(files))


def _file_text(files: CheckpointFiles) -> str:
    try:
        return (files.checkpoint / TEMPLATE_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"no readable {TEMPLATE_FILE} in {files.checkpoint}") from error


def _configured(files: CheckpointFiles) -> str | None:
    stated = files.tokenizer_config.get("chat_template")
    if isinstance(stated, list):
        named = {item.get("name"): item.get("template") for item in stated if isinstance(item, dict)}
        stated = named.get(DEFAULT_NAME)
    return stated if isinstance(stated, str) else None


def _special_tokens(files: CheckpointFiles) -> dict[str, str]:
    stated = {**files.read_json("special_tokens_map.json"), **files.tokenizer_config}
    tokens = {name: _text_of(stated.get(name)) for name in TOKEN_NAMES}
    return {name: text for name, text in tokens.items() if text is not None}


def _text_of(token: Any) -> str | None:
    """Return the text of a token, which a file writes as a string or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
