"""Loss of stored keys and tenants: how it differs from a change, and what is kept of it. Pure.

Every change counts the version of the store up. Data is lost if the version is missing or goes back, begins
another lineage, or stays while there are fewer keys or tenants.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from gateway.config import schema as config
from gateway.tenants.keyring import StoredKey
from gateway.tenants.store import StoreState, removal_of_key, removal_of_tenant


class Stored(msgspec.Struct, frozen=True):
    """Keys and tenants as the store had them, or as they are kept after a loss."""

    keys: tuple[StoredKey, ...] = ()
    tenants: Mapping[str, config.TenantConfig] = {}

    def __bool__(self) -> bool:
        """Return whether there is any key or tenant."""
        return bool(self.keys or self.tenants)

    def lacking_in(self, current: "Stored", removals: Collection[str]) -> "Stored":
        """Return what the store does not have and no operator has removed.

        A key whose id or digest the store has again is not missing, and neither is a key of a tenant that was
        removed.
        """
        ids, digests = _names(current.keys)
        keys = [
            key
            for key in self.keys
            if key.id not in ids
            and key.digest not in digests
            and removal_of_key(key.id) not in removals
            and removal_of_tenant(key.tenant) not in removals
        ]
        tenants = {
            name: settings
            for name, settings in self.tenants.items()
            if name not in current.tenants and removal_of_tenant(name) not in removals
        }
        return Stored(tuple(keys), tenants)

    def joined(self, kept: "Stored") -> "Stored":
        """Return everything that is valid: the store's, and what is kept of what it has lost."""
        return Stored((*self.keys, *kept.keys), {**kept.tenants, **self.tenants})


def _names(keys: Iterable[StoredKey]) -> tuple[set[str], set[str]]:
    ids, digests = set[str](), set[str]()
    for key in keys:
        ids.add(key.id)
        digests.add(key.digest)
    return ids, digests


def loss_between(seen: StoreState, now: StoreState) -> str:
    """Return why the store has lost data since it was last seen; nothing if it was only changed."""
    if seen.keys is None or now.keys is None or seen.tenants is None or now.tenants is None:
        # A file whose numbers are not counted: only its host's operator can remove it.
        return ""
    if now.version == seen.version:
        has_fewer = now.keys < seen.keys or now.tenants < seen.tenants
        return "there are fewer than before, without a change" if has_fewer else ""
    return _loss_by_version(seen.version, now.version)


def tenants_end_first_key(seen: StoreState | None, now: StoreState, reason: str, *, has_ended: bool) -> bool:
    """Return whether tenants in the store have ended the first key: their loss does not bring it back.

    Their removal by operators does. has_ended: as of `seen`. reason: of a loss between the two.
    """
    had_tenants = seen is not None and bool(seen.tenants)
    if now.tenants or reason:
        return bool(now.tenants) or has_ended or had_tenants
    return has_ended and not had_tenants


def _loss_by_version(seen: bytes, now: bytes) -> str:
    if not seen:
        return ""
    if not now:
        return "their version is missing"
    before, after = _lineage(seen), _lineage(now)
    if before is None or after is None:
        # One of them was written by an earlier release, whose versions are not ordered.
        return ""
    if after[0] != before[0]:
        return "they were written again from nothing"
    if after[1] <= before[1]:
        return "their version is that of an older copy"
    return ""


def _lineage(version: bytes) -> tuple[bytes, int] | None:
    """Return the lineage and the number of a version; None for one of an earlier release."""
    parts = version.split(b".")
    if len(parts) != 3 or not parts[1].isdigit():
        return None
    return parts[0], int(parts[1])
