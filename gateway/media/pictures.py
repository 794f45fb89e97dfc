"""Pictures as callers send them, recognized by their content. Only headers are read; nothing is decoded.

Rule: no address is passed on. A `data:` URI or base64 is the picture itself; `fetch` reads addresses.
"""

import asyncio
import base64
import binascii
import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from backends.contract import Image, Part
from gateway.errors import InvalidInput

MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
# Beginnings of other content, and how its sender gets on.
OTHERS = {
    b"%PDF": "a PDF: send its pages as images",
    b"<svg": "an SVG: send it as PNG",
    b"<?xm": "an SVG or XML: send a picture as PNG",
    b"<htm": "an HTML page: send a picture",
    b"<!DO": "an HTML page: send a picture",
    b"II*\0": "a TIFF: send it as PNG",
    b"MM\0*": "a TIFF: send it as PNG",
}
# As many as Pillow itself calls safe.
PIXELS_MAX = 89_478_485
# Shorter sources are read at once, without a thread.
INLINE_CHARACTERS = 16 * 1024


# Pictures by their addresses, or the reason why there is none.
Fetched: TypeAlias = Mapping[str, bytes | ValueError]
# Fetches the pictures of one request at some addresses. Raises: GatewayError, if the request is refused.
Fetch: TypeAlias = Callable[[Sequence[str]], Awaitable[Fetched]]
NOTHING: Fetched = {}


class PictureSource(msgspec.Struct, frozen=True):
    """A picture as it was sent: a `data:` URI, base64, or an address."""

    text: str

    @property
    def is_address(self) -> bool:
        """True if the picture is elsewhere."""
        return self.text[:8].lower().startswith(("http://", "https://"))


async def read_parts(
    inputs: Sequence[Sequence[str | PictureSource]], field: str, fetch: Fetch | None = None
) -> tuple[tuple[Part, ...], ...]:
    """Return the parts of each input, with its pictures read. field: of the body.

    fetch: of the pictures at addresses; None refuses them. Raises: InvalidInput, and the errors of `fetch`.
    """
    sources = [part for parts in inputs for part in parts if isinstance(part, PictureSource)]
    addresses = tuple(dict.fromkeys(source.text for source in sources if source.is_address))
    fetched = await fetch(addresses) if addresses and fetch is not None else NOTHING
    if not fetched and sum(len(source.text) for source in sources) <= INLINE_CHARACTERS:
        return _read_all(inputs, field, fetched)
    return await asyncio.to_thread(_read_all, inputs, field, fetched)


def _read_all(
    inputs: Sequence[Sequence[str | PictureSource]], field: str, fetched: Fetched
) -> tuple[tuple[Part, ...], ...]:
    read: list[tuple[Part, ...]] = []
    for index, parts in enumerate(inputs):
        try:
            read.append(
                tuple(part if isinstance(part, str) else read_picture(part, fetched) for part in parts)
            )
        except ValueError as error:
            raise InvalidInput(f"the picture of `{field}` {index}: {error}", param=field) from error
    return tuple(read)


def read_picture(source: PictureSource, fetched: Fetched = NOTHING) -> Image:
    """Return a picture with its size. Raises: ValueError with the reason."""
    found = fetched.get(source.text)
    data = _bytes_of(source.text) if found is None else found
    if isinstance(data, ValueError):
        raise data
    for beginning, what in OTHERS.items():
        if data.lstrip()[: len(beginning)].lower() == beginning.lower():
            raise ValueError(f"it is {what}")
    name, width, height = _header_of(data)
    if width * height > PIXELS_MAX:
        raise ValueError(
            f"it has {width} x {height} pixels, more than {PIXELS_MAX:,} in all; send it smaller"
        )
    return Image(data, MEDIA_TYPES[name], width, height)


def _bytes_of(text: str) -> bytes:
    """Return the bytes of a `data:` URI or of base64. Raises: ValueError."""
    if text[:8].lower().startswith(("http://", "https://", "file://", "ftp://", "s3://", "gs://")):
        raise ValueError(
            "addresses are not fetched here: `media.fetch` allows none; send a `data:` URI or base64"
        )
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError("its `data:` URI is not base64; send data:image/png;base64,…")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("it is no `data:` URI and no base64") from error


def _header_of(data: bytes) -> tuple[str, int, int]:
    """Return format, width and height. Raises: ValueError."""
    try:
        import PIL.Image
    except ImportError as error:
        raise ValueError("this gateway was installed without Pillow: install its extra `media`") from error
    try:
        with PIL.Image.open(io.BytesIO(data), formats=tuple(MEDIA_TYPES)) as opened:
            return str(opened.format), *opened.size
    except PIL.Image.DecompressionBombError as error:
        raise ValueError(f"it has more than {PIXELS_MAX:,} pixels; send it smaller") from error
    except Exception as error:
        # Readers of foreign bytes raise what they come across.
        raise ValueError(f"it is none of these formats, or damaged: {', '.join(MEDIA_TYPES)}") from error
