"""Errors that end a call, as facts; `FACTS` is the one table of all kinds.

GatewayError
 ├─ caller:   InvalidInput EmptyInput RequestExceedsLimit BodyTooLarge UnsupportedMedia Unauthenticated
 │            TokenRefused AuthThrottled ModelForbidden ScopeForbidden TenantUnknown ModelNotFound NotFound
 │            MethodNotAllowed AlreadyExists OperationUnsupported QuotaExceeded InstanceNotFound
 │            InstanceInvalid InstanceRunning
 ├─ gateway:  Overloaded GatewayFull QuotaUnavailable SignOnUnavailable ShuttingDown ModelLoading
 │            InstancesUnavailable Internal ModelDownloadFailed ModelLoadFailed FileStorageFull
 │            BatchesUnavailable
 └─ upstream: NoReplica UpstreamFailed DeadlineExceeded ReplicaTimedOut

Knows nothing of the dialects' bodies: `api/server/error_bodies.py` renders these.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from backends.contract.errors import ErrorSource

# Delay after which a client retries a model that is loading.
LOADING_RETRY_S = 5


class Facts(msgspec.Struct, frozen=True):
    """One kind of error as each wire reports it.

    status: HTTP status; tei_status and infinity_status: on their routes. openai_type, openai_code,
    tei_type: the strings in those dialects' bodies; an openai_code of None is JSON null.
    """

    source: ErrorSource
    status: int
    tei_status: int
    infinity_status: int
    openai_type: str
    openai_code: str | None
    tei_type: str
    retryable: bool = False


def _caller(
    status: int, code: str | None, tei_type: str = "Validation", tei_status: int | None = None
) -> Facts:
    return Facts("caller", status, tei_status or status, status, "invalid_request_error", code, tei_type)


def _body(code: str | None, tei_type: str, tei_status: int) -> Facts:
    """Return facts of a body to which FastAPI, and therefore Infinity, responds with 422."""
    return Facts("caller", 400, tei_status, 422, "invalid_request_error", code, tei_type)


def _later(code: str, tei_type: str) -> Facts:
    return Facts("caller", 429, 429, 429, "requests", code, tei_type, retryable=True)


def _ours(source: ErrorSource, status: int, code: str, tei_type: str, tei_status: int) -> Facts:
    return Facts(source, status, tei_status, status, "server_error", code, tei_type, retryable=True)


# Source: promises of this project; the columns of TEI (router 1.9.3) and Infinity (server 0.0.77).
FACTS: dict[str, Facts] = {
    "invalid_input": _body(None, "Validation", 422),
    "empty_input": _body("empty_input", "Empty", 400),
    "malformed_body": _body(None, "Validation", 400),
    "request_exceeds_limit": _body("request_exceeds_limit", "Validation", 422),
    "body_too_large": _caller(413, "body_too_large"),
    "unsupported_media": _caller(415, "unsupported_media"),
    "unauthenticated": _caller(401, "invalid_api_key", "Unauthenticated"),
    "auth_throttled": _later("auth_throttled", "Unauthenticated"),
    "model_forbidden": _caller(403, "model_forbidden", "Forbidden"),
    "scope_forbidden": _caller(403, "scope_forbidden", "Forbidden"),
    "tenant_unknown": _caller(403, "tenant_unknown", "Forbidden"),
    "model_not_found": _caller(404, "model_not_found", "NotFound"),
    "not_found": _caller(404, "not_found", "NotFound"),
    "method_not_allowed": _caller(405, "method_not_allowed", "NotFound"),
    "already_exists": _caller(409, "already_exists"),
    "precondition_failed": _caller(412, "precondition_failed"),
    "instance_not_found": _caller(404, "instance_not_found", "NotFound"),
    "instance_invalid": _caller(400, "instance_invalid"),
    "instance_running": _caller(409, "instance_running"),
    "model_download_failed": _ours("gateway", 500, "model_download_failed", "Backend", 500),
    "model_load_failed": _ours("gateway", 500, "model_load_failed", "Backend", 500),
    "instances_unavailable": _ours("gateway", 503, "instances_unavailable", "Unhealthy", 503),
    "file_storage_full": _ours("gateway", 507, "file_storage_full", "Overloaded", 507),
    "batches_unavailable": _ours("gateway", 503, "batches_unavailable", "Unhealthy", 503),
    "operation_unsupported": _caller(400, "model_not_supported", "Backend", tei_status=424),
    "quota_exceeded": _later("rate_limit_exceeded", "Overloaded"),
    "overloaded": _ours("gateway", 429, "overloaded", "Overloaded", 429),
    "gateway_full": _ours("gateway", 503, "gateway_full", "Overloaded", 503),
    "no_replica": _ours("upstream", 503, "no_replica", "Unhealthy", 503),
    "quota_unavailable": _ours("gateway", 503, "quota_unavailable", "Unhealthy", 503),
    "sign_on_unavailable": _ours("gateway", 503, "sign_on_unavailable", "Unhealthy", 503),
    "shutting_down": _ours("gateway", 503, "shutting_down", "Unhealthy", 503),
    "model_loading": _ours("gateway", 503, "model_loading", "Unhealthy", 503),
    "upstream_failed": _ours("upstream", 502, "upstream_failed", "Backend", 424),
    "deadline_exceeded": _ours("upstream", 504, "deadline_exceeded", "Backend", 424),
    "internal": _ours("gateway", 500, "internal", "Backend", 500),
}


class GatewayError(Exception):
    """Error that ends a call.

    message: safe to show to the caller. param: the field at fault, None if there is none. retry_after_s: set
    on every 429 and 503. headers: further headers of the reply, such as rate-limit headers. is_settled: the
    ledger has settled the cost of the call. input_index: of the input at fault, whose number begins the
    message then; None if no single input is. reason: class of the cause for log lines, where a kind has
    several.
    """

    kind: ClassVar[str] = "internal"
    is_settled = False
    input_index: int | None = None
    reason: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        self.retry_after_s = retry_after_s
        if retry_after_s is None and self.facts.status in (429, 503):
            self.retry_after_s = 1

    @property
    def facts(self) -> Facts:
        """Row of the table for this kind."""
        return FACTS[self.kind]

    def settle(self, headers: Mapping[str, str]) -> None:
        """Record that the cost of the call is settled. headers: further ones of the reply."""
        self.is_settled = True
        self.headers.update(headers)

    def name_rows(self, rows: Sequence[int], noun: str = "row") -> None:
        """Begin the message with a row of the caller's table.

        rows: the row of each input. noun: what the caller calls a row.
        """
        index = self.input_index
        if index is not None and index < len(rows):
            self.message = f"{noun} {rows[index]}: " + self.message.removeprefix(f"input {index}: ")

    def name_model(self, model: str) -> None:
        """Begin the message with a model, unless it has its name."""
        if repr(model) not in self.message:
            self.message = f"model {model!r}: {self.message}"


class InvalidInput(GatewayError):
    """A field's value is wrong."""

    kind = "invalid_input"


