"""Every error in its caller's dialect; the one place where an exception becomes a body."""

import logging
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import (
    HTTPException,
    MethodNotAllowedException,
    NotFoundException,
    ValidationException,
)
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.openapi.datastructures import ResponseSpec
from litestar.types import ExceptionHandlersMap

from gateway.api.exchange import Exchange, exchange_of
from gateway.api.paths import Dialect, dialect_of
from gateway.errors import (
    FACTS,
    BodyTooLarge,
    GatewayError,
    Internal,
    InvalidInput,
    MalformedBody,
    MethodNotAllowed,
    NotFound,
    QuotaExceeded,
)

logger = logging.getLogger(__name__)


# Some messages repeat what was sent, which may be megabytes.
MESSAGE_CHARACTERS_MAX = 300
TOKEN_IDS = re.compile(r"Expected `str`, got `(int|array)` - at `\$\.inputs?\[[\d.]+\]`")
IDS_REFUSED = (
    "token ids are refused: they belong to another model's vocabulary and would give wrong vectors. "
    "Send texts; with LangChain's OpenAIEmbeddings set check_embedding_ctx_length=False"
)


class OpenAIErrorDetail(msgspec.Struct):
    """Source: OpenAI OpenAPI 2.3.0, `Error`: four keys, always present."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct):
    """OpenAI's envelope."""

    error: OpenAIErrorDetail


class TeiError(msgspec.Struct):
    """TEI's envelope on native routes."""

    error: str
    error_type: str


def documented(dialect: Dialect) -> dict[int, ResponseSpec]:
    """What a POST of this dialect may answer instead of a reply, for the OpenAPI document."""
    facts = [one for kind, one in FACTS.items() if kind not in ("not_found", "method_not_allowed")]
    openai = dialect == "openai"
    statuses = sorted({one.status if openai else one.tei_status for one in facts})
    envelope = OpenAIError if openai else TeiError
    return {
        status: ResponseSpec(envelope, generate_examples=False, description=HTTPStatus(status).phrase)
        for status in statuses
    }


def rendered(error: GatewayError, dialect: Dialect) -> tuple[int, bytes, dict[str, str]]:
    """Status, JSON body and headers of an error."""
    headers = {"content-type": "application/json", **error.headers}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.facts.status == 401:
        headers["www-authenticate"] = "Bearer"
    if dialect == "openai":
        return error.facts.status, msgspec.json.encode(_openai(error)), headers
    body = TeiError(error.message, error.facts.tei_type)
    return error.facts.tei_status, msgspec.json.encode(body), headers


def _openai(error: GatewayError) -> OpenAIError:
    kind, code = error.facts.openai_type, error.facts.openai_code
    if isinstance(error, QuotaExceeded):
        kind = "tokens" if error.unit == "tokens" else "requests"
        if error.calendar:
            kind = code = "insufficient_quota"
    return OpenAIError(OpenAIErrorDetail(error.message, kind, error.param, code))


def as_gateway_error(error: Exception) -> GatewayError:
    """The one translation of what Litestar and msgspec raise while a body is read."""
    if isinstance(error, GatewayError):
        return error
    for kind, translate in TRANSLATIONS:
        if isinstance(error, kind):
            return translate(error)
    if isinstance(error, HTTPException) and error.status_code < 500:
        return InvalidInput("the request is not what this path takes")
    return Internal("the gateway failed")


def _invalid_field(error: msgspec.ValidationError) -> InvalidInput:
    reason, _, place = str(error).partition(" - at `$")
    if TOKEN_IDS.fullmatch(str(error)):
        return InvalidInput(IDS_REFUSED, param=place.strip("`.").split("[")[0])
    reason = reason[:MESSAGE_CHARACTERS_MAX]
    field = place.strip("`.").split("[")[0].split(".")[0]
    where = f" (at {place.strip('`.')})" if place.strip("`.") else ""
    return InvalidInput(reason + where, param=field or None)


def _method_not_allowed(error: MethodNotAllowedException) -> MethodNotAllowed:
    return MethodNotAllowed("this path does not take that method", headers=error.headers)


# Subclasses first: a ValidationError is a DecodeError too.
TRANSLATIONS: tuple[tuple[type[Exception], Callable[[Any], GatewayError]], ...] = (
    (RequestEntityTooLarge, lambda _: BodyTooLarge("the body is larger than this gateway takes")),
    (NotFoundException, lambda _: NotFound("there is nothing at this path; /docs lists what there is")),
    (MethodNotAllowedException, _method_not_allowed),
    (ValidationException, lambda _: MalformedBody("the body is missing or is not what this path takes")),
    (msgspec.ValidationError, _invalid_field),
    (msgspec.DecodeError, lambda error: MalformedBody(f"the body is not valid JSON: {error}")),
    (UnicodeDecodeError, lambda _: MalformedBody("the body is not valid UTF-8")),
    (RecursionError, lambda _: MalformedBody("the body is nested too deeply")),
)


def answer_failure(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Litestar's hook: whatever a handler raised, rendered."""
    status, body, headers = failed(error, exchange_of(request.scope), request.scope["path"])
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def failed(error: Exception, exchange: Exchange, path: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of whatever a call ended in; a fault of ours is logged."""
    failure = as_gateway_error(error)
    exchange.outcome = failure.kind
    if isinstance(failure, Internal):
        logger.error("call %s failed", exchange.request_id, exc_info=error)
    return rendered(failure, dialect_of(path))


HANDLERS: ExceptionHandlersMap = {Exception: answer_failure, HTTPException: answer_failure}


def plain_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI sends them."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]
