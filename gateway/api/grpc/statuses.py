"""Statuses and trailing metadata of gRPC's error replies.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/grpc/server.rs; google.rpc.Code for
kinds that TEI does not have.
"""

import grpc

from gateway.errors import GatewayError, UnsupportedMedia

_CODE = grpc.StatusCode
# Of every kind in `errors.FACTS`.
STATUSES: dict[str, grpc.StatusCode] = {
    "invalid_input": _CODE.INVALID_ARGUMENT,
    "empty_input": _CODE.INVALID_ARGUMENT,
    "malformed_body": _CODE.INVALID_ARGUMENT,
    "request_exceeds_limit": _CODE.INVALID_ARGUMENT,
    "unsupported_media": _CODE.INVALID_ARGUMENT,
    # As grpc itself answers a message over its bound.
    "body_too_large": _CODE.RESOURCE_EXHAUSTED,
    "unauthenticated": _CODE.UNAUTHENTICATED,
    "auth_throttled": _CODE.RESOURCE_EXHAUSTED,
    "model_forbidden": _CODE.PERMISSION_DENIED,
    "scope_forbidden": _CODE.PERMISSION_DENIED,
    "tenant_unknown": _CODE.PERMISSION_DENIED,
    "model_not_found": _CODE.NOT_FOUND,
    "not_found": _CODE.NOT_FOUND,
    "method_not_allowed": _CODE.UNIMPLEMENTED,
    "already_exists": _CODE.ALREADY_EXISTS,
    "precondition_failed": _CODE.FAILED_PRECONDITION,
    "instance_not_found": _CODE.NOT_FOUND,
    "instance_invalid": _CODE.INVALID_ARGUMENT,
    "instance_running": _CODE.FAILED_PRECONDITION,
    "model_download_failed": _CODE.INTERNAL,
    "model_load_failed": _CODE.INTERNAL,
    "instances_unavailable": _CODE.UNAVAILABLE,
    "file_storage_full": _CODE.RESOURCE_EXHAUSTED,
    "batches_unavailable": _CODE.UNAVAILABLE,
    "operation_unsupported": _CODE.FAILED_PRECONDITION,
    "quota_exceeded": _CODE.RESOURCE_EXHAUSTED,
    "overloaded": _CODE.RESOURCE_EXHAUSTED,
    "gateway_full": _CODE.RESOURCE_EXHAUSTED,
    "no_replica": _CODE.UNAVAILABLE,
    "quota_unavailable": _CODE.UNAVAILABLE,
    "sign_on_unavailable": _CODE.UNAVAILABLE,
    "shutting_down": _CODE.UNAVAILABLE,
    "model_loading": _CODE.UNAVAILABLE,
    "upstream_failed": _CODE.FAILED_PRECONDITION,
    "deadline_exceeded": _CODE.DEADLINE_EXCEEDED,
    "internal": _CODE.INTERNAL,
}


class CompressedMessage(UnsupportedMedia):
    """Message in a compression that is not read: none is, because a small one may be huge once unpacked."""


def status_of(error: GatewayError) -> grpc.StatusCode:
    """Return the status that reports an error."""
    if isinstance(error, CompressedMessage):
        # As gRPC defines: the client sends it again without compression.
        return _CODE.UNIMPLEMENTED
    return STATUSES[error.kind]


def trailing_metadata(error: GatewayError, request_id: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that follows an error: its id, its rate limits, and when to try again."""
    headers = {"x-request-id": request_id} | dict(error.headers)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    return tuple((name.lower(), value) for name, value in headers.items())
