"""HTTP client of a running gateway, for commands that query it.

It follows no redirect, so that a key goes only to the address that was given, and uses no proxy of the
environment. It loads httpx when a command calls, because every command imports its errors.
"""

import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

import msgspec

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 3.0
SUCCESSES = (200, 201, 204)
REPLY_BYTES_MAX = 16 * 1024 * 1024
MESSAGE_CHARACTERS_MAX = 300

NO_KEY = "; set the key in GATEWAY_API_KEY, or pass a file with --key-file"
WRONG_KEY = "; the key that was sent is that of --key-file, else of GATEWAY_API_KEY"

Body = TypeVar("Body")


class GatewayUnavailable(Exception):
    """The gateway does not answer now, but may later. The message is for a person."""


class RequestRefused(Exception):
    """The request cannot succeed as it is. The message is for a person."""


class GatewayClient:
    """Client that reconnects after any failure.

    url: scheme, host and port. key: sent with each request. ca: authority of the gateway's certificate.
    timeout_s: of each step of a request. is_optional: the gateway may refuse the key and need none: it is
    not sent again then. hint: end of the message if the gateway does not answer.
    Raises: RequestRefused if the URL or the file of `ca` cannot be used.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        ca: Path | None = None,
        timeout_s: float = TIMEOUT_S,
        *,
        is_optional: bool = False,
        hint: str = "",
    ) -> None:
        import httpx

        # Without a name and a password, which a URL may contain.
        shown = url.rpartition("@")[2]
        parts, base = urlsplit(""), None
        with suppress(ValueError, httpx.InvalidURL):
            parts = urlsplit(url)
            if parts.scheme in ("http", "https") and parts.hostname:
                base = httpx.URL(scheme=parts.scheme, host=parts.hostname, port=parts.port)
        if base is None:
            raise RequestRefused(f"{shown} is not an address such as http://127.0.0.1:8080")
        self._address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if base.scheme == "https":
                context = ssl.create_default_context(cafile=ca)
        except OSError as error:
            raise RequestRefused(f"{ca} cannot be used: {error.strerror or error}") from error
        self._has_key = bool(key)
        self._hint = hint
        self._is_optional = is_optional and self._has_key
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._client = httpx.Client(
            base_url=base, headers=headers, timeout=timeout_s, verify=context, trust_env=False
        )

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
        name = Path(file.name).name.encode(errors="replace").decode()
        with self._reply(
            "POST", path, data=fields, files={"file": (name, _Upload(file, on_progress))}
        ) as reply:
            return self._decode(self._checked(reply), kind)

    def download(
        self, path: str, file: IO[bytes], on_progress: Callable[[int, int], object], bytes_max: int
    ) -> None:
        """Write the body of a reply to a file, in blocks; it has so many bytes at most.

        Raises: GatewayUnavailable, RequestRefused.
        """
        with self._reply("GET", path) as reply:
            if reply.status_code != 200:
                self._checked(reply)
            size, done = int(reply.headers.get("content-length", "0")), 0
            self._check_size(size, bytes_max)
            for block in reply.iter_raw():
                done += len(block)
                self._check_size(done, bytes_max)
                file.write(block)
                on_progress(done, size)

    def start_of(self, path: str, bytes_max: int) -> bytes:
        """Return the first bytes of a file. Raises: GatewayUnavailable, RequestRefused."""
        start = bytearray()
        with self._reply("GET", path) as reply:
            if reply.status_code != 200:
                self._checked(reply)
            for block in reply.iter_raw():
                start += block
                if len(start) >= bytes_max:
                    break
        return bytes(start[:bytes_max])

    def send(self, method: str, path: str, content: object = None) -> bytes:
        """Return the body of a reply that reports success. Raises: GatewayUnavailable, RequestRefused."""
        body = None if content is None else msgspec.json.encode(content)
        headers = {} if body is None else {"content-type": "application/json"}
        with self._reply(method, path, content=body, headers=headers) as reply:
            if reply.status_code != 401 or not self._is_optional:
                return self._checked(reply)
        del self._client.headers["authorization"]
        self._has_key = self._is_optional = False
        return self.send(method, path, content)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    @contextmanager
    def _reply(self, method: str, path: str, **sent: Any) -> "Iterator[httpx.Response]":
        """Send a request and yield its reply, whose body is not read yet. Raises: GatewayUnavailable."""
        import httpx

        is_answered = False
        try:
            with self._client.stream(method, path, **sent) as reply:
                is_answered = True
                yield reply
        except httpx.HTTPError as error:
            if is_answered and isinstance(error, httpx.RemoteProtocolError):
                raise GatewayUnavailable(f"the gateway at {self._address} ended its reply early") from error
            cause: BaseException | None = error
            while cause is not None and not getattr(cause, "strerror", None):
                cause = cause.__context__
            reason = getattr(cause, "strerror", None) or str(error) or type(error).__name__
            raise GatewayUnavailable(
                f"the gateway at {self._address} does not answer: {reason}{self._hint}"
            ) from error

    def _checked(self, reply: "httpx.Response") -> bytes:
        """Return the body of a reply that reports success. Raises: GatewayUnavailable, RequestRefused."""
        body = bytearray()
        for block in reply.iter_raw():
            body += block
            if len(body) > REPLY_BYTES_MAX:
                break
        if reply.status_code in SUCCESSES:
            return bytes(body)
        words = f"the gateway at {self._address} returned {reply.status_code}: {_error_message(body)}"
        if reply.status_code >= 500:
            raise GatewayUnavailable(words)
        if reply.status_code == 401:
            words += WRONG_KEY if self._has_key else NO_KEY
        raise RequestRefused(words)

    def _check_size(self, size: int, bytes_max: int) -> None:
        if size > bytes_max:
            raise RequestRefused(f"a file of the gateway at {self._address} has more than {bytes_max} bytes")

    def _decode(self, body: bytes, kind: type[Body]) -> Body:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestRefused(f"the server at {self._address} is not a gateway of this release") from error


class _Upload:
    """File that reports how many of its bytes were read."""

    def __init__(self, file: BinaryIO, on_progress: Callable[[int], object]) -> None:
        self._file = file
        self._on_progress = on_progress
        self._sent = 0

    def fileno(self) -> int:
        """Return the descriptor, from which httpx takes the size."""
        return self._file.fileno()

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        block = self._file.read(size)
        self._sent += len(block)
        self._on_progress(self._sent)
        return block


def _error_message(body: bytes | bytearray) -> str:
    try:
        fields = msgspec.json.decode(body, type=Mapping[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "an unreadable reply"
    error = fields.get("error")
    if isinstance(error, Mapping):
        error = error.get("message")
    return str(error or fields.get("message"))[:MESSAGE_CHARACTERS_MAX]
