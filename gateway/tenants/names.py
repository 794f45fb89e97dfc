"""Rules for the names that operators give to keys and tenants. Pure."""

# Names appear in headers and paths, which have size limits of their own.
NAME_CHARACTERS_MAX = 1000


def name_problem(name: str | None) -> str | None:
    """Return why this is no name for a key or a tenant, or None. Over HTTP it is one segment of a path."""
    if name is None:
        return None
    if not name.isprintable() or name.strip() != name or name in ("", ".", ".."):
        return "a name must not be empty, surrounded by spaces, or contain unprintable characters"
    if len(name) > NAME_CHARACTERS_MAX:
        return f"a name has {NAME_CHARACTERS_MAX} characters at most"
    return "a name has no /" if "/" in name else None


def id_problem(id_: str | None) -> str | None:
    """Return why this is no key id, or None. The id is part of the key, and therefore of a header."""
    if problem := name_problem(id_):
        return problem
    if id_ is not None and not (id_.isascii() and " " not in id_):
        return "an id has only ASCII characters and no spaces, because it is part of the key"
    return None


# For an operator who creates the first tenant in the store.
FIRST_KEY_NOTE = (
    "this is the first tenant in Redis: the first key is refused after the next start of a gateway; "
    "for /admin create a key with the scope admin, or list one in `admin.keys`"
)
# For an operator whose file has its first tenant after a reload.
FIRST_KEY_ENDED_NOTE = (
    "there are tenants in router.yaml: the first key is refused from now on; "
    "for /admin create a key with the scope admin, or list one in `admin.keys`"
)

# For an operator who gives a budget to a key or a tenant.
NO_PRICE_NOTE = (
    "no model here has a price, so that nothing is spent from the budget; set `currency` and "
    "`models.<name>.price_per_million_tokens`"
)


def unknown_tenant_note(tenant: str) -> str:
    """Return the note for an operator whose key belongs to a tenant that is defined nowhere."""
    problem = f"tenant {tenant} is in neither router.yaml nor Redis"
    return f"{problem}: the key is refused until that tenant is defined"
