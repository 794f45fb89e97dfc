"""Readers of pictures, pages and recordings, by what a checkpoint reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from backends.contract import Audio, Image, Truncate
from backends.torch.media.features import open_image_reader, open_sound_reader
from backends.torch.media.pages import open_page_reader
from backends.torch.native_configs import read_config
from backends.torch.refusals import refuse_on_error
from backends.torch.sequences import InputSequence, ReadPart

ReaderKind: TypeAlias = Literal["image", "audio", "page"]


class ReadsMedium(Protocol):
    """Reader of pictures or of recordings."""

    @property
    def medium(self) -> type[Image | Audio]:
        """Class of the parts that it reads."""

    @property
    def tokens_max(self) -> int:
        """Most tokens of a part."""

    def read(self, part: Image | Audio, truncate: Truncate) -> ReadPart:
        """Return the features of one part. Raises: InvalidWork."""

    def probe(self) -> InputSequence:
        """Return the features of a part made up, to try a network with."""


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
