"""Upload of one file as multipart/form-data, which is never in memory as a whole."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import msgspec
from multipart import (
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)

from gateway.errors import InvalidInput, MalformedBody, UnsupportedMedia

# Bytes of all fields besides the file, and their number.
FIELDS_BYTES_MAX = 16 * 1024
PARTS_MAX = 16
FILENAME_CHARACTERS_MAX = 255
CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
FILE = "file"


class Sink(Protocol):
    """Target of the file's bytes."""

    async def write(self, data: bytes) -> None:
        """Append bytes."""


class UploadedForm(msgspec.Struct):
    """Fields of an upload. filename: None until the file has begun."""

    filename: str | None = None
    fields: dict[str, str] = {}


class FormReader:
    """Reads a form from pieces of a body. start: called when the file begins, with the fields before it."""

    def __init__(self, content_type: str, start: Callable[[], Awaitable[Sink]]) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get("boundary", "")
        if kind != "multipart/form-data" or not boundary:
            raise UnsupportedMedia("send the file as multipart/form-data with `purpose` and `file`")
        self._parser = PushMultipartParser(boundary, max_segment_count=PARTS_MAX)
        self._start = start
        self._form = UploadedForm()
        self._field: str | None = None
        self._sink: Sink | None = None
        self._values: dict[str, bytes] = {}

    async def read(self, pieces: AsyncIterator[bytes]) -> UploadedForm:
        """Return the form after its last piece. Raises: InvalidInput, MalformedBody, the sink's errors."""
        try:
            async for piece in pieces:
                for event in self._parser.parse(piece):
                    await self._take(event)
            self._parser.close()
        except ParserLimitReached as error:
            raise InvalidInput("the form has too many or too large fields") from error
        except MultipartError as error:
            raise MalformedBody("the body is not valid multipart/form-data") from error
        if self._form.filename is None:
            raise InvalidInput("the form has no `file`", param=FILE)
        self._form.fields = {name: _text(value, name) for name, value in self._values.items()}
        return self._form

    async def _take(self, event: MultipartSegment | bytes | bytearray | None) -> None:
        match event:
            case MultipartSegment():
                await self._begin(event)
            case None:
                self._field = None
            case _ if self._field == FILE and self._sink is not None:
                await self._sink.write(bytes(event))
            case _ if self._field is not None:
                self._values[self._field] += event
                if sum(map(len, self._values.values())) > FIELDS_BYTES_MAX:
                    raise InvalidInput("the fields of the form are too large", param=self._field)

    async def _begin(self, segment: MultipartSegment) -> None:
        self._field = segment.name
        if segment.name != FILE:
            if segment.name in self._values:
                raise InvalidInput(f"the form has `{segment.name}` twice", param=segment.name)
            self._values[segment.name] = b""
            return
        if self._form.filename is not None:
            raise InvalidInput("the form has several files; send one", param=FILE)
        name = CONTROLS.sub("", segment.filename or "upload")
        self._form.filename = name[-FILENAME_CHARACTERS_MAX:]
        self._sink = await self._start()


def _text(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"`{name}` is not UTF-8", param=name) from error