class EmptyInput(GatewayError):
    """The input is empty."""

    kind = "empty_input"


class MalformedBody(GatewayError):
    """The body is not JSON."""

    kind = "malformed_body"


class RequestExceedsLimit(GatewayError):
    """The call alone costs more than one of the tenant's limits ever allows."""

    kind = "request_exceeds_limit"


class BodyTooLarge(GatewayError):
    """The body is larger than `limits.body_bytes`."""

    kind = "body_too_large"


class UnsupportedMedia(GatewayError):
    """The body has a content encoding that the gateway does not read."""

    kind = "unsupported_media"


class Unauthenticated(GatewayError):
    """The request carries no key, or an unknown one."""

    kind = "unauthenticated"


class TokenRefused(Unauthenticated):
    """A token of single sign-on is not accepted. message: without any part of the token."""

    def __init__(self, reason: str, message: str) -> None:
        challenge = f'Bearer error="invalid_token", error_description="{message}"'
        super().__init__(message, headers={"www-authenticate": challenge})
        self.reason = reason


class AuthThrottled(GatewayError):
    """Too many wrong keys came from this address."""

    kind = "auth_throttled"


class ModelForbidden(GatewayError):
    """The model exists; this tenant may not use it."""

    kind = "model_forbidden"


class ScopeForbidden(GatewayError):
    """The key is valid but lacks the scope."""

    kind = "scope_forbidden"


