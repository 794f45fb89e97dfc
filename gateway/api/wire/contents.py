"""Texts in the form of a message's content, as vLLM accepts them next to plain strings. Pure.

Source: vLLM 0.33, entrypoints/pooling/scoring.
"""

import msgspec

from gateway.errors import InvalidInput


class ContentPart(msgspec.Struct):
    """A part of a message. Only text is accepted."""

    type: str
    text: str | None = None


class Content(msgspec.Struct):
    """A text in the form of a message's content."""

    content: list[ContentPart]


def text_of_parts(parts: list[ContentPart], field: str) -> str:
    """Return the text of a content that has one part. Raises: InvalidInput."""
    if len(parts) != 1 or parts[0].type != "text" or parts[0].text is None:
        raise InvalidInput(
            f"`{field}` has content other than a single text; only text is accepted", param=field
        )
    return parts[0].text
