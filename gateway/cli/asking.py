"""One connection to a running gateway, for commands that ask it something.

It follows no redirect: a key goes to the address that was said, and nowhere else.
"""

import http.client
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

TIMEOUT_S = 3.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024
SAID_CHARACTERS_MAX = 300

Kind = TypeVar("Kind")


class Away(Exception):
    """The gateway does not answer now; it may later. The message is for a person."""


class Refused(Exception):
    """It answers, and will not tell; the message is for a person."""


class Asker:
    """Opened anew after whatever went wrong. url: scheme, host and port. key: sent with each request.

    Raises: Refused where the URL or the file of `ca` is none.
    """

    def __init__(self, url: str, key: str | None, ca: Path | None = None) -> None:
        parts = urlsplit(url)
        # Without a name and a password, which may stand before it.
        shown = url.rpartition("@")[2]
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Refused(f"{shown} is no address such as http://127.0.0.1:8080")
        self._connection = _connection(parts.scheme, parts.hostname, _port(parts.netloc, shown), ca)
        self._address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str, kind: type[Kind]) -> Kind:
        """A JSON answer. Raises: Away, Refused."""
        try:
            status, body = self._asked(path)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Away(f"the gateway at {self._address} does not answer: {reason}") from error
        if status >= 500:
            raise Away(f"the gateway answers {status}: {_said(body)}")
        if status != 200:
            raise Refused(f"the gateway answers {status}: {_said(body)}{self._hint(status)}")
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused("what answers there is no gateway of this release") from error

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()

    def _hint(self, status: int) -> str:
        """Where a key is taken from, for who showed none."""
        if status != 401 or self._headers:
            return ""
        return "; the key of an operator is read from GATEWAY_API_KEY, or from the file of --key-file"

    def _asked(self, path: str) -> tuple[int, bytes]:
        self._connection.request("GET", path, headers=self._headers)
        response = self._connection.getresponse()
        body = response.read(ANSWER_BYTES_MAX)
        if not response.isclosed():
            self.close()
        return response.status, body


def _connection(scheme: str, host: str, port: int | None, ca: Path | None) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise Refused(f"{ca} cannot be used: {error.strerror or error}") from error
    return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)


def _port(netloc: str, shown: str) -> int | None:
    try:
        return urlsplit(f"//{netloc}").port
    except ValueError as error:
        raise Refused(f"{shown} is no address such as http://127.0.0.1:8080") from error


def _said(body: bytes) -> str:
    """The message in an error's body."""
    try:
        told = msgspec.json.decode(body, type=Mapping[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "nothing that can be read"
    return str(told.get("error") or told.get("message"))[:SAID_CHARACTERS_MAX]
