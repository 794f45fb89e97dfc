"""The way of a POST from its head to its answer: key, body, handler, bytes.

Litestar routes and documents these handlers; between route and handler it would make a request object,
resolve dependencies and build a response, which costs as much as all that the gateway does. So this stands
in front.
Rule: nobody without a key has a body read; a body is decoded once, straight into the handler's struct.
"""

from typing import Any

import msgspec
from litestar.enums import ScopeType
from litestar.handlers import HTTPRouteHandler
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Send

from gateway.api.answering import Answer, Api
from gateway.api.exchange import exchange_of
from gateway.api.failures import plain_headers
from gateway.api.paths import model_name
from gateway.errors import BodyTooLarge


class Straight(ASGIMiddleware):
    """For handlers that take `data`, `exchange`, `api` and a `name`, and give an Answer."""

    scopes = (ScopeType.HTTP,)

    def __init__(self, api: Api, body_bytes: int) -> None:
        self._api = api
        self._body_bytes = body_bytes
        self._decoders: dict[HTTPRouteHandler, msgspec.json.Decoder[Any]] = {}

    async def handle(self, scope: Any, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Answer a call of such a handler; anything else goes on."""
        handler: HTTPRouteHandler = scope["route_handler"]
        if not handler.opt.get("straight"):
            await next_app(scope, receive, send)
            return
        exchange = exchange_of(scope)
        self._api.identity.of(exchange)
        data = self._decoder(handler).decode(await self._body(receive))
        name = model_name(scope["path_params"].get("name"))
        answer: Answer = await handler.fn(data=data, exchange=exchange, api=self._api, name=name)
        headers = plain_headers(answer.headers)
        headers.append((b"content-type", b"application/json"))
        headers.append((b"content-length", str(len(answer.body)).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body, "more_body": False})

    def _decoder(self, handler: HTTPRouteHandler) -> msgspec.json.Decoder[Any]:
        if handler not in self._decoders:
            field = handler.parsed_data_field
            assert field is not None
            self._decoders[handler] = msgspec.json.Decoder(field.annotation)
        return self._decoders[handler]

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
