"""Error bodies: from any exception to a gateway error, and from that to a dialect's envelope."""

import re
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from litestar.exceptions import (
    HTTPException,
    MethodNotAllowedException,
    NotFoundException,
    ValidationException,
)
from litestar.openapi.datastructures import ResponseSpec

from gateway.api.server.body import choices_of
from gateway.api.server.responses import HttpReply
from gateway.errors import (
    FACTS,
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


class ErrorFormat(msgspec.Struct, frozen=True):
    """Error format of a wire protocol that callers use.

    envelope: the struct of an error body, or a union of several, for OpenAPI. prefixes: the beginnings of
    the paths whose errors have this format even if nothing is served there. status_of: for dialects whose
    statuses differ from the usual ones.
    """

    name: str
    envelope: Any
    envelope_of: Callable[[GatewayError], msgspec.Struct]
    prefixes: tuple[str, ...] = ()
    status_of: Callable[[Facts], int] = lambda facts: facts.status


class OpenAIErrorDetail(msgspec.Struct):
    """Source: OpenAI OpenAPI 2.3.0, `Error`: four keys, always present."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct):
    """OpenAI's envelope. detail: the message again, for clients of Jina and Voyage, who share its paths."""

    error: OpenAIErrorDetail
    detail: str


class TeiError(msgspec.Struct):
    """TEI's envelope on native routes."""

    error: str
    error_type: str


class VllmErrorDetail(msgspec.Struct):
    """Source: vLLM 0.33: type is named after the status, which code repeats."""

    message: str
    type: str
    param: str | None
    code: int


class VllmError(msgspec.Struct):
    """vLLM's envelope."""

    error: VllmErrorDetail


def _openai_error(error: GatewayError) -> OpenAIError:
    kind, code = error.facts.openai_type, error.facts.openai_code
    if isinstance(error, QuotaExceeded):
        kind = "tokens" if error.unit == "tokens" else "requests"
        if error.calendar:
            kind = code = "insufficient_quota"
    detail = OpenAIErrorDetail(error.message, kind, error.param, code)
    return OpenAIError(detail, error.message)


def _vllm_error(error: GatewayError) -> VllmError:
    status = HTTPStatus(error.facts.status)
    kind = status.phrase.replace(" ", "").removesuffix("Error") + "Error"
    return VllmError(VllmErrorDetail(error.message, kind, error.param, status.value))


OPENAI = ErrorFormat("openai", OpenAIError, _openai_error, ("/v1/", "/openai/"))
# TEI's errors are also those of every path that no other dialect claims.
TEI = ErrorFormat(
    "tei",
    TeiError,
    lambda error: TeiError(error.message, error.facts.tei_type),
    status_of=lambda facts: facts.tei_status,
)
VLLM = ErrorFormat("vllm", VllmError, _vllm_error)


def render_error(error: GatewayError, dialect: ErrorFormat) -> HttpReply:
    """Return the reply that reports an error to a caller of this dialect."""
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.facts.status == 401:
        headers.setdefault("www-authenticate", "Bearer")
    body = msgspec.json.encode(dialect.envelope_of(error))
    return HttpReply(body, headers, status=dialect.status_of(error.facts))


def document_errors(*dialects: ErrorFormat) -> dict[int, ResponseSpec]:
    """Return the error responses of an endpoint of these dialects, for the OpenAPI document.

    A description names the kinds of a status, as in "Conflict: `already_exists`".
    """
    envelopes: dict[int, Any] = {}
    kinds: dict[int, dict[str, None]] = {}
    for dialect in dialects:
        for kind, row in FACTS.items():
            if kind not in ("not_found", "method_not_allowed"):
                kinds.setdefault(dialect.status_of(row), {})[kind] = None
        for status in {dialect.status_of(row) for row in FACTS.values()} & kinds.keys():
            envelope = envelopes.get(status)
            envelopes[status] = dialect.envelope if envelope is None else envelope | dialect.envelope
    return {
        status: ResponseSpec(
            envelope,
            generate_examples=False,
            description=_with_kinds(HTTPStatus(status).phrase, kinds[status]),
        )
        for status, envelope in sorted(envelopes.items())
    }


def _with_kinds(phrase: str, kinds: Iterable[str]) -> str:
    return f"{phrase}: {', '.join(f'`{kind}`' for kind in kinds)}"


# Some messages repeat the input, which may be megabytes.
MESSAGE_CHARACTERS_MAX = 300
MISSING_QUERY = re.compile(r"Missing required query parameter '(?P<name>\w+)'")
# Messages that refer to a standard without an example, and their replacements.
QUERY_REASONS = {"Invalid RFC3339 encoded date": "expected a day such as 2027-01-31"}
TOKEN_IDS = re.compile(r"Expected `(?:str|str \| object)`, got `(int|array)` - at `\$\.inputs?\[[\d.]+\]`")


def as_gateway_error(error: Exception) -> GatewayError:
    """Return the gateway error that an exception means; a bug becomes `Internal`."""
    if isinstance(error, GatewayError):
        return error
    for kind, translate in TRANSLATIONS:
        if isinstance(error, kind):
            return translate(error)
    if isinstance(error, HTTPException) and error.status_code < 500:
        return InvalidInput("the request is not valid for this path")
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


def _invalid_request(error: ValidationException) -> GatewayError:
    """Translate Litestar's complaint about a handler's arguments: the query, or a missing body."""
    if missing := MISSING_QUERY.match(error.detail):
        name = missing["name"]
        return InvalidInput(f"the query parameter `{name}` is missing", param=name)
    for problem in error.extra if isinstance(error.extra, list) else []:
        if problem.get("source") == "query":
            reason = QUERY_REASONS.get(problem["message"], str(problem["message"]))[:MESSAGE_CHARACTERS_MAX]
            return InvalidInput(f"the query parameter `{problem['key']}`: {reason}", param=problem["key"])
    return MalformedBody("the body is missing, or not valid for this path")


def _method_not_allowed(error: MethodNotAllowedException) -> MethodNotAllowed:
    return MethodNotAllowed("this path does not take that method", headers=error.headers)


def _invalid_json(error: msgspec.DecodeError) -> MalformedBody:
    # msgspec's reason for half a surrogate pair, such as "\ud800", is the same.
    is_cut = str(error) == "Input data was truncated"
    reason = "it ends within a value, or a text has half of a surrogate pair" if is_cut else str(error)
    return MalformedBody(f"the body is not valid JSON: {reason}")


def broken_text(place: str) -> MalformedBody:
    """Return the error of a body with a text that is no Unicode. place: of that text."""
    name = place[:MESSAGE_CHARACTERS_MAX]
    where = f"the text `{name}`" if name else "a name of a field"
    reason = "it has half of a surrogate pair, such as \\ud83d, or bytes that are not UTF-8"
    return MalformedBody(f"{where} is not Unicode: {reason}", param=re.split(r"[.\[]", place)[0] or None)


# Subclasses first: a ValidationError is a DecodeError too.
TRANSLATIONS: tuple[tuple[type[Exception], Callable[[Any], GatewayError]], ...] = (
    (NotFoundException, lambda _: NotFound("there is nothing at this path; /docs lists all paths")),
    (MethodNotAllowedException, _method_not_allowed),
    (ValidationException, _invalid_request),
    (msgspec.ValidationError, _invalid_field),
    (msgspec.DecodeError, _invalid_json),
    (UnicodeDecodeError, lambda _: MalformedBody("the body is not valid UTF-8")),
    (RecursionError, lambda _: MalformedBody("the body is nested too deeply")),
)
