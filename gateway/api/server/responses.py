"""What every dialect's handlers do the same way: who calls, serve, and the headers of a reply."""

from collections.abc import Container, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec
from litestar import Response
from litestar.openapi.datastructures import ResponseSpec

from backends.contract import Capabilities, Operation, Reply
from gateway.api.server.authentication import Authenticator
from gateway.api.server.paths import Dialect
from gateway.api.server.request_context import RequestContext
from gateway.calls import Call, inputs_of
from gateway.errors import EmptyInput, InvalidInput
from gateway.quotas.headers import rate_limit_headers
from gateway.serve import Caller, Gateway, Served


class Api:
    """What handlers are given: the gateway, whose key a request carries, and the bound on inputs."""

    def __init__(self, gateway: Gateway, authenticator: Authenticator, inputs_max: int) -> None:
        self.gateway = gateway
        self.authenticator = authenticator
        self.inputs_max = inputs_max

    async def serve(self, context: RequestContext, call: Call) -> Served:
        """Take a decoded call through the story, and note what the access log wants to know."""
        context.timeline.lap("parse")
        context.inputs = len(inputs_of(call.work))
        if _is_bulk(context):
            call = msgspec.structs.replace(call, bulk=True)
        caller = Caller(self.authenticator.authenticate(context), _timeout_asked(context))
        served = await self.gateway.serve(call, caller, context.timeline)
        context.tokens = served.reply.tokens
        return served

    async def decode_ids(
        self, context: RequestContext, model: str | None, operation: Operation, ids: Sequence[list[int]]
    ) -> list[str]:
        """Decode token ids with the vocabulary that the model's config names.

        Raises: what `Routes.resolve` and `IdDecoder.decode` raise.
        """
        tenant = self.authenticator.authenticate(context)
        route = self.gateway.routes.resolve(tenant, model, operation)
        return await self.gateway.upstreams[route.upstream].ids.decode(ids, route.deadline_s)

    def capabilities_of(self, model: str | None, operation: Operation) -> Capabilities | None:
        """What a model can do, or the operation's default; None while no replica of it has joined.

        Whether the caller may use it is asked when the call is served.
        Raises: ModelNotFound, what `Routes.default` raises.
        """
        routes = self.gateway.routes
        name = routes.default_model(operation) if model is None else model
        return self.gateway.upstreams[routes.upstream_of(name)].capabilities

    def texts(self, given: str | Sequence[str], field: str) -> tuple[str, ...]:
        """The inputs of a call, whether one was given or a list.

        Raises: EmptyInput, InvalidInput.
        """
        texts = (given,) if isinstance(given, str) else tuple(given)
        if not texts:
            raise EmptyInput(f"`{field}` is an empty list", param=field)
        if len(texts) > self.inputs_max:
            raise InvalidInput(
                f"{len(texts)} inputs; this gateway takes {self.inputs_max} in a call", param=field
            )
        return texts

    def whole_texts(self, given: str | Sequence[str], field: str) -> tuple[str, ...]:
        """Like `texts`, and none of them may be empty."""
        texts = self.texts(given, field)
        for index, text in enumerate(texts):
            if not text:
                raise EmptyInput(f"`{field}` {index} is an empty string", param=field)
        return texts


NOT_SENT = "not sent"
# What tells all by its status.
EMPTY = ResponseSpec(None, generate_examples=False, description="An empty body")
# How a handler says that it takes and gives what `straight.py` hands it.
DIRECT = {"straight": True}


def direct_by(**fields: Dialect) -> dict[str, Any]:
    """Like DIRECT, for a path that dialects share: which one speaks is told by the field that a body has.

    Of the fields there is one in each body, in the struct UNSET where it is not; the first one's dialect
    answers what cannot be told.
    """
    return {**DIRECT, "fields": fields}


def spoken_by(present: Container[str], fields: Mapping[str, Dialect]) -> Dialect | None:
    """The dialect of a body, by the fields it has; None where it has those of several, or of none."""
    told = {dialect for field, dialect in fields.items() if field in present}
    return told.pop() if len(told) == 1 else None


class HttpReply(msgspec.Struct, frozen=True):
    """What a handler gives back: a body, JSON unless it says otherwise, and the headers beside its own."""

    body: bytes
    headers: dict[str, str]
    media_type: str = "application/json"


def empty() -> Response[bytes]:
    """200, and no body."""
    return Response(b"", media_type="text/plain")


def _timeout_asked(context: RequestContext) -> float | None:
    """Raises: InvalidInput."""
    sent = context.header(b"x-timeout-s", NOT_SENT)
    return None if sent is NOT_SENT else _timeout_s(sent)


def _is_bulk(context: RequestContext) -> bool:
    """Raises: InvalidInput."""
    sent = context.header(b"x-priority", "interactive").lower()
    if sent not in ("interactive", "bulk"):
        raise InvalidInput("x-priority is interactive or bulk", param="x-priority")
    return sent == "bulk"


def _timeout_s(sent: str) -> float:
    """Raises: InvalidInput."""
    try:
        seconds = float(sent) if "_" not in sent else 0.0
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidInput("x-timeout-s must be a positive number of seconds", param="x-timeout-s")
    return seconds


def reply_headers(served: Served) -> dict[str, str]:
    """What every successful reply carries beside its body."""
    headers = rate_limit_headers(served.limit_statuses)
    if served.degraded:
        headers["x-quota-mode"] = "degraded"
    if served.reply.truncated != ():
        headers["x-truncated-inputs"] = _ranges(served.reply.truncated)
    if served.fingerprint is not None:
        headers["x-embedding-fingerprint"] = served.fingerprint
    return headers


def _ranges(indices: tuple[int, ...] | None) -> str:
    """Indices as 0-3,7: written one by one, 2,048 of them are more than some clients read."""
    if indices is None:
        return "unknown"
    runs = []
    for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(runs)


def respond(
    context: RequestContext, served: Served, body: bytes, headers: dict[str, str] | None = None
) -> HttpReply:
    """The HTTP reply; everything from here on is "encode" in server-timing."""
    timeline = context.timeline
    timeline.lap("encode")
    all_headers = reply_headers(served)
    if headers:
        all_headers |= headers
    all_headers["server-timing"] = timeline.server_timing()
    return HttpReply(body, all_headers)


def expect_reply(reply: Reply, kind: Any) -> Any:
    """A reply that must be of one kind, or of several; another is a fault of ours."""
    assert isinstance(reply, kind)
    return reply
