"""Media in requests to other servers: as `data:` URIs, and as parts of a message in OpenAI's form."""

import base64
import struct
from collections.abc import Container, Sequence
from typing import Any

import pybase64

from backends.contract import Audio, Chat, EmbedParts, Image, Operation, Output, Part
from backends.contract.errors import UnsupportedWork

MEDIA_OPERATIONS: dict[type, Operation] = {Image: Operation.EMBED_IMAGE, Audio: Operation.EMBED_AUDIO}
PROBE_SIDE = 32
# A grey PNG of 32 x 32 pixels, to ask whether a server takes pictures.
PROBE_PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAAAAABWESUoAAAAGElEQVR42mNs"
    "YMAPmBhGFYwqGFUwQhUAAJe+AMD8WknZAAAAAElFTkSuQmCC"
)


# A WAV of a tenth of a second of silence at 16 kHz, to ask whether a server takes sound.
PROBE_SECONDS = 0.1
PROBE_RATE = 16_000


def base64_of(part: Image | Audio) -> str:
    """Return a picture or recording in base64."""
    encoded: str = pybase64.b64encode_as_string(part.data)
    return encoded


def data_uri(part: Image | Audio) -> str:
    """Return a picture or recording as a `data:` URI."""
    return f"data:{part.media_type};base64,{base64_of(part)}"


def content_of(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return parts as the content of a message."""
    return [_content_part(part) for part in parts]


def _content_part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = "audio_url" if isinstance(part, Audio) else "image_url"
    return {"type": kind, kind: {"url": data_uri(part)}}


def probe_image() -> Image:
    """Return a small grey picture."""
    return Image(base64.b64decode(PROBE_PICTURE.partition(",")[2]), "image/png", PROBE_SIDE, PROBE_SIDE)


def probe_recording() -> Audio:
    """Return a short silence."""
    samples = bytes(2 * int(PROBE_SECONDS * PROBE_RATE))
    form = struct.pack("<HHIIHH", 1, 1, PROBE_RATE, 2 * PROBE_RATE, 2, 16)
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(samples))
    riff = b"RIFF" + struct.pack("<I", len(chunks) + len(samples))
    return Audio(riff + chunks + samples, "audio/wav", PROBE_SECONDS)


def check_no_template(work: EmbedParts) -> None:
    """Check that a request brings nothing for a chat template, for wires without one.

    Raises: UnsupportedWork.
    """
    if work.turns:
        raise UnsupportedWork(
            "this model applies no chat template: send `messages` with images or sound as one message of the "
            "role `user`"
        )
    if work.chat not in (None, Chat()) or work.special_tokens:
        raise UnsupportedWork(
            "this model applies no chat template: leave out `chat_template`, `chat_template_kwargs`, "
            "`add_generation_prompt`, `continue_final_message` and `add_special_tokens`"
        )


def check_media(work: EmbedParts, offered: Container[Operation]) -> None:
    """Check that a server reads the media of a request. Raises: UnsupportedWork."""
    kinds = {type(part) for parts in work.inputs for part in parts}
    for kind, operation in MEDIA_OPERATIONS.items():
        if kind in kinds and operation not in offered:
            raise UnsupportedWork(f"this upstream's model does not {operation}")


def check_dense(work: EmbedParts) -> None:
    """Check that a request asks for one vector per input. Raises: UnsupportedWork."""
    if work.output is not Output.DENSE:
        raise UnsupportedWork(
            "this upstream gives one vector for an input with images or sound, and no others"
        )
