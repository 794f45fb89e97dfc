"""Translation of errors that Litestar and msgspec raise while reading a request into gateway errors."""

import re
from collections.abc import Callable
from typing import Any

import msgspec
from litestar.exceptions import (
    HTTPException,
    MethodNotAllowedException,
    NotFoundException,
    ValidationException,
)

from gateway.api.server.allowed_values import choices_of
from gateway.errors import GatewayError, Internal, InvalidInput, MalformedBody, MethodNotAllowed, NotFound
from gateway.upstreams.token_ids import IDS_REFUSED

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
