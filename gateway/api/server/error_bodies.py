"""Error bodies: the dialects' envelopes, and the rendering of a gateway error in one of them."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from litestar.openapi.datastructures import ResponseSpec

from gateway.api.server.responses import HttpReply
from gateway.errors import FACTS, Facts, GatewayError, QuotaExceeded


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


def _tei_error(error: GatewayError) -> TeiError:
    return TeiError(error.message, error.facts.tei_type)


def _vllm_error(error: GatewayError) -> VllmError:
    status = HTTPStatus(error.facts.status)
    kind = status.phrase.replace(" ", "").removesuffix("Error") + "Error"
    return VllmError(VllmErrorDetail(error.message, kind, error.param, status.value))


OPENAI = ErrorFormat("openai", OpenAIError, _openai_error, ("/v1/", "/openai/"))
# TEI's errors are also those of every path that no other dialect claims.
TEI = ErrorFormat("tei", TeiError, _tei_error, status_of=lambda facts: facts.tei_status)
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
