"""Small files of a checkpoint on this machine: JSON, settings of its network, and the network's folder.

Pure. Source: sentence-transformers 6.2, `Transformer.load_config` and `_load_init_kwargs`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from backends.contract.errors import ModelUnavailable


def read_json_file(path: Path, kind: Any) -> Any:
    """Return the content of a file as a type of msgspec, None if there is no such file.

    Raises: ModelUnavailable.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"{path} is not valid JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file, or {} if there is no such file. Raises: ModelUnavailable."""
    return read_json_file(path, dict[str, Any]) or {}


# The first file that is there and not empty counts. Versions before 2 named it after the architecture.
SETTINGS_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Names of versions before 5 and their successors.
RENAMED_KEYS = {
    "model_args": "model_kwargs",
    "tokenizer_args": "processor_kwargs",
    "config_args": "config_kwargs",
}


def read_network_settings(read_json: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of a network under their present names, or {} if there are none.

    read_json: reads a file of the network's folder, {} if it is missing.
    """
    files = map(read_json, SETTINGS_FILES)
    settings: dict[str, Any] = next((content for content in files if content), {})
    # A key under its old name replaces the other one.
    renamed = {new: settings[old] for old, new in RENAMED_KEYS.items() if old in settings}
    return {key: value for key, value in settings.items() if key not in RENAMED_KEYS} | renamed


def processor_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of tokenizer_config.json that the settings replace."""
    arguments: dict[str, Any] = settings.get("processor_kwargs") or {}
    return arguments


CLIP_MODULE = "CLIPModel"
# Modules whose effect a request for vectors states itself.
SCALING = frozenset({"Normalize"})


def network_folder(checkpoint: Path) -> Path:
    """Return the folder with the network's config.json, the checkpoint itself if it has one.

    Raises: ModelUnavailable if modules.json puts more behind a whole CLIP than the engine has.
    """
    if (checkpoint / "config.json").is_file():
        return checkpoint
    entries = _read(checkpoint / "modules.json", list[dict[str, Any]]) or []
    kinds = [str(entry.get("type", "")).rsplit(".", 1)[-1] for entry in entries]
    if not kinds or kinds[0] != CLIP_MODULE:
        return checkpoint
    others = sorted(set(kinds[1:]) - SCALING)
    settings = _read(checkpoint / "config_sentence_transformers.json", dict[str, Any]) or {}
    prompts = settings.get("prompts") or {}
    if others or any(prompts.values()):
        added = ", ".join(others) or "prompts"
        raise ModelUnavailable(
            f"{checkpoint} has {added} next to the module {CLIP_MODULE}, which the built-in engine does not "
            "have; serve it with Infinity behind this gateway"
        )
    folder = checkpoint / str(entries[0].get("path", ""))
    return folder if folder.parent == checkpoint and (folder / "config.json").is_file() else checkpoint


def _read(path: Path, kind: Any) -> Any:
    """Return the content of a file, None if there is no such file. Raises: ModelUnavailable."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelUnavailable(f"{path} is not readable as JSON: {error}") from error
