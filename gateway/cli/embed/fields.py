"""Choice of the column of texts. Pure."""

from collections.abc import Sequence

from gateway.cli.embed.plan import EmbedFailed

DEFAULT_FIELD = "text"
NAMES_SHOWN = 20


def choose_field(given: str | None, names: Sequence[str], texts: Sequence[str], path: str) -> str:
    """Return the column of texts: the given one, `text`, or the only one that has texts.

    names: all columns. texts: those of strings. Raises: EmbedFailed.
    """
    if given is not None:
        check_fields(names, given, path)
        if given not in texts:
            raise EmbedFailed(f"{path}: the column `{given}` holds no texts; {_listed('texts', texts)}")
        return given
    if DEFAULT_FIELD in texts:
        return DEFAULT_FIELD
    if len(texts) == 1:
        return texts[0]
    raise EmbedFailed(
        f"{path}: no column `{DEFAULT_FIELD}`, and {len(texts)} columns with texts; "
        f"choose with --field: {_listed('columns', texts or names)}"
    )


def check_fields(names: Sequence[str], needed: str | None, path: str) -> None:
    """Check that a column is there. Raises: EmbedFailed."""
    if needed is not None and needed not in names:
        raise EmbedFailed(f"{path}: there is no column `{needed}`; {_listed('columns', names)}")


def _listed(what: str, names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:NAMES_SHOWN])
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{what}: {shown or 'none'}{more}"
