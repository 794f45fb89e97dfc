"""Items of SIE's requests: texts, images and sound, and their parts.

Source: SIE 0.3.1. In msgpack the content of an image is bytes; in JSON, which has none, it is base64.
"""

from typing import Any

import msgspec

from gateway.api.server.body import Integer
from gateway.errors import EmptyInput, InvalidInput
from gateway.media.sources import PictureSource, SoundSource, SourcePart

UNSUPPORTED_KINDS = ("video", "document")


class SieImage(msgspec.Struct):
    """An image. data: its bytes; in JSON base64. format: SIE's; the content decides it."""

    data: bytes
    format: str | None = None


class SieAudio(msgspec.Struct):
    """A recording. data: its bytes; in JSON base64. format, sample_rate: SIE's; the content decides them."""

    data: bytes
    format: str | None = None
    sample_rate: Integer | None = None


class SieItem(msgspec.Struct):
    """One input. id: returned with its output. video and document are refused."""

    id: str | None = None
    text: str | None = None
    images: list[SieImage] | None = None
    audio: SieAudio | None = None
    video: Any = None
    document: Any = None

    @property
    def has_media(self) -> bool:
        """True if the item is more than a text."""
        return bool(self.images) or self.audio is not None


def text_of_item(item: SieItem, field: str, index: int) -> str:
    """Return the text of an item without media. Raises: InvalidInput."""
    _check_kinds(item, field, index)
    if item.text is None:
        raise InvalidInput(f"`{field}` {index} has no `text`", param=field)
    return item.text


def parts_of_item(item: SieItem, field: str, index: int) -> list[SourcePart]:
    """Return the parts of an item: images, then sound, then text. Raises: EmptyInput, InvalidInput."""
    _check_kinds(item, field, index)
    parts: list[SourcePart] = [PictureSource(image.data) for image in item.images or ()]
    if item.audio is not None:
        parts.append(SoundSource(item.audio.data))
    if item.text is not None:
        parts.append(item.text)
    if not parts:
        raise EmptyInput(f"`{field}` {index} has no `text`, `images` or `audio`", param=field)
    return parts


def _check_kinds(item: SieItem, field: str, index: int) -> None:
    """Check that an item has nothing that no model here reads. Raises: InvalidInput."""
    for kind in UNSUPPORTED_KINDS:
        if getattr(item, kind) is not None:
            raise InvalidInput(
                f"`{field}` {index} has `{kind}`; texts, images and sound are taken", param=field
            )
