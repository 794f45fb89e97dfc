"""Errors of Google's APIs, by the status that each names in words. Pure."""

import re
from typing import Any

import msgspec

from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    CredentialRefused,
    InvalidWork,
    ModelNotServed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    input_too_long,
)
from backends.http.client import UpstreamResponse
from backends.http.openai_wire import REFUSED_INPUT, TOO_LONG
from backends.http.statuses import REFUSED_CREDENTIAL, RETRY_AFTER_MAX_S, status_error, with_answer

# google.rpc.RetryInfo's duration.
DELAY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)s")
# A key that is not known is an invalid argument there.
KEY_REASONS = frozenset({"API_KEY_INVALID", "API_KEY_EXPIRED", "API_KEY_SERVICE_BLOCKED"})
LONG_INPUT = re.compile(r"input token count|exceeds the maximum|" + "|".join(map(re.escape, TOO_LONG)))
LENGTH = re.compile(r"(?:supports up to|at most|maximum (?:allowed )?of) (\d{1,9})\b")


class Detail(msgspec.Struct, frozen=True, rename="camel"):
    """One entry of `details`: the reason, and the time to wait."""

    reason: str = ""
    retry_delay: str = ""


class Status(msgspec.Struct, frozen=True):
    """Content of an error."""

    message: str = ""
    status: str = ""
    details: list[Any] = []


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of an error."""

    error: Status = Status()


# Of each status: its error and the message.
ERRORS: dict[str, tuple[type[BackendError], str]] = {
    "RESOURCE_EXHAUSTED": (
        ReplicaOverloaded,
        "the quota of the gateway's account at the upstream is used up",
    ),
    "UNAUTHENTICATED": (CredentialRefused, REFUSED_CREDENTIAL),
    "PERMISSION_DENIED": (CredentialRefused, REFUSED_CREDENTIAL),
    "NOT_FOUND": (ModelNotServed, "the upstream does not serve this model"),
    "UNAVAILABLE": (ReplicaUnavailable, "the upstream reports that it is not ready"),
    "DEADLINE_EXCEEDED": (AttemptTimedOut, "the upstream's model did not answer in time"),
}


@with_answer
def failure(response: UpstreamResponse) -> BackendError:
    """Convert a response whose status is not 200 to an error, with the pause that its details ask for."""
    found = _status_of(response)
    details = [msgspec.convert(detail, Detail) for detail in found.details if _is_readable(detail)]
    return _error_of(response, found, details).with_facts(retry_after_s=_pause_of(details))


def _error_of(response: UpstreamResponse, found: Status, details: list[Detail]) -> BackendError:
    if any(detail.reason in KEY_REASONS for detail in details):
        return CredentialRefused(REFUSED_CREDENTIAL)
    if found.status in ERRORS:
        error, message = ERRORS[found.status]
        return error(message)
    if found.status not in {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE"}:
        return status_error(response)
    message = found.message.lower()
    if LONG_INPUT.search(message):
        length = LENGTH.search(message)
        return input_too_long(int(length[1]) if length else None)
    return InvalidWork(REFUSED_INPUT)


def _status_of(response: UpstreamResponse) -> Status:
    try:
        body = msgspec.json.decode(response.body)
        # Some of the APIs put the error into a list.
        return msgspec.convert(body[0] if isinstance(body, list) and body else body, ErrorBody).error
    except (msgspec.DecodeError, ValueError, RecursionError):
        return Status()


def _is_readable(detail: object) -> bool:
    return isinstance(detail, dict) and all(
        isinstance(detail.get(name, ""), str) for name in ("reason", "retryDelay")
    )


def _pause_of(details: list[Detail]) -> float | None:
    delays = [DELAY.fullmatch(detail.retry_delay) for detail in details]
    found = [float(delay[1]) for delay in delays if delay is not None]
    return min(max(found), RETRY_AFTER_MAX_S) if found else None
