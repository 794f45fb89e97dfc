"""Inference endpoints: how a dialect declares them, and how one of them answers a request.

One declaration creates the `Endpoint`, which the middleware calls for a POST, and the Litestar handler, which
is documented and answers other methods. docs/decisions/002-litestar-routing.md has the reasons and figures.
"""

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping
from functools import cache, update_wrapper
from inspect import Parameter, Signature
from typing import Any, NamedTuple, TypeAlias, cast, get_args

import msgspec
from litestar import Response, post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody

from gateway.api.server.body import MARK, note_choices, place_of_broken_text, without_mark
from gateway.api.server.body_bounds import UNCOUNTED_BYTES, check_count_of_inputs, check_values, decoded_bytes
from gateway.api.server.encoding import BYTES
from gateway.api.server.error_bodies import ErrorFormat, broken_text, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import BELOW_MODEL, NAME, Answer, RouteTable, route_options
from gateway.api.server.request import LEAST, Request
from gateway.api.server.request_context import HttpContext, RequestContext
from gateway.api.server.responses import HttpReply, is_arrow
from gateway.api.server.unknown_fields import (
    HEADER,
    UnknownFields,
    is_about_unknown_field,
    scan_fields,
    strict_twin,
)
from gateway.errors import InvalidInput, MalformedBody
from gateway.quotas.limits import Cost

MSGPACK = frozenset({"application/msgpack", "application/x-msgpack"})
Body: TypeAlias = bytes | bytearray
# Fields of which each element of a list is an input.
INPUT_FIELDS = frozenset(
    (
        *("input", "inputs", "texts", "documents", "passages", "items", "requests", "contents", "instances"),
        *("queries", "data_1", "data_2", "text_1", "text_2"),
    )
)

Handler: TypeAlias = Callable[[Request[Any]], Awaitable[HttpReply]]
# Called with the body, the context and the `InferenceApi`; returns the struct of the handler.
DecodeArrow: TypeAlias = Callable[[Body, HttpContext, InferenceApi], Awaitable[Any]]


class BodyForms(NamedTuple):
    """Forms of a body besides JSON.

    msgpack: whether it may be msgpack. arrow: decodes an Arrow IPC stream, which the reply may be too.
    octets: whether the reply may be bytes without JSON.
    """

    msgpack: bool = False
    arrow: DecodeArrow | None = None
    octets: bool = False


JSON_ONLY = BodyForms()
NO_MARKS: Mapping[str, ErrorFormat] = {}


