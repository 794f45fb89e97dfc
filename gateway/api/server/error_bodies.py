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

from gateway.api.server.allowed_values import choices_of
from gateway.api.server.paths import Dialect
from gateway.api.server.request_context import RequestContext, context_of
from gateway.errors import (
    FACTS,
    BodyTooLarge,
    Facts,
    GatewayError,
    Internal,
    InvalidInput,
    MalformedBody,
    MethodNotAllowed,
    NotFound,
    QuotaExceeded,
)
from gateway.upstreams.token_ids import IDS_REFUSED

logger = logging.getLogger(__name__)


# Some messages repeat what was sent, which may be megabytes.
MESSAGE_CHARACTERS_MAX = 300
MISSING_QUERY = re.compile(r"Missing required query parameter '(?P<name>\w+)'")
# What is meant by words that name a standard and show nothing.
QUERY_REASONS = {"Invalid RFC3339 encoded date": "expected a day such as 2027-01-31"}
TOKEN_IDS = re.compile(r"Expected `(?:str|str \| object)`, got `(int|array)` - at `\$\.inputs?\[[\d.]+\]`")


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


class CohereError(msgspec.Struct):
    """Source: cohere-python 7.0.9: clients show `message`."""

    message: str


class RerankError(msgspec.Struct):
    """Of /v1/rerank, which Cohere's and Jina's clients share: one reads `message`, the other `detail`."""

    message: str
    detail: str


class VllmErrorDetail(msgspec.Struct):
    """Source: vLLM 0.33: type is named after the status, which code repeats."""

    message: str
    type: str
    param: str | None
    code: int


class VllmError(msgspec.Struct):
    """vLLM's envelope."""

    error: VllmErrorDetail


class InfinityErrorDetail(msgspec.Struct):
    """Source: Infinity 0.0.77: two keys are always null, code repeats the status."""

    message: str
    code: int
    type: None = None
    param: None = None


class InfinityError(msgspec.Struct):
    """Infinity's envelope of what is no fault of the body's."""

    error: InfinityErrorDetail


class FastAPIProblem(msgspec.Struct):
    """One thing that is wrong with a body; loc is the way to it."""

    type: str
    loc: list[str]
    msg: str


class FastAPIError(msgspec.Struct):
    """What FastAPI says itself, under Infinity: 422 with problems, and 401, 404 and 405 with a sentence."""

    detail: list[FastAPIProblem] | str


class SieErrorDetail(msgspec.Struct):
    """Source: SIE 0.3.1; kinds that it does not know have a code of their own."""

    code: str
    message: str


class SieError(msgspec.Struct):
    """SIE's native envelope."""

    detail: SieErrorDetail


ENVELOPES: dict[Dialect, Any] = {
    "openai": OpenAIError,
    "tei": TeiError,
    "cohere": CohereError,
    "rerank": RerankError,
    "vllm": VllmError,
    "infinity": InfinityError | FastAPIError,
    "sie": SieError,
}
# FastAPI answers these before Infinity's own code is asked.
FASTAPI_STATUSES = frozenset({401, 404, 405})
SIE_CODES = {
    "empty_input": "INVALID_INPUT",
    "malformed_body": "INVALID_INPUT",
    "request_exceeds_limit": "INVALID_INPUT",
    "no_replica": "MODEL_NOT_LOADED",
    "upstream_failed": "INFERENCE_ERROR",
    "internal": "INFERENCE_ERROR",
}


def documented(*dialects: Dialect) -> dict[int, ResponseSpec]:
    """What a POST of these dialects may answer instead of a reply, for the OpenAPI document."""
    facts = [one for kind, one in FACTS.items() if kind not in ("not_found", "method_not_allowed")]
    envelopes: dict[int, Any] = {}
    for dialect in dialects:
        for status in {_status(one, dialect) for one in facts}:
            known = envelopes.get(status)
            envelopes[status] = ENVELOPES[dialect] if known is None else known | ENVELOPES[dialect]
    return {
        status: ResponseSpec(envelope, generate_examples=False, description=HTTPStatus(status).phrase)
        for status, envelope in sorted(envelopes.items())
    }


def rendered(error: GatewayError, dialect: Dialect) -> tuple[int, bytes, dict[str, str]]:
    """Status, JSON body and headers of an error."""
    headers = {"content-type": "application/json", **error.headers}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.facts.status == 401:
        headers["www-authenticate"] = "Bearer"
    return _status(error.facts, dialect), msgspec.json.encode(_enveloped(error, dialect)), headers


