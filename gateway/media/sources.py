"""Pictures and recordings as callers send them, and the parts that they become.

Rule: no address is passed on. A `data:` URI or base64 is the medium itself; `fetch` reads addresses.
"""

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from backends.contract import Audio, Image, Operation, Part
from gateway.errors import InvalidInput
from gateway.media.pictures import read_picture
from gateway.media.recordings import read_recording

# Shorter sources are read at once, without a thread.
INLINE_CHARACTERS = 16 * 1024
SCHEMES = ("http://", "https://", "file://", "ftp://", "s3://", "gs://")

# Bytes by their addresses, or the reason why there are none.
Fetched: TypeAlias = Mapping[str, bytes | ValueError]
# Fetches some addresses of one request, for an operation. Raises: GatewayError, if the request is refused.
Fetch: TypeAlias = Callable[[Operation, Sequence[str]], Awaitable[Fetched]]
NOTHING: Fetched = {}


class MediaSource(msgspec.Struct, frozen=True):
    """A picture or recording as it was sent. content: a `data:` URI, base64, an address, or its bytes."""

    content: str | bytes

    @property
    def address(self) -> str | None:
        """Address of a medium that is elsewhere, None for one that is here."""
        text = self.content
        return text if isinstance(text, str) and text[:8].lower().startswith(SCHEMES[:2]) else None


class PictureSource(MediaSource, frozen=True):
    """A picture as it was sent."""


class SoundSource(MediaSource, frozen=True):
    """A recording as it was sent."""


SourcePart: TypeAlias = str | PictureSource | SoundSource

URL_LETTERS = str.maketrans("-_", "+/")


async def read_parts(
    inputs: Sequence[Sequence[SourcePart]], field: str, fetched: Fetched = NOTHING
) -> tuple[tuple[Part, ...], ...]:
    """Return the parts of each input, with its pictures and recordings read. field: of the body.

    fetched: as `fetch_sources` returns it. Raises: InvalidInput.
    """
    sources = _media_of(inputs)
    if not fetched and sum(len(source.content) for source in sources) <= INLINE_CHARACTERS:
        return _read_all(inputs, field, fetched)
    return await asyncio.to_thread(_read_all, inputs, field, fetched)


async def fetch_sources(
    inputs: Sequence[Sequence[SourcePart]], operation: Operation, fetch: Fetch | None
) -> Fetched:
    """Return the bytes at the addresses of one request. operation: that needs them.

    fetch: None fetches nothing. Raises: the errors of `fetch`.
    """
    found = [source.address for source in _media_of(inputs)]
    addresses = tuple(dict.fromkeys(address for address in found if address is not None))
    return await fetch(operation, addresses) if addresses and fetch is not None else NOTHING


def embed_operation(inputs: Sequence[Sequence[SourcePart]]) -> Operation:
    """Return the operation that inputs need to be embedded."""
    has_sound = any(isinstance(source, SoundSource) for source in _media_of(inputs))
    return Operation.EMBED_AUDIO if has_sound else Operation.EMBED_IMAGE


def _media_of(inputs: Sequence[Sequence[SourcePart]]) -> list[MediaSource]:
    return [part for parts in inputs for part in parts if isinstance(part, MediaSource)]


def _read_all(
    inputs: Sequence[Sequence[SourcePart]], field: str, fetched: Fetched
) -> tuple[tuple[Part, ...], ...]:
    return tuple(
        tuple(
            part if isinstance(part, str) else _read(part, f"`{field}` {index}", field, fetched)
            for part in parts
        )
        for index, parts in enumerate(inputs)
    )


def _read(source: PictureSource | SoundSource, place: str, field: str, fetched: Fetched) -> Image | Audio:
    """Return one medium. Raises: InvalidInput."""
    is_picture = isinstance(source, PictureSource)
    try:
        data = bytes_of(source, fetched)
        return read_picture(data) if is_picture else read_recording(data)
    except ValueError as error:
        name = "picture" if is_picture else "recording"
        raise InvalidInput(f"the {name} of {place}: {error}", param=field) from error


def bytes_of(source: MediaSource, fetched: Fetched = NOTHING) -> bytes:
    """Return the bytes of a medium. Raises: ValueError with the reason."""
    content = source.content
    if isinstance(content, bytes):
        return content
    found = fetched.get(content)
    if isinstance(found, ValueError):
        raise found
    return _decoded(content) if found is None else found


def _decoded(text: str) -> bytes:
    """Return the bytes of a `data:` URI or of base64. Raises: ValueError."""
    if text[:8].lower().startswith(SCHEMES[2:]):
        raise ValueError("addresses of this scheme are not read; send https, a `data:` URI or base64")
    if text[:8].lower().startswith(SCHEMES[:2]):
        raise ValueError(
            "addresses are not fetched here: `media.fetch` allows none; send a `data:` URI or base64"
        )
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError("its `data:` URI is not base64; send data:image/png;base64,…")
        what = "what follows the comma of its `data:` URI is no base64"
    else:
        what = "it is no `data:` URI and no base64"
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        # As tools write it: in lines, with the letters of URLs, or without its padding.
        text = "".join(text.split()).translate(URL_LETTERS)
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(what) from error
