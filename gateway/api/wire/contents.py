"""Texts, pictures and sound in the form of a message's content, as vLLM and OpenAI have them. Pure.

Source: vLLM 0.33, entrypoints/pooling/scoring, and its chat messages.
"""

import msgspec

from gateway.errors import InvalidInput


class MediaAddress(msgspec.Struct, omit_defaults=True):
    """Place of a picture or recording: a `data:` URI. detail: OpenAI's; the model decides it."""

    url: str
    detail: str | None = None


class InputAudio(msgspec.Struct, omit_defaults=True):
    """A recording in base64. format: OpenAI's; the content decides it."""

    data: str
    format: str | None = None


class ContentPart(msgspec.Struct, omit_defaults=True):
    """A part of a message: a text, or a picture or recording where the path takes them."""

    type: str
    text: str | None = None
    image_url: MediaAddress | str | None = None
    audio_url: MediaAddress | str | None = None
    input_audio: InputAudio | None = None


class Content(msgspec.Struct):
    """A text in the form of a message's content."""

    content: list[ContentPart]


def address_of(place: MediaAddress | str | None) -> str | None:
    """Return the address of a picture or recording, None if there is none."""
    return place.url if isinstance(place, MediaAddress) else place


def is_media(parts: list[ContentPart]) -> bool:
    """Return whether a part of a content is a picture or a recording."""
    return any(
        part.image_url is not None or part.audio_url is not None or part.input_audio is not None
        for part in parts
    )


def text_of_parts(parts: list[ContentPart], field: str) -> str:
    """Return the text of a content that has one part. Raises: InvalidInput."""
    if len(parts) != 1 or parts[0].type != "text" or parts[0].text is None:
        raise InvalidInput(
            f"`{field}` has content other than a single text; only text is accepted", param=field
        )
    return parts[0].text
