"""Checks of API key digests and of limit names, which tenants, models and operators' keys share."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping

from gateway.config.problems import Problem
from gateway.config.schema import KEY_DIGEST, Key, LimitAmount, digest_of, limit_problems

# Keys that an attacker tries first. The empty one is the digest of a variable that was not set.
GUESSABLE_KEYS = ("", "admin", "changeme", "password", "secret", "test")
GUESSABLE_DIGESTS = frozenset("sha256:" + hashlib.sha256(key.encode()).hexdigest() for key in GUESSABLE_KEYS)


def key_problems(keys: Iterable[str | Key], path: str, first_use: dict[str, str]) -> Iterator[Problem]:
    """Yield the problems of a list of keys.

    first_use: digest → path of its first use, which is filled as keys are checked, because a key that is
    listed twice would not identify its tenant.
    """
    for index, key in enumerate(keys):
        digest, key_path = digest_of(key), f"{path}.keys[{index}]"
        if not KEY_DIGEST.fullmatch(digest):
            # The message leaves the value out: it may be a key in the clear.
            yield Problem(key_path, 'expected "sha256:" and 64 hex digits')
        elif digest in GUESSABLE_DIGESTS:
            yield Problem(
                key_path,
                "is an empty or easily guessed key; `gateway keys create` creates one",
            )
        elif digest in first_use:
            yield Problem(key_path, f"is also {first_use[digest]}")
        if isinstance(key, Key):
            yield from named_limit_problems(key.limits, f"{key_path}.limits")
        first_use.setdefault(digest, key_path)


def named_limit_problems(limits: Mapping[str, LimitAmount], path: str) -> Iterator[Problem]:
    """Yield a problem for each limit whose name is unknown, or whose amount is wrong."""
    return (Problem(f"{path}.{name}", message) for name, message in limit_problems(limits).items())
