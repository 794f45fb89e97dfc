"""End users: the people or programs for which a tenant calls, by the names that its requests state.

They are personal data. Nothing is read unless `end_users` is set, and by default only a digest of a name is
used further: in logs, traces, usage and limits. A name is no proof of anything: a limit by end user protects
a tenant's users from each other, and the tenant's own limits hold whatever names it states.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from gateway.config.schema import EndUsersSettings
from gateway.quotas.end_users import EndUser
from gateway.quotas.limits import OTHER_USERS

# Field of the body, among the names of headers.
USER_FIELD = "user"
# A longer name is used as its digest.
NAME_CHARACTERS_MAX = 64
DIGEST = re.compile(r"sha256:[0-9a-f]{24}")
DIGEST_DIGITS = 24


class EndUserReader:
    """Reader of the end user of a request, from the first source that states one."""

    def __init__(self, settings: EndUsersSettings) -> None:
        self._most = settings.most
        self._is_plain = settings.log == "plain"
        # None is the field of the body.
        self._sources = tuple(
            None if name == USER_FIELD else name.lower().encode() for name in settings.sources
        )

    def read(self, tenant: str, headers: Mapping[bytes, bytes], body: Any) -> EndUser | None:
        """Return the end user for whom a request is sent, None if it states none.

        headers: by name; the last value of each.
        """
        for source in self._sources:
            if source is None:
                stated = getattr(body, USER_FIELD, None)
            else:
                value = headers.get(source)
                stated = None if value is None else value.decode("latin-1")
            if isinstance(stated, str) and (name := stated.strip()):
                return EndUser(known_as(tenant, name, is_plain=self._is_plain), self._most)
        return None


def known_as(tenant: str, name: str, *, is_plain: bool) -> str:
    """Return the name under which an end user is counted and logged.

    A plain name that is too long, has other than printable characters, or looks like a digest or the name of
    all others, is used as its digest.
    """
    is_short = len(name) <= NAME_CHARACTERS_MAX and name.isprintable()
    if is_plain and is_short and name != OTHER_USERS and not name.startswith("sha256:"):
        return name
    return digest_of_user(tenant, name)


def digest_of_user(tenant: str, name: str) -> str:
    """Return the digest of an end user's name, which differs from tenant to tenant."""
    content = f"{tenant}\0{name}".encode(errors="surrogatepass")
    return f"sha256:{hashlib.sha256(content).hexdigest()[:DIGEST_DIGITS]}"


def names_of(tenant: str, name: str) -> tuple[str, ...]:
    """Return all names under which an end user may have been counted. name: as stated, or its digest."""
    if DIGEST.fullmatch(name):
        return (name,)
    return tuple(dict.fromkeys(known_as(tenant, name, is_plain=is_plain) for is_plain in (True, False)))
