"""Folder of a checkpoint's network: the top, or the one of sentence-transformers' module for a whole CLIP."""

from pathlib import Path
from typing import Any

import msgspec

from backends.contract.errors import ModelUnavailable

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
