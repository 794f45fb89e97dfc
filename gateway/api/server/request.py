"""A request for inference, as the handlers and decoders of dialects see it."""

from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from gateway.api.server.encoding import encode_json, json_bytes
from gateway.api.server.inference_api import InferenceApi, reply_headers
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.calls import Call
from gateway.media.sources import Fetch
from gateway.quotas.limits import Cost
from gateway.serve import Served

# The least that a request costs, which is known before its body is read.
LEAST = Cost(requests=1, tokens=1, inputs=1)
# Tokenizing is free of tokens.
LEAST_WITHOUT_TOKENS = Cost(requests=1, tokens=0, inputs=1)
# Files and jobs reach no model themselves.
LEAST_OF_BATCHES = Cost(requests=1)

Body = TypeVar("Body")
Reply = TypeVar("Reply")


class Request(msgspec.Struct, Generic[Body]):
    """One request with its decoded body. name: the model in its path, None without one."""

    body: Body
    context: RequestContext
    api: InferenceApi
    name: str | None = None

    @property
    def model(self) -> str | None:
        """The model in the path, or else in the field `model` of the body."""
        body: Any = self.body
        model: str | None = self.name or body.model
        return model

    @property
    def fetch(self) -> Fetch:
        """Fetches the pictures and recordings of the request, as in `fetch_sources`."""
        return partial(self.api.fetch_media, self.context, self.model)

    async def serve(self, call: Call, kind: type[Reply] | Any) -> tuple[Served, Reply | Any]:
        """Run the call through the gateway's stages, and return its reply too.

        kind: of the reply, or a union of kinds; any other kind is a bug. Raises: GatewayError.
        """
        served = await self.api.serve(self.context, call, self.body)
        assert isinstance(served.reply, kind)
        return served, served.reply

    async def reply(self, served: Served, value: Any, headers: dict[str, str] | None = None) -> HttpReply:
        """Return the reply with a value as JSON, as `encode_json` takes it."""
        # That of one input is small, unless it has several vectors.
        is_small = self.context.inputs == 1 and not served.reply.numbers
        body = json_bytes(value) if is_small else await encode_json(value)
        return self.reply_bytes(served, body, headers)

    def reply_bytes(
        self,
        served: Served,
        body: bytes | memoryview,
        headers: dict[str, str] | None = None,
        media_type: str = "application/json",
    ) -> HttpReply:
        """Return the reply with an encoded body; `server-timing` counts the time up to here as "encode"."""
        context = self.context
        context.timeline.lap("encode")
        all_headers = reply_headers(served, None if context.rows is None else context.rows.texts)
        if headers:
            all_headers |= headers
        all_headers["server-timing"] = context.timeline.server_timing()
        return HttpReply(body, all_headers, media_type)