class Endpoint:
    """One inference endpoint.

    Rule: a body is read only after its key and the known state of its limits have been checked, and decoded
    once, straight into its struct; only one with unknown fields is decoded again.

    dialects: on a path that several dialects share, body field → error format. A body has one of these
    fields, and its struct has UNSET for the others. marks: the same of dialects whose bodies have a field of
    another dialect, too: such a field decides alone. forms: those of a body besides JSON. least: the least
    that a request costs. key_field: as in `RouteOptions`. calls_max: so many calls of `limits.inputs` inputs
    may be in one request.
    """

    def __init__(
        self,
        handler: Handler,
        dialects: Mapping[str, ErrorFormat],
        marks: Mapping[str, ErrorFormat],
        *,
        forms: BodyForms,
        least: Cost,
        key_field: str | None,
        calls_max: int,
    ) -> None:
        self.handler = handler
        self.forms = forms
        self._key_field = key_field
        self._calls_max = calls_max
        self._least = least
        (self.body,) = get_args(handler.__annotations__["request"])
        self._input_fields = INPUT_FIELDS.intersection(getattr(self.body, "__struct_encode_fields__", ()))
        self.dialects = dialects
        self._marks = marks
        twin = strict_twin(self.body)
        self._json = msgspec.json.Decoder(twin)
        self._msgpack = msgspec.msgpack.Decoder(twin) if forms.msgpack else None

    async def answer(self, context: HttpContext, api: InferenceApi) -> None:
        """Answer one HTTP request."""
        try:
            if self._key_field is None:
                api.admit_caller(context, self._least)
                body = await context.io.read_body()
            else:
                body = await api.read_keyed_body(context, self._least, self._key_field)
            if body.startswith(MARK):
                body = without_mark(body)
            arrow = self.forms.arrow
            if arrow is not None and body[:1] != b"{" and is_arrow(context.header(b"content-type")):
                data = await arrow(body, context, api)
                context.body.hold_decoded(decoded_bytes(data))
            else:
                data = await self._decode_body(body, context, api)
            # Only what was decoded stays in memory.
            del body
            reply = await self.handler(Request(data, context, api, context.model))
        except Exception as error:  # noqa: BLE001 - every error becomes a reply
            reply = context.failure(await api.charge_failure(context, error, self._least))
        except asyncio.CancelledError:
            await api.charge_abandoned_body(context, self._least)
            raise
        if context.ignored_fields:
            reply.headers[HEADER] = context.ignored_fields
        await context.io.reply(reply)

    async def reply_to_line(self, body: Body, context: RequestContext, api: InferenceApi) -> HttpReply:
        """Return the reply to a line of a job. Raises: every error of a request, which is charged for it."""
        try:
            context.body.hold(len(body))
            data = await self._decode_body(body, context, api)
            check_is_json(data)
            return await self.handler(Request(data, context, api))
        except Exception as error:
            charged = await api.charge_failure(context, error, self._least)
            if charged is error:
                raise
            raise charged from error

    async def _decode_body(self, body: Body, context: RequestContext, api: InferenceApi) -> Any:
        """Decode a body; the values of a large one are counted first.

        Raises: InvalidInput, MalformedBody, GatewayFull, and msgspec's errors.
        """
        is_large = len(body) > UNCOUNTED_BYTES
        is_msgpack = self._msgpack is not None and _is_msgpack(context)
        if is_large:
            inputs_max = api.inputs_max * self._calls_max
            await check_values(body, inputs_max, is_msgpack=is_msgpack)
            await check_count_of_inputs(body, self._input_fields, inputs_max, is_msgpack=is_msgpack)
        try:
            data = self._decode(body, context, self._msgpack if is_msgpack else self._json)
        except UnknownFields:
            # Decoding takes 0.1 s for the largest text: not twice at a stretch.
            await asyncio.sleep(0)
            data = self._decode(body, context, _lax(self.body, is_msgpack=is_msgpack))
            await asyncio.sleep(0)
            scan = scan_fields(body, self.body, is_msgpack=is_msgpack)
            if api.refuses_unknown_fields and scan.found:
                raise scan.refusal() from None
            context.ignore_fields(scan.header())
        if is_large:
            context.body.hold_decoded(decoded_bytes(data))
            # Decoding and the bounds of its tokens take 0.1 s each for the largest text.
            await asyncio.sleep(0)
        return data

    def _decode(self, body: Body, context: RequestContext, decoder: Any) -> Any:
        """Decode a body, and set the dialect of error replies if a field of the body decides it.

        Raises: UnknownFields, if the decoder refuses what the body's own struct ignores; InvalidInput,
        MalformedBody, and msgspec's errors.
        """
        is_msgpack = isinstance(decoder, msgspec.msgpack.Decoder)
        try:
            data = decoder.decode(body)
        except msgspec.ValidationError as error:
            if decoder.type is not self.body and is_about_unknown_field(error):
                raise UnknownFields from None
            if self.dialects:
                self._set_dialect(_fields_of(body), context)
            note_choices(error, self.body)
            raise
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if is_msgpack:
                raise MalformedBody(f"the body is not valid msgpack: {error}") from error
            raise (_broken_text_of(body) or error) from None
        if self.dialects:
            fields = (*self.dialects, *self._marks)
            present = {field for field in fields if getattr(data, field) is not msgspec.UNSET}
            if not self._set_dialect(present, context):
                names = " or ".join(f"`{field}`" for field in self.dialects)
                raise InvalidInput(f"the body has {names}, and not those of several dialects")
        return data

    def _set_dialect(self, present: Container[str], context: RequestContext) -> bool:
        """Return whether the fields of a body belong to one dialect, which the context then has."""
        marked = [dialect for field, dialect in self._marks.items() if field in present]
        found = marked or [dialect for field, dialect in self.dialects.items() if field in present]
        dialects = {dialect.name: dialect for dialect in found}
        if len(dialects) != 1:
            return False
        context.use_dialect(*dialects.values())
        return True


def check_is_json(data: Any) -> None:
    """Check that the reply to a line of a job is JSON. Raises: InvalidInput."""
    if getattr(data, "encoding_format", None) in BYTES:
        raise InvalidInput("a line's reply is JSON: use `float` or `base64`", param="encoding_format")