def _status(facts: Facts, dialect: Dialect) -> int:
    if dialect == "tei":
        return facts.tei_status
    return facts.infinity_status if dialect == "infinity" else facts.status


def _enveloped(error: GatewayError, dialect: Dialect) -> msgspec.Struct:
    match dialect:
        case "openai":
            return _openai(error)
        case "tei":
            return TeiError(error.message, error.facts.tei_type)
        case "cohere":
            return CohereError(error.message)
        case "rerank":
            return RerankError(error.message, error.message)
        case "vllm":
            return _vllm(error)
        case "infinity":
            return _infinity(error)
        case "sie":
            code = SIE_CODES.get(error.kind, error.kind.upper())
            return SieError(SieErrorDetail(code, error.message))


def _openai(error: GatewayError) -> OpenAIError:
    kind, code = error.facts.openai_type, error.facts.openai_code
    if isinstance(error, QuotaExceeded):
        kind = "tokens" if error.unit == "tokens" else "requests"
        if error.calendar:
            kind = code = "insufficient_quota"
    return OpenAIError(OpenAIErrorDetail(error.message, kind, error.param, code))


def _vllm(error: GatewayError) -> VllmError:
    status = HTTPStatus(error.facts.status)
    kind = status.phrase.replace(" ", "").removesuffix("Error") + "Error"
    return VllmError(VllmErrorDetail(error.message, kind, error.param, status.value))


def _infinity(error: GatewayError) -> InfinityError | FastAPIError:
    status = error.facts.infinity_status
    if status == 422:
        loc = ["body", error.param] if error.param else ["body"]
        return FastAPIError([FastAPIProblem("value_error", loc, error.message)])
    if status in FASTAPI_STATUSES:
        return FastAPIError(error.message)
    return InfinityError(InfinityErrorDetail(error.message, status))


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
    if choices := choices_of(error):
        reason = f"{reason}; allowed: {choices}"
    field = place.strip("`.").split("[")[0].split(".")[0]
    where = f" (at {place.strip('`.')})" if place.strip("`.") else ""
    return InvalidInput(reason + where, param=field or None)


def _not_understood(error: ValidationException) -> GatewayError:
    """Litestar's word on what a handler is called with: the query, or a body that is not there."""
    if missing := MISSING_QUERY.match(error.detail):
        name = missing["name"]
        return InvalidInput(f"the query parameter `{name}` is missing", param=name)
    for problem in error.extra if isinstance(error.extra, list) else []:
        if problem.get("source") == "query":
            reason = QUERY_REASONS.get(problem["message"], str(problem["message"]))[:MESSAGE_CHARACTERS_MAX]
            return InvalidInput(f"the query parameter `{problem['key']}`: {reason}", param=problem["key"])
    return MalformedBody("the body is missing or is not what this path takes")


def _method_not_allowed(error: MethodNotAllowedException) -> MethodNotAllowed:
    return MethodNotAllowed("this path does not take that method", headers=error.headers)


# Subclasses first: a ValidationError is a DecodeError too.
TRANSLATIONS: tuple[tuple[type[Exception], Callable[[Any], GatewayError]], ...] = (
    (RequestEntityTooLarge, lambda _: BodyTooLarge("the body is larger than this gateway takes")),
    (NotFoundException, lambda _: NotFound("there is nothing at this path; /docs lists what there is")),
    (MethodNotAllowedException, _method_not_allowed),
    (ValidationException, _not_understood),
    (msgspec.ValidationError, _invalid_field),
    (msgspec.DecodeError, lambda error: MalformedBody(f"the body is not valid JSON: {error}")),
    (UnicodeDecodeError, lambda _: MalformedBody("the body is not valid UTF-8")),
    (RecursionError, lambda _: MalformedBody("the body is nested too deeply")),
)


def answer_failure(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Litestar's hook: whatever a handler raised, rendered."""
    status, body, headers = failed(error, context_of(request.scope))
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def failed(error: Exception, context: RequestContext) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of whatever a call ended in; a fault of ours is logged."""
    failure = as_gateway_error(error)
    context.outcome = failure.kind
    if isinstance(failure, Internal):
        logger.error("call %s failed", context.request_id, exc_info=error)
    return rendered(failure, context.dialect)


HANDLERS: ExceptionHandlersMap = {Exception: answer_failure, HTTPException: answer_failure}


def plain_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI sends them."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]
