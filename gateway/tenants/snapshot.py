"""Loss of stored keys and tenants, and their snapshot in `state_dir`: digests, never a key itself.

Every change counts the version of the store up. Data is lost if the version is missing or goes back, begins
another lineage, or stays while there are fewer keys or tenants. A gateway that starts while Redis is
unavailable serves its callers from the snapshot, and one that starts after Redis has lost its data knows by
it what was lost. The time of the file is that at which Redis last confirmed it.
"""

import hashlib
import logging
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from gateway.config import schema as config
from gateway.config.state_folder import make_private_folder, replace_private
from gateway.tenants.keyring import StoredKey
from gateway.tenants.store import StoreState, check_limits, removal_of_key, removal_of_tenant

logger = logging.getLogger("gateway")


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
        ids = {key.id for key in current.keys}
        digests = {key.digest for key in current.keys}
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


FILE_NAME = "redis-tenants.json"
# Some 50,000 keys.
FILE_BYTES_MAX = 16 * 1024 * 1024
# How often an unchanged snapshot is confirmed.
CONFIRM_EVERY_S = 15.0
# Difference between the clocks of this host and of Redis that a snapshot may have.
CLOCKS_DIFFER_S = 60.0


class Loss(msgspec.Struct, frozen=True):
    """Loss of stored data. at_s: when this gateway noticed it, in seconds since 1970.

    reason: why it is one. seen_s: when the store was last seen whole, on its own clock. keys, tenants: all
    that were lost, some of which may be restored or removed since.
    """

    at_s: float
    seen_s: float
    reason: str
    keys: int
    tenants: int


class Snapshot(msgspec.Struct, frozen=True):
    """Content of the file.

    store: digest of the store's address. version, stored_keys, stored_tenants: its state. keys, tenants:
    those in the store. loss: of the data in `kept_keys` and `kept_tenants`, which are valid for a while.
    first_key_has_ended: the store had tenants, and no operator has removed them since.
    """

    store: str
    version: str
    stored_keys: int
    stored_tenants: int
    keys: tuple[StoredKey, ...] = ()
    tenants: dict[str, config.TenantConfig] = {}
    loss: Loss | None = None
    kept_keys: tuple[StoredKey, ...] = ()
    kept_tenants: dict[str, config.TenantConfig] = {}
    first_key_has_ended: bool = False

    @property
    def ends_first_key(self) -> bool:
        """True if tenants have ended the first key. An earlier release wrote only the tenants."""
        return self.first_key_has_ended or bool(self.stored_tenants or self.kept_tenants)

    @property
    def stored(self) -> Stored:
        """Keys and tenants in the store."""
        return Stored(self.keys, self.tenants)

    @property
    def kept(self) -> Stored:
        """Keys and tenants that the store has lost."""
        return Stored(self.kept_keys, self.kept_tenants)

    def state(self, confirmed_s: float) -> StoreState:
        """Return the state of the store as it was when the file was last confirmed."""
        return StoreState(
            self.version.encode(), confirmed_s - CLOCKS_DIFFER_S, "", self.stored_keys, self.stored_tenants
        )


class SnapshotFile:
    """File of one gateway. url: of the store, whose snapshot a file of another store is not."""

    def __init__(self, path: Path, url: str) -> None:
        self._path = path
        parts = urlsplit(url)
        # Without its password, which may change.
        address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self.store = hashlib.sha256(address.encode()).hexdigest()
        self._confirmed_s = 0.0
        self._logged = ""

    def read(self) -> tuple[Snapshot, float] | None:
        """Return the snapshot and the time at which it was last confirmed; None if there is none."""
        try:
            confirmed_s = self._path.stat().st_mtime
            content = msgspec.json.decode(self._path.read_bytes(), type=Snapshot)
            check_limits(content.keys, content.tenants.values())
            check_limits(content.kept_keys, content.kept_tenants.values())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            self._log(f"the snapshot {self._path} of keys and tenants is not used: {error}")
            return None
        return (content, confirmed_s) if content.store == self.store else None

    def write(self, snapshot: Snapshot) -> None:
        """Replace the file in one step. A failure is logged."""
        encoded = msgspec.json.encode(snapshot)
        if len(encoded) > FILE_BYTES_MAX:
            self._log(f"no snapshot of keys and tenants is kept: it would exceed {FILE_BYTES_MAX} bytes")
            return
        try:
            make_private_folder(self._path.parent)
            replace_private(self._path, encoded)
        except OSError as error:
            self._log(f"the snapshot {self._path} of keys and tenants cannot be written: {error.strerror}")
        self._confirmed_s = time.monotonic()

    @property
    def is_due(self) -> bool:
        """True if the file is to be confirmed again."""
        return time.monotonic() - self._confirmed_s >= CONFIRM_EVERY_S

    def confirm(self) -> bool:
        """Record that the content is still that of the store; return False if the file is gone."""
        self._confirmed_s = time.monotonic()
        try:
            os.utime(self._path)
        except OSError:
            return False
        return True

    def _log(self, message: str) -> None:
        if message != self._logged:
            self._logged = message
            logger.warning("%s", message)
