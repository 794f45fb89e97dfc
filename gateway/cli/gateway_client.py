"""HTTP client of a running gateway, for commands that query it.

It follows no redirect, so that a key goes only to the address that was given.
"""

import http.client
import os
import secrets
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, BinaryIO, TypeVar
from urllib.parse import urlsplit

import msgspec

TIMEOUT_S = 3.0
SUCCESSES = (200, 201, 204)
REPLY_BYTES_MAX = 16 * 1024 * 1024
BLOCK_BYTES = 256 * 1024
MESSAGE_CHARACTERS_MAX = 300

Body = TypeVar("Body")


class GatewayUnavailable(Exception):
    """The gateway does not answer now, but may later. The message is for a person."""


class RequestRefused(Exception):
    """The request cannot succeed as it is. The message is for a person."""


class GatewayClient:
    """Client that reconnects after any failure.

    url: scheme, host and port. key: sent with each request. ca: authority of the gateway's certificate.
    timeout_s: of each request.
    Raises: RequestRefused if the URL or the file of `ca` cannot be used.
    """

    def __init__(
        self, url: str, key: str | None, ca: Path | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        parts = urlsplit(url)
        # Without a name and a password, which a URL may contain.
        shown = url.rpartition("@")[2]
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestRefused(f"{shown} is not an address such as http://127.0.0.1:8080")
        self._connection = _connection(parts.scheme, parts.hostname, _port(parts.netloc, shown), ca)
        self._connection.timeout = timeout_s
        self._address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str, kind: type[Body]) -> Body:
        """Return the JSON reply as a struct. Raises: GatewayUnavailable, RequestRefused."""
        return self._decode(self.send("GET", path), kind)

    def post(self, path: str, content: object, kind: type[Body]) -> Body:
        """Send a JSON body, or none, and return the reply. Raises: GatewayUnavailable, RequestRefused."""
        return self._decode(self.send("POST", path, content), kind)

    def upload(
        self,
        path: str,
        fields: Mapping[str, str],
        file: BinaryIO,
        on_progress: Callable[[int], object],
        kind: type[Body],
    ) -> Body:
        """Send a form whose last field is a file, in blocks. Raises: GatewayUnavailable, RequestRefused."""
        boundary = secrets.token_hex(16)
        form = _Form(boundary, fields, file, on_progress)
        headers = {
            "content-type": f"multipart/form-data; boundary={boundary}",
            "content-length": str(form.size),
        }
        return self._decode(self._checked("POST", path, form.blocks(), headers), kind)

    def download(
        self, path: str, file: IO[bytes], on_progress: Callable[[int, int], object], bytes_max: int
    ) -> None:
        """Write the body of a reply to a file, in blocks; it has so many bytes at most.

        Raises: GatewayUnavailable, RequestRefused.
        """
        try:
            self._connection.request("GET", path, headers=self._headers)
            response = self._connection.getresponse()
            if response.status != 200:
                self._check(response.status, response.read(REPLY_BYTES_MAX))
            size, done = response.length or 0, 0
            self._check_size(size, bytes_max)
            while block := response.read(BLOCK_BYTES):
                done += len(block)
                self._check_size(done, bytes_max)
                file.write(block)
                on_progress(done, size)
        except http.client.HTTPException as error:
            self.close()
            raise GatewayUnavailable(f"the gateway at {self._address} ended its reply early") from error
        if done < size:
            self.close()
            raise GatewayUnavailable(f"the gateway at {self._address} ended its reply early")

    def send(self, method: str, path: str, content: object = None) -> bytes:
        """Return the body of a reply that reports success. Raises: GatewayUnavailable, RequestRefused."""
        body = None if content is None else msgspec.json.encode(content)
        headers = {} if body is None else {"content-type": "application/json"}
        return self._checked(method, path, body, headers)

    def _checked(
        self, method: str, path: str, sent: bytes | Iterator[bytes] | None, headers: Mapping[str, str]
    ) -> bytes:
        """Return the body of a reply that reports success. Raises: GatewayUnavailable, RequestRefused."""
        try:
            status, body = self._request(method, path, sent, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise GatewayUnavailable(f"the gateway at {self._address} does not answer: {reason}") from error
        self._check(status, body)
        return body

    def _check(self, status: int, body: bytes) -> None:
        """Check the status of a reply. Raises: GatewayUnavailable, RequestRefused."""
        if status in SUCCESSES:
            return
        words = f"the gateway at {self._address} returned {status}: {_error_message(body)}"
        if status >= 500:
            raise GatewayUnavailable(words)
        raise RequestRefused(f"{words}{self._hint(status)}")

    def _check_size(self, size: int, bytes_max: int) -> None:
        """Close the connection if a reply has too many bytes. Raises: RequestRefused."""
        if size > bytes_max:
            self.close()
            raise RequestRefused(f"a file of the gateway at {self._address} has more than {bytes_max} bytes")

    def _decode(self, body: bytes, kind: type[Body]) -> Body:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestRefused(f"the server at {self._address} is not a gateway of this release") from error

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _hint(self, status: int) -> str:
        """Explain where the key comes from, if none was sent."""
        if status != 401 or self._headers:
            return ""
        return "; set the key in GATEWAY_API_KEY, or pass a file with --key-file"

    def _request(
        self, method: str, path: str, sent: bytes | Iterator[bytes] | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        self._connection.request(method, path, sent, {**self._headers, **headers})
        response = self._connection.getresponse()
        body = response.read(REPLY_BYTES_MAX)
        if not response.isclosed():
            self.close()
        return response.status, body


class _Form:
    """Form whose last field is a file, which is read while it is sent. on_progress: gets the bytes so far."""

    def __init__(
        self, boundary: str, fields: Mapping[str, str], file: BinaryIO, on_progress: Callable[[int], object]
    ) -> None:
        head = "".join(
            f'--{boundary}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in fields.items()
        )
        # Percent signs for what would end the name, as browsers write them.
        name = Path(file.name).name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
        file_head = f'content-disposition: form-data; name="file"; filename="{name}"'
        self._head = f"{head}--{boundary}\r\n{file_head}\r\n\r\n".encode(errors="replace")
        self._end = f"\r\n--{boundary}--\r\n".encode()
        self._file = file
        self._on_progress = on_progress
        self.size = len(self._head) + os.fstat(file.fileno()).st_size + len(self._end)

    def blocks(self) -> Iterator[bytes]:
        """Yield the form."""
        yield self._head
        sent = 0
        while block := self._file.read(BLOCK_BYTES):
            yield block
            sent += len(block)
            self._on_progress(sent)
        yield self._end


def _connection(scheme: str, host: str, port: int | None, ca: Path | None) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise RequestRefused(f"{ca} cannot be used: {error.strerror or error}") from error
    return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)


def _port(netloc: str, shown: str) -> int | None:
    try:
        return urlsplit(f"//{netloc}").port
    except ValueError as error:
        raise RequestRefused(f"{shown} is not an address such as http://127.0.0.1:8080") from error


def _error_message(body: bytes) -> str:
    try:
        fields = msgspec.json.decode(body, type=Mapping[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "an unreadable reply"
    error = fields.get("error")
    if isinstance(error, Mapping):
        error = error.get("message")
    return str(error or fields.get("message"))[:MESSAGE_CHARACTERS_MAX]
