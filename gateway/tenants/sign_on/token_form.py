"""Form of a token: a JSON Web Token in its compact form. Pure; its signature is checked elsewhere.

Rule: everything here is cheap, because a caller without a key can send it. What a token says of itself, such
as where its key is (`jku`, `x5u`, `jwk`), is never followed.
"""

import base64
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn, get_args

import msgspec

from gateway.config.schema import SignatureAlgorithm
from gateway.errors import TokenRefused

# Tokens of users in many groups have 4 KB. The head of a request may have 64.
TOKEN_CHARACTERS_MAX = 8192
KEY_ID_CHARACTERS_MAX = 256
# Roles in a hundred applications have some 200 of them. Thousands would be nested deeper than the stack.
BRACKETS_MAX = 500
# `{` and a sign, a space or the end of a line, in base64url. The gateway's own keys begin with gw_.
BEGINNINGS = ("ey", "ew")
BASE64URL = re.compile(r"[A-Za-z0-9_-]+")
ALGORITHMS: frozenset[str] = frozenset(get_args(SignatureAlgorithm))
# Access tokens (RFC 9068) and ID tokens. Other types, such as logout tokens and proofs, are no credentials.
TYPES = frozenset({"jwt", "at+jwt", "application/jwt", "application/at+jwt"})


class UnverifiedToken(msgspec.Struct, frozen=True):
    """Token of valid form, whose content is not proven yet. key_id: `kid`, None without one."""

    text: str
    algorithm: str
    key_id: str | None
    claims: Mapping[str, Any]
    signature: bytes


def is_token(key: str) -> bool:
    """Return whether a credential is a token and no API key, by its first letters."""
    return key.startswith(BEGINNINGS) and "." in key


def parse_token(text: str) -> UnverifiedToken:
    """Return the header and the claims of a token. Raises: TokenRefused."""
    if len(text) > TOKEN_CHARACTERS_MAX:
        raise TokenRefused("size", f"the token has more than {TOKEN_CHARACTERS_MAX} characters")
    parts = text.split(".")
    if len(parts) == 5 and "enc" in _object_in(parts[0]):
        raise TokenRefused("encrypted", "the token is encrypted; send one that is signed only")
    if len(parts) != 3:
        raise TokenRefused("form", "the token is not three parts with a dot between them")
    header = _object_in(parts[0])
    algorithm = _checked_algorithm(header)
    if not parts[1]:
        raise TokenRefused("form", "the token has no claims: a detached signature is not accepted")
    claims = _object_in(parts[1])
    return UnverifiedToken(text, algorithm, header.get("kid"), claims, _bytes_in(parts[2]))


def _checked_algorithm(header: Mapping[str, Any]) -> str:
    """Return the algorithm of a header that has nothing unexpected. Raises: TokenRefused."""
    if "crit" in header or header.get("b64", True) is not True:
        raise TokenRefused("header", "the token needs an extension (crit or b64), and none is supported")
    kind, content, key_id = header.get("typ"), header.get("cty"), header.get("kid")
    if content is not None:
        raise TokenRefused("type", "the token contains something else (cty), such as another token")
    if kind is not None and not (isinstance(kind, str) and kind.lower() in TYPES):
        raise TokenRefused("type", "the token has a type (typ) other than JWT and at+jwt")
    algorithm = header.get("alg")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise TokenRefused("algorithm", "the token is not signed by a public-key algorithm")
    if "kid" in header and not (isinstance(key_id, str) and 0 < len(key_id) <= KEY_ID_CHARACTERS_MAX):
        raise TokenRefused("header", "the token names its key (kid) by something other than a short text")
    return algorithm


def _object_in(part: str) -> dict[str, Any]:
    """Return the JSON object that a part of a token contains. Raises: TokenRefused."""
    data = _bytes_in(part)
    if data.count(b"[") + data.count(b"{") > BRACKETS_MAX:
        raise TokenRefused("form", "a part of the token has too many lists and objects")
    try:
        content = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise TokenRefused("form", "a part of the token is not JSON") from error
    if not isinstance(content, dict):
        raise TokenRefused("form", "a part of the token is not a JSON object")
    return content


def _bytes_in(part: str) -> bytes:
    """Return the bytes that a part of a token stands for. Raises: TokenRefused."""
    if not BASE64URL.fullmatch(part) or len(part) % 4 == 1:
        raise TokenRefused("form", "a part of the token is not base64url")
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object each of whose names occurs once: readers differ in which of two they take."""
    content = dict(pairs)
    if len(content) != len(pairs):
        raise TokenRefused("form", "a name occurs twice in the token")
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
