"""Pictures in requests to other servers: as `data:` URIs, and as parts of a message in OpenAI's form."""

import base64
from collections.abc import Sequence
from typing import Any

from backends.contract import Audio, EmbedParts, Image, Output, Part
from backends.errors import UnsupportedWork

# A grey PNG of 32 x 32 pixels, to ask whether a server takes pictures.
PROBE_PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAAAAABWESUoAAAAGElEQVR42mNs"
    "YMAPmBhGFYwqGFUwQhUAAJe+AMD8WknZAAAAAElFTkSuQmCC"
)


def data_uri(part: Image | Audio) -> str:
    """Return a picture or recording as a `data:` URI."""
    return f"data:{part.media_type};base64,{base64.b64encode(part.data).decode()}"


def content_of(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return parts as the content of a message. Raises: UnsupportedWork for sound."""
    return [_content_part(part) for part in parts]


def _content_part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Audio):
        raise UnsupportedWork("this upstream reads texts and images, and no sound")
    return {"type": "image_url", "image_url": {"url": data_uri(part)}}


def check_dense(work: EmbedParts) -> None:
    """Check that a request asks for one vector per input. Raises: UnsupportedWork."""
    if work.output is not Output.DENSE:
        raise UnsupportedWork("this upstream gives one vector for an input with images, and no others")
