"""Errors of Amazon Bedrock, by the type that each answer names. Pure."""

import re

import msgspec

from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    CredentialRefused,
    InvalidWork,
    ModelNotLoaded,
    ModelNotServed,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    input_too_long,
)
from backends.http.client import UpstreamResponse
from backends.http.openai_wire import REFUSED_INPUT, TOO_LONG
from backends.http.statuses import REFUSED_CREDENTIAL, status_error, with_answer

TYPE_HEADER = "x-amzn-errortype"
# Of a quota of the account that is used up; the answer names no time.
QUOTA_PAUSE_S = 30.0
# A model that is not ready is asked again after this time, as AWS' own clients wait for it.
NOT_READY_PAUSE_S = 5.0
# Types of signatures and keys that are not accepted.
CREDENTIALS = frozenset(
    {
        "AccessDeniedException",
        "ExpiredTokenException",
        "IncompleteSignatureException",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "MissingAuthenticationTokenException",
        "NotAuthorized",
        "UnrecognizedClientException",
    }
)
# Of an input with more characters than the schema of the model has, and of one with more tokens.
LONG_INPUT = re.compile(r"expected maxlength|too many input tokens|" + "|".join(map(re.escape, TOO_LONG)))
# Refusals of the model's name and of its use, not of an input.
WRONG_MODEL = (
    "model identifier is invalid",
    "on-demand throughput",
    "model id or arn",
    "access to the model",
)


class ErrorBody(msgspec.Struct, frozen=True, rename={"kind": "__type"}):
    """Body of an error. kind: its type, where the header has none."""

    message: str = ""
    kind: str = ""


def error_type(response: UpstreamResponse) -> str:
    """Return the type of an error, without the namespace and address around it; "" if it has none."""
    named = response.headers.get(TYPE_HEADER) or _body_of(response).kind
    return named.partition(":")[0].rpartition("#")[2]


def _body_of(response: UpstreamResponse) -> ErrorBody:
    try:
        return msgspec.json.decode(response.body, type=ErrorBody)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ErrorBody()


# Of each type: its error, the message, and the pause in seconds where the answer names none.
ERRORS: dict[str, tuple[type[BackendError], str, float | None]] = {
    "ThrottlingException": (ReplicaOverloaded, "the upstream is overloaded", None),
    "ServiceQuotaExceededException": (
        ReplicaOverloaded,
        "the quota of the gateway's account at the upstream is used up",
        QUOTA_PAUSE_S,
    ),
    "ModelNotReadyException": (ModelNotLoaded, "the upstream's model is not ready yet", NOT_READY_PAUSE_S),
    "ModelTimeoutException": (AttemptTimedOut, "the upstream's model did not answer in time", None),
    "ModelErrorException": (ReplicaFailed, "the upstream's model failed", None),
    "ResourceNotFoundException": (
        ModelNotServed,
        "the upstream does not serve this model in this region",
        None,
    ),
    "ServiceUnavailableException": (ReplicaUnavailable, "the upstream reports that it is not ready", None),
}


@with_answer
def failure(response: UpstreamResponse) -> BackendError:
    """Convert a response whose status is not 200 to an error."""
    kind = error_type(response)
    if kind in ERRORS:
        error, message, pause_s = ERRORS[kind]
        return error(message).with_facts(retry_after_s=pause_s)
    if kind == "ValidationException":
        return _invalid(_body_of(response).message.lower())
    return CredentialRefused(REFUSED_CREDENTIAL) if kind in CREDENTIALS else status_error(response)


def _invalid(message: str) -> BackendError:
    """Return the error of a refused request: of its input, or of the model's name."""
    if LONG_INPUT.search(message):
        return input_too_long(None)
    if any(words in message for words in WRONG_MODEL):
        return ModelNotServed("the upstream does not serve this model this way")
    return InvalidWork(REFUSED_INPUT)
