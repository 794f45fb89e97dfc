"""People who can log in to this machine: programs of each of them reach a loopback address."""

import pwd
from collections.abc import Iterable

# Ids that Linux distributions give to people; macOS begins at 501.
PEOPLE = range(500, 65_000)
NO_SHELLS = ("/nologin", "/false", "/sync")


def people(accounts: Iterable[pwd.struct_passwd] | None = None) -> list[str]:
    """Return the names of people with an account and a shell, as far as the system lists them.

    A directory service that does not list its users hides them.
    """
    found = pwd.getpwall() if accounts is None else accounts
    return sorted(
        account.pw_name
        for account in found
        if account.pw_uid in PEOPLE and account.pw_shell and not account.pw_shell.endswith(NO_SHELLS)
    )
