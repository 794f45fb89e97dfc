"""Small models of images and sound that real servers load: published configurations, random weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.engine.families import dual
from tests.engine.families.checkpoint import write_checkpoint
from tests.engine.families.family import Family, Json

# vLLM's attention on a processor has heads of 32 numbers or more.
WIDTHS: Json = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}


def make_clip(folder: Path) -> Path:
    """Write a CLIP with its own vocabulary of words."""
    return _make(dual.FAMILIES, "clip", folder, {"text_config": WIDTHS, "vision_config": WIDTHS})


def make_clap(folder: Path) -> Path:
    """Write a CLAP."""
    return _make(dual.FAMILIES, "clap", folder, {})


def _make(families: tuple[Family, ...], name: str, folder: Path, changes: Mapping[str, Json]) -> Path:
    """Write the checkpoint of a family. changes: by part of the configuration."""
    (family,) = (family for family in families if family.name == name)
    parts: dict[str, Any] = {part: family.config[part] | values for part, values in changes.items()}
    if folder.exists():
        folder.rmdir()
    return write_checkpoint(msgspec.structs.replace(family, config=family.config | parts), folder)
