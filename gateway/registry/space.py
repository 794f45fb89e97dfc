"""Choice of the cached models to remove for a bound on the disk. Pure."""

from collections.abc import Collection, Sequence

from backends.checkpoints.hub import CachedModel


class NoSpace(Exception):
    """A download does not fit below the bound; the message has the sizes."""


def models_to_remove(
    cached: Sequence[CachedModel], used: Collection[str], needed_bytes: int, bound_bytes: int
) -> list[CachedModel]:
    """Return the models to remove before a download, those first that were not used for the longest time.

    used: models that must stay. needed_bytes: of the download. Raises: NoSpace, if that is not enough.
    """
    over = sum(model.stored_bytes for model in cached) + needed_bytes - bound_bytes
    removed: list[CachedModel] = []
    for model in sorted(cached, key=lambda found: found.used_s):
        if over <= 0:
            break
        if model.repository not in used:
            removed.append(model)
            over -= model.stored_bytes
    if over > 0:
        raise NoSpace(
            f"the download has {_megabytes(needed_bytes)}, and {_megabytes(over)} too many for "
            f"`registry.disk_bytes` of {_megabytes(bound_bytes)}; the other models are in use"
        )
    return removed


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