def endpoint_at(routes: RouteTable, path: str) -> Endpoint:
    """Return the inference endpoint at a path without a name."""
    endpoint = endpoint_of(routes.parse(path).options.answer)
    assert endpoint is not None
    return endpoint


def endpoint_of(answer: Answer | None) -> Endpoint | None:
    """Return the inference endpoint that answers, None for other handlers."""
    endpoint = getattr(answer, "__self__", None)
    return endpoint if isinstance(endpoint, Endpoint) else None


def inference(
    *paths: str,
    errors: ErrorFormat | Mapping[str, ErrorFormat],
    marks: Mapping[str, ErrorFormat] = NO_MARKS,
    reply: Any,
    description: str,
    tags: list[str],
    below_models: bool = True,
    forms: BodyForms = JSON_ONLY,
    least: Cost = LEAST,
    key_field: str | None = None,
    calls_max: int = 1,
) -> Callable[[Handler], HTTPRouteHandler]:
    """Declare a POST that runs a model.

    errors: the format that the caller reads; where dialects share the path, body field → format, and the
    first of them answers bodies whose fields do not tell. marks: as in `Endpoint`. reply, description: its
    struct and its text in the OpenAPI document. below_models: whether each path is also served below
    /models/{name}. forms: those of a body besides JSON. least: the least that a request costs. key_field: as
    in `RouteOptions`. calls_max: as in `Endpoint`.
    """
    by_field = {} if isinstance(errors, ErrorFormat) else errors
    of_fields = [errors] if isinstance(errors, ErrorFormat) else errors.values()
    formats = list(dict.fromkeys((*of_fields, *marks.values())))
    every_path = [*paths, *[(BELOW_MODEL + path).rstrip("/") for path in paths if below_models]]

    def declare(handler: Handler) -> HTTPRouteHandler:
        endpoint = Endpoint(
            handler, by_field, marks, forms=forms, least=least, key_field=key_field, calls_max=calls_max
        )
        declaration = post(
            every_path,
            status_code=200,
            opt=route_options(
                errors=formats[0], answer=endpoint.answer, name_has_slashes=True, key_field=key_field
            ),
            # Litestar's examples are of random values, which look like replies, and load Faker.
            responses={200: ResponseSpec(reply, generate_examples=False, description=description)}
            | document_errors(*formats),
            tags=tags,
        )
        return declaration(_documented(handler, endpoint.body, every_path))

    return declare


def _documented(handler: Handler, body: Any, paths: list[str]) -> Callable[..., Awaitable[Response[bytes]]]:
    """Return a function of the same name, with the signature that Litestar documents for the handler."""
    # Annotations created at run time, for which mypy has no types.
    json_body, in_path = cast("Any", JSONBody), cast("Any", FromPath)
    parameters = [Parameter("data", Parameter.KEYWORD_ONLY, annotation=json_body[body])]
    named = [NAME in path for path in paths]
    if all(named):
        parameters.append(Parameter("name", Parameter.KEYWORD_ONLY, annotation=in_path[str]))
    elif any(named):
        optional = in_path[str | None]
        parameters.append(Parameter("name", Parameter.KEYWORD_ONLY, annotation=optional, default=None))

    async def documented(**_: Any) -> Response[bytes]:
        raise NotImplementedError

    update_wrapper(documented, handler, ("__module__", "__name__", "__qualname__", "__doc__"))
    del documented.__wrapped__  # type: ignore[attr-defined]
    documented.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {
        "return": Response[bytes]
    }
    documented.__signature__ = Signature(parameters, return_annotation=Response[bytes])  # type: ignore[attr-defined]
    return documented


def _is_msgpack(context: RequestContext) -> bool:
    kind, _, _ = context.header(b"content-type").partition(";")
    return kind.strip().lower() in MSGPACK


@cache
def _lax(struct: type[msgspec.Struct], *, is_msgpack: bool) -> Any:
    """Return the decoder of a body whose unknown fields are ignored."""
    return msgspec.msgpack.Decoder(struct) if is_msgpack else msgspec.json.Decoder(struct)


def _broken_text_of(body: Body) -> MalformedBody | None:
    """Return the error of a body that cannot be decoded for one of its texts."""
    place = place_of_broken_text(body)
    return None if place is None else broken_text(place)


def _fields_of(body: Body) -> Container[str]:
    """Return the fields of a body that does not fit its struct, to find its dialect."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
