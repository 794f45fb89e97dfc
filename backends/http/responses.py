"""Reader of HTTP/1.1 responses, parsed by httptools.

Rule: every part of a response is bounded by the bytes that are read, because the parser reports a header line
only once it is complete. A response that breaks a bound or the protocol is refused.
"""

from typing import NoReturn

import httptools
import httpx
import msgspec

# The largest valid reply is 2,048 vectors of 8,192 JSON numbers; anything larger is a fault.
REPLY_LIMIT_BYTES = 512 * 1024 * 1024
HEAD_LIMIT_BYTES = 256 * 1024
# Bytes between two parts of a body: size and extension of a chunk, or the trailers after the last one.
FRAMING_LIMIT_BYTES = 64 * 1024
# Responses of status 1xx before the final one.
INFORMATIONAL_MAX = 32
REQUEST_TIMEOUT = 408


class RawResponse(msgspec.Struct, frozen=True):
    """Complete response with undecoded headers. Trailers are dropped."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class InvalidResponse(httpx.DecodingError):
    """Response that is not HTTP/1.1, or breaks a bound; the message is safe to show."""


class ResponseReader:
    """Reader of the responses of one connection, one after the other.

    has_begun: a byte of the response has been read. in_head: its head has begun and is not complete.
    keeps_alive: the server keeps the connection open after it. has_excess: more data followed it.
    body_bytes_max: bound on any body; a request may set a lower one.
    """

    def __init__(self, body_bytes_max: int = REPLY_LIMIT_BYTES) -> None:
        self._body_bytes_max = self._bytes_max = body_bytes_max
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._response: RawResponse | None = None
        self._failure: InvalidResponse | None = None
        self.keeps_alive = True
        self._restart()
        self.begin()

    @property
    def is_timeout(self) -> bool:
        """True if the head of a 408 was read: the server has waited for a request in vain."""
        return self.status == REQUEST_TIMEOUT

    def begin(self, body_bytes_max: int | None = None) -> None:
        """Expect the response of a new request. body_bytes_max: bound on its body, None for that of all."""
        self._bytes_max = min(self._body_bytes_max, body_bytes_max or self._body_bytes_max)
        self.has_begun = self.has_excess = False
        self.status = self._informational = 0

    def feed(self, data: bytes) -> RawResponse | None:
        """Parse data, and return the response once it is complete.

        Raises: InvalidResponse.
        """
        assert self._parser is not None
        self.has_begun = True
        self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._response is None:
                raise self._failure or InvalidResponse("the reply is not valid HTTP") from error
            self.has_excess = True
        if self._response is None:
            self._check_framing()
        response, self._response = self._response, None
        return response

    def finish(self) -> RawResponse | None:
        """Return the response that has no length and ends with the connection, or None."""
        if self._in_body and self._ends_with_connection:
            self.on_message_complete()
        response, self._response = self._response, None
        return response

    def close(self) -> None:
        """Drop the data that was read.

        Parser and reader reference each other, so that it would stay until the garbage collector runs.
        """
        self._restart()
        self._parser = None

    def _restart(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._header_bytes = self._body_bytes = 0
        # Bytes read since the head began, or since the last part of the body.
        self._framing_bytes = 0
        self.in_head = self._in_body = False
        self._ends_with_connection = True

    def _check_framing(self) -> None:
        """Bound what has been read since the last part of the body; most of it may have no callback."""
        if self._in_body and self._framing_bytes > FRAMING_LIMIT_BYTES:
            raise InvalidResponse("the reply's chunk headers or trailers are too large")
        if self._framing_bytes > HEAD_LIMIT_BYTES:
            raise InvalidResponse("the reply's head is too large")

    def _refuse(self, message: str) -> NoReturn:
        # The parser stops at an exception and raises one of its own.
        self._failure = InvalidResponse(message)
        raise self._failure

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """Stop at a second response, which no request asked for."""
        if self._response is not None:
            self._refuse("the reply is followed by another one")
        self.in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store one header, within the limit of the head; drop a trailer, within the limit of the framing."""
        self._header_bytes += len(name) + len(value)
        if self._in_body:
            if self._header_bytes > FRAMING_LIMIT_BYTES:
                self._refuse("the reply's trailers are too large")
            return
        if self._header_bytes > HEAD_LIMIT_BYTES:
            self._refuse("the reply's head is too large")
        self._headers.append((name, value))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        """Start counting the body."""
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        self.in_head, self._in_body = False, True
        self._header_bytes = self._framing_bytes = 0

    def on_body(self, piece: bytes) -> None:
        """Store a part of the body, within the limit of the reply."""
        self._body_bytes += len(piece)
        self._framing_bytes = 0
        if self._body_bytes > self._bytes_max:
            self._refuse(f"the reply is too large: more than {self._bytes_max} bytes")
        self._chunks.append(piece)

    def on_message_complete(self) -> None:
        """Build the response; a status of 1xx precedes the final response."""
        assert self._parser is not None
        headers, chunks = self._headers, self._chunks
        self._restart()
        if self.status < 200:
            self._informational += 1
            if self._informational > INFORMATIONAL_MAX:
                self._refuse("the reply follows too many informational ones")
            return
        self.keeps_alive = self._parser.should_keep_alive()
        self._response = RawResponse(
            self.status, headers, chunks[0] if len(chunks) == 1 else b"".join(chunks)
        )


def is_closing_error(data: bytes) -> bool:
    """Return whether data on an idle connection is one error reply with which the server closes it.

    HAProxy and Apache send a 408, whose status alone shows that it answers no request.
    """
    reader = ResponseReader()
    try:
        response = reader.feed(data)
    except InvalidResponse:
        return False
    finally:
        reader.close()
    if reader.has_excess:
        return False
    is_last_error = response is not None and response.status >= 400 and not reader.keeps_alive
    return reader.is_timeout or is_last_error
