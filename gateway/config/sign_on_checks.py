"""Checks of the issuers of single sign-on."""

import re
from collections.abc import Collection, Iterator, Mapping
from urllib.parse import urlsplit

from gateway.config.problems import Problem, unknown_models
from gateway.config.schema import (
    ClaimMapping,
    ConsoleClient,
    IssuerSettings,
    LimitAmount,
    is_loopback,
    limit_problems,
)

# Part of the ids under which its users appear in usage, limits and logs.
NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
# Printable ASCII without the characters that RFC 3986 has no place for.
WRITTEN = re.compile(r"[!#-;=?@A-Z\[\]_a-z~]{1,2048}")


def sign_on_problems(issuers: Mapping[str, IssuerSettings], models: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of all issuers. models: names of the models."""
    names: dict[str, str] = {}
    for name, settings in issuers.items():
        path = f"sign_on.{name}"
        if not NAME.fullmatch(name):
            yield Problem(path, "a name has up to 32 letters, digits, - and _: it is part of users' ids")
        if problem := address_problem(settings.issuer):
            yield Problem(f"{path}.issuer", problem)
        elif "?" in settings.issuer:
            yield Problem(f"{path}.issuer", "has a query, which the address of an issuer has not")
        elif (other := names.setdefault(issuer_key(settings.issuer), name)) != name:
            yield Problem(f"{path}.issuer", f"is also sign_on.{other}.issuer")
        if not all(settings.audience):
            yield Problem(f"{path}.audience", "has an empty text")
        yield from _console_problems(settings.console, f"{path}.console")
        yield from _claim_problems(settings.claims, f"{path}.claims", models)


def issuer_key(address: str) -> str:
    """Return the address of an issuer without a slash at its end, which leads to the same description."""
    return address.removesuffix("/")


def _console_problems(client: ConsoleClient | None, path: str) -> Iterator[Problem]:
    if client is None:
        return
    if not client.client_id:
        yield Problem(f"{path}.client_id", "is empty")
    if "openid" not in client.scopes:
        yield Problem(f"{path}.scopes", "openid is missing, without which there is no ID token")


def _claim_problems(claims: ClaimMapping, path: str, models: Collection[str]) -> Iterator[Problem]:
    tables = {name: getattr(claims, name) for name in ("tenant", "scopes", "models", "limits")}
    paths = {"key": claims.key} | {name: table.claim for name, table in tables.items() if table is not None}
    for name, claim in paths.items():
        if not claim or not all(claim):
            yield Problem(f"{path}.{name}", "the name of its claim is empty")
    for value, names in ((claims.models and claims.models.values) or {}).items():
        yield from unknown_models(names, f"{path}.models.values.{value}", models)
    for place, limits in limits_of_users(claims, path):
        for name, message in limit_problems(limits).items():
            yield Problem(f"{place}.{name}", message)


def limits_of_users(claims: ClaimMapping, path: str) -> Iterator[tuple[str, Mapping[str, LimitAmount]]]:
    """Yield the limits that claims lead to, with their paths."""
    for value, limits in (claims.limits.values if claims.limits else {}).items():
        yield f"{path}.limits.values.{value}", limits


def address_problem(url: str, *, may_be_http: bool = True) -> str | None:
    """Return why an issuer, or one of its endpoints, cannot have an address; None if it can.

    may_be_http: on this machine. Elsewhere another server could send its own keys.
    """
    problem = "not a URL such as https://login.example.org, without a user name and a fragment"
    if not WRITTEN.fullmatch(url) or "#" in url:
        return problem
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return problem
    if not host or port == 0 or "@" in parts.netloc:
        return problem
    if parts.scheme == "http" and may_be_http and is_loopback(host):
        return None
    return None if parts.scheme == "https" else "needs https; http only on this machine's loopback"
