"""Keys and signatures of tokens, by PyJWT. Only this module imports it."""

import binascii
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jwt
import msgspec

from gateway.errors import TokenRefused
from gateway.tenants.sign_on.token_form import UnverifiedToken

logger = logging.getLogger("gateway")

# An issuer has two or three; each is read with each algorithm that it may be for.
KEYS_MAX = 100
# A shorter one can be factored, and each check with a longer one takes milliseconds.
RSA_BITS_MIN, RSA_BITS_MAX = 2048, 8192
CURVES = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521", "EdDSA": "Ed25519"}
KEY_TYPES = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
Key: TypeAlias = jwt.PyJWK


class KeySet:
    """Public keys of an issuer. by_id: by `kid`, which may be None, and algorithm."""

    def __init__(self, by_id: Mapping[tuple[str | None, str], Key]) -> None:
        self._by_id = by_id
        self._ids = frozenset(key_id for key_id, _ in by_id)

    def __len__(self) -> int:
        return len(self._ids)

    def find(self, key_id: str | None, algorithm: str) -> Key | None:
        """Return a key. A token that names none is checked with the only one of its algorithm."""
        if key_id is not None:
            return self._by_id.get((key_id, algorithm))
        fitting = [key for (_, of), key in self._by_id.items() if of == algorithm]
        return fitting[0] if len(fitting) == 1 else None

    def has(self, key_id: str | None) -> bool:
        """Return whether there is a key of this id, for any algorithm."""
        return key_id is not None and key_id in self._ids


NO_KEYS = KeySet({})


def read_keys(document: bytes, algorithms: Sequence[str]) -> KeySet:
    """Return the keys of a JSON Web Key Set that can be used with these algorithms.

    Keys of other kinds are left out, as their standard demands. Raises: ValueError.
    """
    try:
        content = msgspec.json.decode(document, type=dict[str, Any])
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    listed = content.get("keys")
    if not isinstance(listed, list) or len(listed) > KEYS_MAX:
        raise ValueError(f"it has no list of up to {KEYS_MAX} keys")
    by_id: dict[tuple[str | None, str], Key] = {}
    for entry in listed:
        for algorithm in algorithms:
            key_id = entry.get("kid") if isinstance(entry, dict) else None
            if (key := _key_of(entry, algorithm)) is not None:
                by_id.setdefault((key_id if isinstance(key_id, str) else None, algorithm), key)
    if not by_id:
        raise ValueError(f"it has no key for {', '.join(algorithms)}")
    return KeySet(by_id)


def _key_of(entry: Any, algorithm: str) -> Key | None:
    """Return an entry of a key set as a key for an algorithm, None if it is none."""
    if not isinstance(entry, dict) or not _fits(entry, algorithm):
        return None
    try:
        key = jwt.PyJWK(entry, algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError, binascii.Error) as error:
        logger.warning("a key of an issuer is left out: it cannot be read (%s)", type(error).__name__)
        return None
    bits = key.key.key_size if KEY_TYPES[algorithm[:2]] == "RSA" else RSA_BITS_MIN
    return key if RSA_BITS_MIN <= bits <= RSA_BITS_MAX else None


def _fits(entry: Mapping[str, Any], algorithm: str) -> bool:
    operations = entry.get("key_ops", ["verify"])
    return (
        entry.get("kty") == KEY_TYPES[algorithm[:2]]
        and entry.get("use", "sig") == "sig"
        and isinstance(operations, list)
        and "verify" in operations
        and entry.get("alg", algorithm) == algorithm
        and entry.get("crv") == CURVES.get(algorithm)
        # A private key that its owner has published is no longer one.
        and "d" not in entry
    )


def verify(token: UnverifiedToken, key: Key, issuer: str, audience: Collection[str], skew_s: float) -> None:
    """Check the signature of a token, and then the token as a whole once more. Raises: TokenRefused."""
    # First by itself: the whole check reads a token letter by letter, in up to a millisecond.
    content = token.text.rpartition(".")[0].encode("ascii")
    if not key.Algorithm.verify(content, key.key, token.signature):
        raise TokenRefused("signature", "the token's signature is wrong")
    try:
        jwt.decode(
            token.text,
            key,
            algorithms=[token.algorithm],
            audience=list(audience),
            issuer=issuer,
            leeway=skew_s,
            options={"require": ["exp", "iss", "aud"], "verify_jti": False, "verify_sub": False},
        )
    except (jwt.PyJWTError, ValueError) as error:
        raise TokenRefused("form", "the token is not a valid JSON Web Token") from error
