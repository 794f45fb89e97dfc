"""An HTTP reply, before the server adds the headers that every reply carries."""

import msgspec
from litestar import Response
from litestar.openapi.datastructures import ResponseSpec

# Media type of an Arrow IPC stream.
ARROW = "application/vnd.apache.arrow.stream"
# Media type of numbers without JSON.
OCTETS = "application/octet-stream"
# Documents a reply whose status is its whole content.
EMPTY = ResponseSpec(None, generate_examples=False, description="An empty body")

# The `security` of a handler that needs no key, in the OpenAPI document.
NO_KEY: list[dict[str, list[str]]] = [{}]


class HttpReply(msgspec.Struct, frozen=True):
    """Body, headers, media type and status. The length and the request id are added when it is sent."""

    body: bytes | memoryview
    headers: dict[str, str]
    media_type: str = "application/json"
    status: int = 200


def is_arrow(media_type: str) -> bool:
    """Return whether a media type, with its parameters, is an Arrow IPC stream."""
    return media_type.partition(";")[0].strip().lower() == ARROW


def encode_headers(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers in the form that ASGI sends."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def empty() -> Response[bytes]:
    """Return status 200 without a body, for handlers that Litestar calls."""
    return Response(b"", media_type="text/plain")
