"""The way of a POST from its path to its answer: key, body, handler, bytes.

Litestar documents these handlers, and answers everything else. Routed by it, a call would also pass its
middleware, request object, dependencies and response, which cost as much as all that the gateway does.
Rule: nobody without a key has a body read; a body is decoded once, straight into the handler's struct.
"""

from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from typing import Any

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.utils.path import normalize_path

from gateway.api.server.allowed_values import note_choices
from gateway.api.server.error_bodies import failed, plain_headers
from gateway.api.server.http_protocol import CONNECTION
from gateway.api.server.paths import NAME, Dialect, template_and_name
from gateway.api.server.request_context import RequestContext, context_of
from gateway.api.server.responses import DIRECT, Api, HttpReply, spoken_by
from gateway.errors import BodyTooLarge, InvalidInput, MalformedBody

# ASGI's receive and send, as any server and framework hand them over.
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
ASGIApp = Callable[[Any, Receive, Send], Awaitable[None]]

# An answer beyond this, uvicorn's bound on what it buffers, is over when the client has taken it.
AT_ONCE_BYTES = 64 * 1024
MSGPACK = frozenset({"application/msgpack", "application/x-msgpack"})


class Endpoint(msgspec.Struct, frozen=True):
    """One handler and how its bodies are read.

    fields: on a path that dialects share, which field tells which dialect. msgpack: for handlers that take
    it beside JSON.
    """

    handler: HTTPRouteHandler
    json: "msgspec.json.Decoder[Any]"
    msgpack: "msgspec.msgpack.Decoder[Any] | None"
    fields: Mapping[str, Dialect]

    def decoded(self, body: bytes, context: RequestContext) -> Any:
        """The handler's struct; a body that tells its dialect settles whose errors the caller reads.

        Raises: InvalidInput, MalformedBody, what msgspec raises.
        """
        if self.msgpack is not None and _is_msgpack(context):
            return _unpacked(self.msgpack, body)
        try:
            data = self.json.decode(body)
        except msgspec.ValidationError as error:
            self._listen(_fields_of(body), context)
            note_choices(error, self.json.type)
            raise
        if self.fields:
            present = {field for field in self.fields if getattr(data, field) is not msgspec.UNSET}
            if self._listen(present, context) is None:
                names = " or ".join(f"`{field}`" for field in self.fields)
                raise InvalidInput(f"the body has {names}, and not those of several dialects")
        return data

    def _listen(self, present: Container[str], context: RequestContext) -> Dialect | None:
        told = spoken_by(present, self.fields)
        context.dialect = told or context.dialect
        return told


class Router:
    """ASGI in front of Litestar. handlers: those that say so take `data`, `context`, `api` and a `name`."""

    def __init__(self, app: ASGIApp, handlers: Iterable[Any], api: Api, body_bytes: int) -> None:
        self._app = app
        self._api = api
        self._body_bytes = body_bytes
        self._ways: dict[str, Endpoint] = {}
        for handler in handlers:
            if isinstance(handler, HTTPRouteHandler) and DIRECT.items() <= handler.opt.items():
                way = _way_of(handler)
                self._ways.update((path, way) for path in handler.paths)
        # Those without a model's name in their path, as they are called.
        self._plain = {path: way for path, way in self._ways.items() if NAME not in path}

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """HttpReply a call of such a handler; anything else goes on."""
        way, name = self._way(scope["path"]) if scope["type"] == "http" else (None, None)
        if way is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        context = context_of(scope)
        try:
            answer = await self._answer(way, context, name, receive)
            status, body, headers = 200, answer.body, plain_headers(answer.headers)
            headers.append((b"content-type", answer.media_type.encode()))
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets an answer
            status, body, told = failed(error, context)
            headers = plain_headers(told)
        headers += context.readable_by
        headers.append((b"content-length", b"%d" % len(body)))
        line = scope.get("extensions", {}).get(CONNECTION)
        if line is not None and len(body) <= AT_ONCE_BYTES and line.answer(status, headers, body):
            return
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if len(body) > AT_ONCE_BYTES:
            # uvicorn waits for a slow client before a message, never after the last one.
            await send({"type": "http.response.body", "body": body, "more_body": True})
            body = b""
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _way(self, path: str) -> tuple[Endpoint | None, str | None]:
        """The handler of a path, and the model's name in it. Slashes too many do not count."""
        if (way := self._plain.get(path)) is not None:
            return way, None
        template, name = template_and_name(normalize_path(path))
        return self._ways.get(template), name

    async def _answer(
        self, way: Endpoint, context: RequestContext, name: str | None, receive: Receive
    ) -> HttpReply:
        self._api.authenticator.authenticate(context)
        data = way.decoded(await self._body(receive), context)
        answer: HttpReply = await way.handler.fn(data=data, context=context, api=self._api, name=name)
        return answer

    async def _body(self, receive: Receive) -> bytes:
        """Raises: BodyTooLarge, as soon as there is too much."""
        pieces: list[bytes] = []
        size = 0
        while True:
            message: Any = await receive()
            size += len(message["body"])
            if size > self._body_bytes:
                raise BodyTooLarge("the body is larger than this gateway takes")
            pieces.append(message["body"])
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _way_of(handler: HTTPRouteHandler) -> Endpoint:
    body = _body_of(handler)
    return Endpoint(
        handler,
        msgspec.json.Decoder(body),
        msgspec.msgpack.Decoder(body) if handler.opt.get("msgpack") else None,
        handler.opt.get("fields", {}),
    )


def _body_of(handler: HTTPRouteHandler) -> Any:
    """The struct that a handler's `data` is annotated with, under Litestar's mark of a JSON body."""
    annotation = handler.fn.__annotations__["data"]
    return annotation.__args__[0] if hasattr(annotation, "__args__") else annotation


def _is_msgpack(context: RequestContext) -> bool:
    kind, _, _ = context.header(b"content-type").partition(";")
    return kind.strip().lower() in MSGPACK


def _unpacked(decoder: "msgspec.msgpack.Decoder[Any]", body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        note_choices(error, decoder.type)
        raise
    except msgspec.DecodeError as error:
        raise MalformedBody(f"the body is not valid msgpack: {error}") from error


def _fields_of(body: bytes) -> Container[str]:
    """Which fields a body has that is not what its struct says; read only to tell its dialect."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
