"""The way of a POST from its path to its answer: key, body, handler, bytes.

Litestar documents these handlers, and answers everything else. Routed by it, a call would also pass its
middleware, request object, dependencies and response, which cost as much as all that the gateway does.
Rule: nobody without a key has a body read; a body is decoded once, straight into the handler's struct.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.utils.path import normalize_path

from gateway.api.answering import STRAIGHT, Answer, Api
from gateway.api.exchange import Exchange, exchange_of
from gateway.api.failures import failed, plain_headers
from gateway.api.paths import PREFIX, model_name
from gateway.errors import BodyTooLarge

# ASGI's receive and send, as any server and framework hand them over.
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
ASGIApp = Callable[[Any, Receive, Send], Awaitable[None]]

NAME = "{name:str}"


class Straight:
    """ASGI in front of Litestar. handlers: those that say so take `data`, `exchange`, `api` and a `name`."""

    def __init__(self, app: ASGIApp, handlers: Iterable[Any], api: Api, body_bytes: int) -> None:
        self._app = app
        self._api = api
        self._body_bytes = body_bytes
        self._handlers: dict[str, tuple[HTTPRouteHandler, msgspec.json.Decoder[Any]]] = {}
        for handler in handlers:
            if isinstance(handler, HTTPRouteHandler) and STRAIGHT.items() <= handler.opt.items():
                decoder = msgspec.json.Decoder(_body_of(handler))
                self._handlers.update((path, (handler, decoder)) for path in handler.paths)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer a call of such a handler; anything else goes on."""
        template, name = _template(scope["path"]) if scope["type"] == "http" else ("", None)
        found = self._handlers.get(template)
        if found is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        exchange = exchange_of(scope)
        handler, decoder = found
        try:
            answer = await self._answer(handler, decoder, exchange, name, receive)
            status, body, headers = 200, answer.body, plain_headers(answer.headers)
            headers.append((b"content-type", b"application/json"))
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets an answer
            status, body, told = failed(error, exchange, scope["path"])
            headers = plain_headers(told)
        headers += exchange.readable_by
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _answer(
        self,
        handler: HTTPRouteHandler,
        decoder: "msgspec.json.Decoder[Any]",
        exchange: Exchange,
        name: str | None,
        receive: Receive,
    ) -> Answer:
        self._api.identity.of(exchange)
        data = decoder.decode(await self._body(receive))
        answer: Answer = await handler.fn(data=data, exchange=exchange, api=self._api, name=name)
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


def _body_of(handler: HTTPRouteHandler) -> Any:
    """The struct that a handler's `data` is annotated with, under Litestar's mark of a JSON body."""
    annotation = handler.fn.__annotations__["data"]
    return annotation.__args__[0] if hasattr(annotation, "__args__") else annotation


def _template(path: str) -> tuple[str, str | None]:
    """The path as handlers write it, and the model's name in it; slashes too many do not count."""
    path = normalize_path(path)
    if not path.startswith(PREFIX):
        return path, None
    name, _, operation = path.removeprefix(PREFIX).partition("/")
    return f"{PREFIX}{NAME}/{operation}", model_name(name)
