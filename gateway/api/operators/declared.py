"""Replies that the endpoints share by which operators declare something.

A reload or an edit is reported with its changes, or with the problems that prevented them.
"""

from collections.abc import Awaitable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import msgspec
from litestar.openapi.datastructures import ResponseSpec

from gateway.config.diff import ConfigChange, ReloadOutcome
from gateway.config.problems import Problem
from gateway.config.schema import LimitAmount, limit_problems
from gateway.errors import DeadlineExceeded, GatewayError, InvalidInput, NotFound, QuotaUnavailable
from gateway.store.errors import StoreUnavailable

# Kind of an outcome's problems → error of the reply.
PROBLEM_ERRORS: dict[str, type[GatewayError]] = {
    "invalid": InvalidInput,
    "unknown": NotFound,
    "unavailable": QuotaUnavailable,
}


class ReportedChange(msgspec.Struct):
    """One changed setting. detail: old → new value, unless one of them is a secret."""

    path: str
    how: Literal["added", "removed", "changed"]
    detail: str


class ReloadReport(msgspec.Struct):
    """Changes that a reload applied, and changes of the file that need a restart."""

    changes: list[ReportedChange]
    needs_restart: list[ReportedChange]


CHANGED = {
    200: ResponseSpec(
        ReloadReport, generate_examples=False, description="The changes, which apply to every new call"
    )
}


async def report(pending: Awaitable[ReloadOutcome]) -> ReloadReport:
    """Wait for the outcome of a reload or an edit, and report it.

    Raises: InvalidInput, NotFound or QuotaUnavailable if nothing has changed; DeadlineExceeded.
    """
    try:
        outcome = await pending
    except TimeoutError as error:
        message = "the reload takes long and continues in the background; the log reports its result"
        raise DeadlineExceeded(message) from error
    if outcome.problems:
        raise problems_error(outcome.problems, PROBLEM_ERRORS[outcome.kind])
    return ReloadReport(_reported(outcome.changes), _reported(outcome.needs_restart))


def problems_error(problems: Iterable[Problem], kind: type[GatewayError] = InvalidInput) -> GatewayError:
    """Return an error that lists every problem with its path, and its line if it is one of the file."""
    return kind("nothing has changed: " + "; ".join(map(str, problems)))


def _reported(changes: Iterable[ConfigChange]) -> list[ReportedChange]:
    return [ReportedChange(change.path, change.how, change.detail) for change in changes]


class EmptyObject(msgspec.Struct):
    """An empty object."""


REMOVED = {200: ResponseSpec(EmptyObject, generate_examples=False, description="It was removed")}


@contextmanager
def store_errors() -> Iterator[None]:
    """Translate an outage of the store.

    Raises: QuotaUnavailable.
    """
    try:
        yield
    except StoreUnavailable as error:
        raise QuotaUnavailable("the store of tenants and keys is unavailable") from error


def check_limits(limits: Mapping[str, LimitAmount]) -> None:
    """Check the names and the amounts of limits.

    Raises: InvalidInput if one is unknown or wrong.
    """
    for name, problem in limit_problems(limits).items():
        raise InvalidInput(f"{name}: {problem}", param="limits")
