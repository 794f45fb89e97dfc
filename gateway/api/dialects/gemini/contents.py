"""Contents of Gemini's requests: texts, pictures and recordings, all parts of one content for one vector.

Source: Gemini API v1beta, Content and Part; google-genai 3.4.0, which sends bytes as base64 with the letters
of URLs; LiteLLM, which writes names in snake case.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.api.wire.media import one_text
from gateway.errors import EmptyInput, InvalidInput
from gateway.media.sources import PictureSource, SoundSource, SourcePart


class GeminiBlob(msgspec.Struct):
    """A picture or recording in base64. mimeType, mime_type: its kind; the content decides its format."""

    data: str
    mime_type: str = msgspec.field(default="", name="mimeType")
    mime_type_snake: str = msgspec.field(default="", name="mime_type")


class GeminiFile(msgspec.Struct):
    """A picture or recording at an address that `media.fetch` allows."""

    uri: str = msgspec.field(default="", name="fileUri")
    uri_snake: str = msgspec.field(default="", name="file_uri")
    mime_type: str = msgspec.field(default="", name="mimeType")
    mime_type_snake: str = msgspec.field(default="", name="mime_type")


class GeminiPart(msgspec.Struct):
    """A part of a content: `text`, `inlineData` or `fileData`, one of them. Other kinds are refused."""

    text: str | None = None
    inline_data: GeminiBlob | None = msgspec.field(default=None, name="inlineData")
    inline_data_snake: GeminiBlob | None = msgspec.field(default=None, name="inline_data")
    file_data: GeminiFile | None = msgspec.field(default=None, name="fileData")
    file_data_snake: GeminiFile | None = msgspec.field(default=None, name="file_data")
    video_metadata: Any = msgspec.field(default=None, name="videoMetadata")


class GeminiContent(msgspec.Struct):
    """An input, whose parts have one vector. role: of a chat; it changes nothing."""

    parts: list[GeminiPart]
    role: str | None = None

    def sources(self, index: int) -> list[SourcePart]:
        """Return the parts; texts alone are one text. index: of the content.

        Raises: EmptyInput, InvalidInput.
        """
        if not self.parts:
            raise InvalidInput(f"content {index} has no part; send a `text` or `inlineData`", param="content")
        parts = [_source_of(part, index) for part in self.parts]
        if "" in parts:
            raise EmptyInput(f"content {index} has an empty text", param="content")
        return one_text(parts)

    def text(self, index: int) -> str:
        """Return the text of a content that has nothing else. Raises: EmptyInput, InvalidInput."""
        parts = self.sources(index)
        if not isinstance(parts[0], str) or len(parts) > 1:
            raise InvalidInput(f"content {index} is no text; send parts with `text`", param="content")
        return parts[0]


def one_of(values: Sequence[Any], field: str) -> Any:
    """Return the value of a field that has several spellings. Raises: InvalidInput if they differ."""
    given = [value for value in values if value is not None and value != ""]
    if any(value != given[0] for value in given):
        raise InvalidInput(f"`{field}` has two values; send one of them", param=field)
    return given[0] if given else None


def _source_of(part: GeminiPart, index: int) -> SourcePart:
    """Return one part. index: of its content. Raises: InvalidInput."""
    blob: GeminiBlob | None = one_of((part.inline_data, part.inline_data_snake), "inlineData")
    file: GeminiFile | None = one_of((part.file_data, part.file_data_snake), "fileData")
    if sum(each is not None for each in (part.text, blob, file)) != 1:
        raise InvalidInput(
            f"content {index} has a part without `text`, `inlineData` or `fileData`, or with several of them",
            param="content",
        )
    if part.text is not None:
        return part.text
    medium = blob or file
    assert medium is not None
    kind = one_of((medium.mime_type, medium.mime_type_snake), "mimeType") or ""
    source = blob.data if blob is not None else one_of((medium.uri, medium.uri_snake), "fileUri") or ""  # type: ignore[union-attr]
    if kind.startswith("image/"):
        return PictureSource(source)
    if kind.startswith("audio/"):
        return SoundSource(source)
    raise InvalidInput(
        f"content {index} has a part of `mimeType` {kind[:64]!r}; images and audio are read", param="content"
    )
