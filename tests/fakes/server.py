"""ASGI app shared by the fakes of several wires; it records its requests and routes by path."""

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from backends.reference_texts import SCORED
from tests.fakes.tei import Hook, is_probe, vector_of


class ErrorReply(Exception):
    """Response of another status than 200."""

    def __init__(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(str(body))
        self.status = status
        self.headers = headers or {}
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()


class HeadedReply:
    """Reply of status 200 with headers."""

    def __init__(self, body: Any, headers: Mapping[str, str]) -> None:
        self.body = body
        self.headers = headers


Route = Callable[[dict[str, Any]], Any]


class FakeServer:
    """Fake server of one wire.

    requests: every (path, body) received. headers, queries: those of every request. hook: can answer instead
    of the server. api_key: required on all paths. The reference texts sent when a replica joins are not
    recorded and do not pass the hook.
    """

    def __init__(self, *, prefix: str = "") -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.queries: list[bytes] = []
        self.hook: Hook | None = None
        self.api_key: str | None = None
        self.prefix = prefix

    def routes(self) -> Mapping[str, Route]:
        """Return the routes by path without the prefix."""
        raise NotImplementedError

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI request."""
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.headers.append(headers)
        self.queries.append(scope["query_string"])
        reply_headers: Mapping[str, str] = {}
        try:
            self.check_request(scope, headers, body)
            status, content = await self._answer(scope["path"], headers, body)
            if isinstance(content, HeadedReply):
                content, reply_headers = json.dumps(content.body).encode(), content.headers
        except ErrorReply as error:
            status, content, reply_headers = error.status, error.body, error.headers
        raw_headers = [(name.encode(), value.encode()) for name, value in reply_headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw_headers})
        await send({"type": "http.response.body", "body": content})

    def check_request(self, scope: Any, headers: dict[str, str], body: bytes) -> None:
        """Check what a wire signs. Raises: ErrorReply."""

    async def _answer(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        self.check_key(path, headers)
        route = self.routes().get(path.removeprefix(self.prefix)) if path.startswith(self.prefix) else None
        parsed = json.loads(body) if body else {}
        is_call = not is_probe(parsed)
        if body and is_call:
            self.requests.append((path, parsed))
        if self.hook is not None and is_call and (answer := await self.hook(path, parsed)) is not None:
            return answer
        if route is None:
            raise ErrorReply(404, {"detail": "Not Found"})
        reply = route(parsed)
        if isinstance(reply, bytes | HeadedReply):
            return 200, reply
        return 200, json.dumps(reply).encode()

    def check_key(self, path: str, headers: dict[str, str]) -> None:  # noqa: ARG002 - vLLM's fake uses the path
        """Check the API key.

        Raises: ErrorReply.
        """
        if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            raise ErrorReply(401, {"detail": "Unauthorized"})


def encode_vector(vector: np.ndarray[Any, np.dtype[np.float32]], encoding_format: str) -> Any:
    """Encode a vector as base64 or as numbers."""
    raw = vector.astype("<f4")
    return base64.b64encode(raw.tobytes()).decode() if encoding_format == "base64" else raw.tolist()


def token_rows(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return (words and two special tokens, 8) float32, each row of length 1."""
    return np.stack([vector_of(word) for word in ("[CLS]", *text.split(), "[SEP]")])


def logit_of(query: str, text: str) -> float:
    """Return a logit between -4 and 4, different for each pair; the best for the answer in `SCORED`."""
    if (query, text) == (SCORED.query, SCORED.documents[0]):
        return 4.0
    return float(vector_of(f"{query}\n{text}")[0] * 4)
