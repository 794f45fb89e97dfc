"""Errors in the OpenAPI document: the kinds behind each status, their meanings, and a body of each kind.

The statuses of a dialect are those of all kinds. A status stays at an operation only if a kind behind it can
occur there.
"""

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from gateway.api.server.error_bodies import ErrorFormat
from gateway.errors import FACTS, GatewayError

MEANINGS: Final[dict[str, str]] = {
    "invalid_input": "The value of a field is wrong.",
    "empty_input": "A list or string is empty.",
    "malformed_body": "Not JSON, not UTF-8, or nested too deeply.",
    "request_exceeds_limit": "The request costs more than a limit ever allows.",
    "body_too_large": "The body is larger than `limits.body_bytes`.",
    "unsupported_media": "The body is compressed.",
    "unauthenticated": "No valid key, token or certificate.",
    "auth_throttled": "Too many wrong keys from this address; a valid key always passes.",
    "model_forbidden": "The key may not use this model.",
    "scope_forbidden": "The key is valid, but not for this operation.",
    "tenant_unknown": "The key's tenant is defined nowhere.",
    "model_not_found": "There is no model of that name.",
    "not_found": "There is no such path.",
    "method_not_allowed": "The path needs a different method.",
    "already_exists": "There is a key of this id.",
    "precondition_failed": "The tenant is not the one that `if-match` names.",
    "instance_not_found": "There is no instance of this name.",
    "instance_invalid": "An instance cannot have these settings.",
    "instance_running": "The instance runs already.",
    "model_download_failed": "A model could not be downloaded; the message says why.",
    "model_load_failed": "A model could not be loaded; the message says why.",
    "instances_unavailable": "Instances cannot be changed now; the message says why.",
    "file_storage_full": "Files of batches have no room for more.",
    "batches_unavailable": "Files and batches cannot be read or written now.",
    "operation_unsupported": "The model does not support the operation.",
    "quota_exceeded": "A limit is used up; `retry-after` says when to try again.",
    "overloaded": "Too much is waiting for this model or to be counted, or its replicas are full.",
    "gateway_full": "Bodies and replies use all memory for them, or the share of the tenant.",
    "no_replica": "No replica of the model can be reached.",
    "quota_unavailable": "The quota store is unavailable, and the configuration refuses requests then.",
    "sign_on_unavailable": "An issuer's keys are unknown, or a sign-in cannot be completed.",
    "shutting_down": "The gateway is stopping.",
    "model_loading": "The model is not in memory yet.",
    "upstream_failed": "A replica failed, and no other could take over.",
    "deadline_exceeded": "The model's `deadline_s` or the caller's `x-timeout-s` passed.",
    "internal": "A fault of the gateway itself.",
}
# Tags whose operations alone can end with these kinds.
_HOST = frozenset(
    (
        "instance_not_found",
        "instance_invalid",
        "instance_running",
        "instances_unavailable",
        "model_download_failed",
        "model_load_failed",
    )
)
_KEYS = frozenset(("already_exists", "precondition_failed"))
_FILES = frozenset(("file_storage_full", "batches_unavailable"))
_ONLY_AT: Final = (
    (_HOST, ("Instances",)),
    (_KEYS, ("Operators", "Instances")),
    (_FILES, ("Batches", "Operators")),
)
_KIND = re.compile(r"`(\w+)`")


def narrow_errors(operation: dict[str, Any]) -> None:
    """Remove from an operation the statuses and kinds that cannot occur in its section."""
    tag = operation["tags"][0]
    foreign = {kind for kinds, tags in _ONLY_AT if tag not in tags for kind in kinds}
    for status, response in list(operation["responses"].items()):
        phrase, _, rest = response["description"].partition(": `")
        kinds = [kind for kind in _KIND.findall(f"`{rest}") if kind in FACTS]
        left = [kind for kind in kinds if kind not in foreign]
        if left:
            response["description"] = f"{phrase}: {', '.join(f'`{kind}`' for kind in left)}"
        elif kinds:
            del operation["responses"][status]


def error_kinds() -> dict[str, Any]:
    """Return every kind of error by name: its meaning, who is at fault, and whether a retry may help."""
    return {
        kind: {"meaning": meaning, "source": FACTS[kind].source, "retryable": FACTS[kind].retryable}
        for kind, meaning in MEANINGS.items()
    }


def error_bodies(formats: Iterable[ErrorFormat]) -> dict[str, Any]:
    """Return a body of each kind, by the name of its schema."""
    bodies: dict[str, Any] = {}
    for dialect in formats:
        for kind, meaning in MEANINGS.items():
            error = type("Example", (GatewayError,), {"kind": kind})(meaning)
            body = dialect.envelope_of(error)
            bodies.setdefault(type(body).__name__, {})[kind] = msgspec.to_builtins(body)
    return bodies
