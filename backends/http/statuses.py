"""Statuses of upstreams that are no success: the error of each, its words, and its pause (`retry-after`).

A status that only one wire gives its own meaning is in that wire's module.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import wraps

from backends.contract.errors import (
    BackendError,
    CredentialRefused,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    RequestTooLarge,
)
from backends.http.answers import words_of_error
from backends.http.client import UpstreamResponse

# An upstream that asks for a longer pause is asked again after this time.
RETRY_AFTER_MAX_S = 60.0
REFUSED_CREDENTIAL = "the upstream refused the gateway's credential"


def with_answer(
    translate: Callable[[UpstreamResponse], BackendError],
) -> Callable[[UpstreamResponse], BackendError]:
    """Add the status, the words and the requested pause of a response to its error."""

    @wraps(translate)
    def translated(response: UpstreamResponse) -> BackendError:
        return translate(response).with_facts(
            detail=words_of_error(response),
            upstream_status=str(response.status),
            retry_after_s=retry_after_of(response),
        )

    return translated


def retry_after_of(response: UpstreamResponse) -> float | None:
    """Return the seconds for which a 429 or 503 asks for no requests, at most `RETRY_AFTER_MAX_S`."""
    if response.status not in {429, 503}:
        return None
    headers = response.headers
    milliseconds = _number(headers.get("retry-after-ms", ""))
    seconds = milliseconds / 1000 if milliseconds is not None else _number(headers.get("retry-after", ""))
    if seconds is None:
        seconds = _seconds_until(headers.get("retry-after", ""), headers.get("date", ""))
    return None if seconds is None else min(max(seconds, 0.0), RETRY_AFTER_MAX_S)


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\s*\d{1,12}(?:\.\d{1,6})?\s*", text) else None


def _seconds_until(moment: str, sent: str) -> float | None:
    """Return the seconds to a date from that of its response, by the upstream's own clock, or from now."""
    try:
        start = parsedate_to_datetime(sent) if sent else datetime.now(UTC)
        return (parsedate_to_datetime(moment) - start).total_seconds()
    except (TypeError, ValueError):
        return None


def account_spent() -> BackendError:
    """Return the error of an account that is used up: its replica works, and is asked again after a while."""
    error = ReplicaOverloaded("the quota of the gateway's account at the upstream is used up")
    return error.with_facts(retry_after_s=RETRY_AFTER_MAX_S)


@with_answer
def status_error(response: UpstreamResponse) -> BackendError:
    """Return the error of a status that means the same on every wire, with the facts of the answer."""
    request = f"{response.request} " if response.request else ""
    # 529: of OpenRouter, whose provider has no room.
    match response.status:
        case 401 | 403:
            return CredentialRefused(REFUSED_CREDENTIAL)
        case 402:
            return account_spent()
        case 413:
            return RequestTooLarge("the upstream refused the size of the request")
        case 429 | 529:
            return ReplicaOverloaded("the upstream is overloaded")
        case 503:
            return ReplicaUnavailable("the upstream reports that it is not ready")
        case 404 | 405:
            return ReplicaFailed(
                f"the upstream answered {request}with status {response.status}: "
                "check `backend` and the path of the base URL"
            )
    return ReplicaFailed(f"the upstream answered {request}with status {response.status}")