class TenantUnknown(GatewayError):
    """The key is valid, but its tenant is defined nowhere."""

    kind = "tenant_unknown"


class ModelNotFound(GatewayError):
    """No model has that name."""

    kind = "model_not_found"


class NotFound(GatewayError):
    """No route has that path."""

    kind = "not_found"


class MethodNotAllowed(GatewayError):
    """The path exists, but not with this method."""

    kind = "method_not_allowed"


class AlreadyExists(GatewayError):
    """There is something of that name, which the request may not replace."""

    kind = "already_exists"


class PreconditionFailed(GatewayError):
    """A condition of the request, `if-match` or `if-none-match`, is not true."""

    kind = "precondition_failed"


class InstanceNotFound(GatewayError):
    """No instance of this host has that name."""

    kind = "instance_not_found"


class InstanceInvalid(GatewayError):
    """An instance cannot be created with these settings."""

    kind = "instance_invalid"


class InstanceRunning(GatewayError):
    """The instance runs already."""

    kind = "instance_running"


class ModelDownloadFailed(GatewayError):
    """A model could not be downloaded to this host."""

    kind = "model_download_failed"


class ModelLoadFailed(GatewayError):
    """A model of this host could not be loaded."""

    kind = "model_load_failed"


class InstancesUnavailable(GatewayError):
    """The gateway cannot change its instances now."""

    kind = "instances_unavailable"


class FileStorageFull(GatewayError):
    """The files of a tenant, or of all, have no room for more; trying again at once is of no use."""

    kind = "file_storage_full"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"x-should-retry": "false"})


class BatchesUnavailable(GatewayError):
    """Files and jobs cannot be read or written now."""

    kind = "batches_unavailable"


class OperationUnsupported(GatewayError):
    """The model does not offer the requested operation."""

    kind = "operation_unsupported"


class QuotaExceeded(GatewayError):
    """A limit of the tenant has no room left; OpenAI's clients read its unit and period."""

    kind = "quota_exceeded"

    def __init__(
        self,
        message: str,
        *,
        unit: str,
        calendar: bool,
        retry_after_s: int,
        headers: Mapping[str, str],
        wait_us: int | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, headers=headers)
        self.unit = unit
        # Exact, where it is known.
        self.wait_us = retry_after_s * 1_000_000 if wait_us is None else wait_us
        # Day and month limits do not refill soon: clients must not retry.
        self.calendar = calendar

    def mark_degraded(self) -> None:
        """Mark a refusal by one gateway's share of a limit, while the quota store is down."""
        self.headers["x-quota-mode"] = "degraded"
        self.message += " (this gateway's share, while the quota store is unavailable)"


class Overloaded(GatewayError):
    """A queue is at its bound."""

    kind = "overloaded"


class GatewayFull(GatewayError):
    """Bodies and replies in flight use all of `limits.in_flight_bytes`."""

    kind = "gateway_full"


class NoReplica(GatewayError):
    """No replica of the upstream can be reached."""

    kind = "no_replica"


class QuotaUnavailable(GatewayError):
    """The quota store is unreachable, and the config refuses requests then."""

    kind = "quota_unavailable"


class SignOnUnavailable(GatewayError):
    """An issuer of tokens cannot be reached, and without it a token or a sign-in cannot be checked."""

    kind = "sign_on_unavailable"


class ShuttingDown(GatewayError):
    """The gateway is stopping and accepts no new calls."""

    kind = "shutting_down"


class ModelLoading(GatewayError):
    """The model was still loading when the deadline came."""

    kind = "model_loading"


class UpstreamFailed(GatewayError):
    """A replica failed, and no other replica could take over."""

    kind = "upstream_failed"


class DeadlineExceeded(GatewayError):
    """The deadline of the call has passed."""

    kind = "deadline_exceeded"


class ReplicaTimedOut(DeadlineExceeded):
    """The last replica that was tried did not answer in its time: a fault of the replica, not of the size."""


class Internal(GatewayError):
    """A fault of the gateway itself."""

    kind = "internal"
