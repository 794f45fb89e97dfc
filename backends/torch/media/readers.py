"""Readers of pictures, pages and recordings, by what a checkpoint reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.torch.media.features import open_image_reader, open_sound_reader
from backends.torch.media.pages import open_page_reader
from backends.torch.media.reading_wire import ReaderKind, ReadsMedium
from backends.torch.refusals import refuse_on_error
from backends.torch.stock.configs import read_config

OPENERS: dict[ReaderKind, Callable[[Path, Any], ReadsMedium]] = {
    "image": open_image_reader,
    "audio": open_sound_reader,
    "page": open_page_reader,
}


def open_reader(kind: ReaderKind, checkpoint: Path) -> ReadsMedium:
    """Return the reader of a checkpoint. Raises: ModelUnavailable."""
    with refuse_on_error(f"{checkpoint} could not be loaded"):
        config = read_config(checkpoint)
    return OPENERS[kind](checkpoint, config)
