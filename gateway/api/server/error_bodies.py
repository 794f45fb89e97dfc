"""Error bodies: from any exception to a gateway error, and from that to a dialect's envelope."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
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


class Dialect(msgspec.Struct, frozen=True):
    """Error format of a wire protocol that callers use.

    envelope: the struct of an error body, or a union of several, for OpenAPI. prefixes: the beginnings of
    the paths whose errors use this dialect even if nothing is served there. status_of: for dialects whose
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


class CohereError(msgspec.Struct):
    """Source: cohere-python 7.0.9: clients show `message`."""

    message: str


class RerankError(msgspec.Struct):
    """Envelope of /v1/rerank. Cohere's clients read `message`, Jina's read `detail`."""

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
    """Infinity's envelope for errors outside the request body."""

    error: InfinityErrorDetail


class FastAPIProblem(msgspec.Struct):
    """One problem in a body. loc: the path to it."""

    type: str
    loc: list[str]
    msg: str


class FastAPIError(msgspec.Struct):
    """Envelope of FastAPI, on which Infinity runs: 422 with problems; 401, 404 and 405 with a sentence."""

    detail: list[FastAPIProblem] | str


class OllamaError(msgspec.Struct):
    """Source: ollama-python 0.6.3: one sentence, which clients show."""

    error: str


class GeminiErrorDetail(msgspec.Struct):
    """Source: google.rpc.Status: code repeats the HTTP status, status is the name of a gRPC code."""

    code: int
    message: str
    status: str


class GeminiError(msgspec.Struct):
    """Gemini's envelope."""

    error: GeminiErrorDetail


class SieErrorDetail(msgspec.Struct):
    """Source: SIE 0.3.1. Kinds that SIE does not know get a code of their own."""

    code: str
    message: str


class SieError(msgspec.Struct):
    """SIE's native envelope."""

    detail: SieErrorDetail


class ManagerError(msgspec.Struct):
    """Envelope of TEI Manager. Source: its 0.12.0. timestamp: RFC 3339, in UTC."""

    error: str
    code: str
    timestamp: str


# FastAPI returns these statuses before Infinity's own code runs.
FASTAPI_STATUSES = frozenset({401, 404, 405})
# TEI Manager's codes, by the kind of an error; all other codes are the kind in capitals.
MANAGER_CODES = {
    "invalid_input": "VALIDATION_ERROR",
    "malformed_body": "VALIDATION_ERROR",
    "instance_invalid": "VALIDATION_ERROR",
    "instance_running": "ALREADY_RUNNING",
    "internal": "INTERNAL_ERROR",
}
# Source: google.rpc.Code, which maps each code to one HTTP status.
GEMINI_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    409: "ALREADY_EXISTS",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
SIE_CODES = {
    "empty_input": "INVALID_INPUT",
    "malformed_body": "INVALID_INPUT",
    "request_exceeds_limit": "INVALID_INPUT",
    "no_replica": "MODEL_NOT_LOADED",
    "upstream_failed": "INFERENCE_ERROR",
    "internal": "INFERENCE_ERROR",
}


def _openai_error(error: GatewayError) -> OpenAIError:
    kind, code = error.facts.openai_type, error.facts.openai_code
    if isinstance(error, QuotaExceeded):
        kind = "tokens" if error.unit == "tokens" else "requests"
        if error.calendar:
            kind = code = "insufficient_quota"
    detail = OpenAIErrorDetail(error.message, kind, error.param, code)
    return OpenAIError(detail, error.message)


def _tei_error(error: GatewayError) -> TeiError:
    return TeiError(error.message, error.facts.tei_type)


def _cohere_error(error: GatewayError) -> CohereError:
    return CohereError(error.message)


def _rerank_error(error: GatewayError) -> RerankError:
    return RerankError(error.message, error.message)


def _vllm_error(error: GatewayError) -> VllmError:
    status = HTTPStatus(error.facts.status)
    kind = status.phrase.replace(" ", "").removesuffix("Error") + "Error"
    return VllmError(VllmErrorDetail(error.message, kind, error.param, status.value))


def _infinity_error(error: GatewayError) -> InfinityError | FastAPIError:
    status = error.facts.infinity_status
    if status == 422:
        loc = ["body", error.param] if error.param else ["body"]
        return FastAPIError([FastAPIProblem("value_error", loc, error.message)])
    if status in FASTAPI_STATUSES:
        return FastAPIError(error.message)
    return InfinityError(InfinityErrorDetail(error.message, status))


def _ollama_error(error: GatewayError) -> OllamaError:
    return OllamaError(error.message)


def _gemini_error(error: GatewayError) -> GeminiError:
    status = error.facts.status
    return GeminiError(
        GeminiErrorDetail(status, error.message, GEMINI_STATUSES.get(status, "INVALID_ARGUMENT"))
    )


def _sie_error(error: GatewayError) -> SieError:
    return SieError(SieErrorDetail(SIE_CODES.get(error.kind, error.kind.upper()), error.message))


def _manager_error(error: GatewayError) -> ManagerError:
    code = MANAGER_CODES.get(error.kind, error.kind.upper())
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return ManagerError(error.message, code, now)


OPENAI = Dialect("openai", OpenAIError, _openai_error, ("/v1/", "/openai/"))
# TEI's errors are also those of every path that no other dialect claims.
TEI = Dialect("tei", TeiError, _tei_error, status_of=lambda facts: facts.tei_status)
COHERE = Dialect("cohere", CohereError, _cohere_error, ("/v2/",))
# Cohere's and Jina's /v1/rerank, whose errors clients of both can read.
RERANK = Dialect("rerank", RerankError, _rerank_error)
VLLM = Dialect("vllm", VllmError, _vllm_error)
INFINITY = Dialect(
    "infinity",
    InfinityError | FastAPIError,
    _infinity_error,
    ("/infinity/",),
    lambda facts: facts.infinity_status,
)
GEMINI = Dialect("gemini", GeminiError, _gemini_error, ("/v1beta/",))
OLLAMA = Dialect("ollama", OllamaError, _ollama_error, ("/api/",))
# A body that does not fit its struct is 422 there, and a value that cannot be used 400.
MANAGER = Dialect(
    "manager",
    ManagerError,
    _manager_error,
    ("/admin/instances/", "/admin/manager/", "/admin/registry/"),
    lambda facts: 422 if facts.tei_status == 422 else facts.status,
)
SIE = Dialect("sie", SieError, _sie_error, ("/v1/encode/", "/v1/score/"))


def render_error(error: GatewayError, dialect: Dialect) -> HttpReply:
    """Return the reply that reports an error to a caller of this dialect."""
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.facts.status == 401:
        headers.setdefault("www-authenticate", "Bearer")
    body = msgspec.json.encode(dialect.envelope_of(error))
    return HttpReply(body, headers, status=dialect.status_of(error.facts))


def document_errors(*dialects: Dialect) -> dict[int, ResponseSpec]:
    """Return the error responses of an endpoint of these dialects, for the OpenAPI document."""
    facts = [row for kind, row in FACTS.items() if kind not in ("not_found", "method_not_allowed")]
    envelopes: dict[int, Any] = {}
    for dialect in dialects:
        for status in {dialect.status_of(row) for row in facts}:
            envelope = envelopes.get(status)
            envelopes[status] = dialect.envelope if envelope is None else envelope | dialect.envelope
    return {
        status: ResponseSpec(envelope, generate_examples=False, description=HTTPStatus(status).phrase)
        for status, envelope in sorted(envelopes.items())
    }


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
