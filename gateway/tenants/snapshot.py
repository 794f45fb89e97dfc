"""Snapshot of the keys and tenants in Redis, in `state_dir`: digests, never a key itself.

A gateway that starts while Redis is unavailable serves its callers from it, and one that starts after Redis
has lost its data knows by it what was lost. The time of the file is that at which Redis last confirmed it.
"""

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from gateway.config import schema as config
from gateway.config.state_folder import make_private_folder, replace_private
from gateway.tenants.keyring import StoredKey
from gateway.tenants.losses import Stored
from gateway.tenants.store import StoreState, check_stored_limits

FILE_NAME = "redis-tenants.json"
# Some 50,000 keys.
FILE_BYTES_MAX = 16 * 1024 * 1024
# How often an unchanged snapshot is confirmed.
CONFIRM_EVERY_S = 15.0
# Difference between the clocks of this host and of Redis that a snapshot may have.
CLOCKS_DIFFER_S = 60.0

logger = logging.getLogger("gateway")


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

    def all_limits(self) -> Iterator[dict[str, config.LimitAmount]]:
        """Yield the limits of every key and tenant."""
        for key in (*self.keys, *self.kept_keys):
            yield key.limits
        for tenant in (*self.tenants.values(), *self.kept_tenants.values()):
            yield tenant.limits
            yield from tenant.model_limits.values()


class SnapshotFile:
    """File of one gateway. url: of the store, whose snapshot a file of another store is not."""

    def __init__(self, path: Path, url: str) -> None:
        self._path = path
        self.store = _address_digest(url)
        self._confirmed_s = 0.0
        self._logged = ""

    def read(self) -> tuple[Snapshot, float] | None:
        """Return the snapshot and the time at which it was last confirmed; None if there is none."""
        try:
            confirmed_s = self._path.stat().st_mtime
            content = msgspec.json.decode(self._path.read_bytes(), type=Snapshot)
            for limits in content.all_limits():
                check_stored_limits(limits)
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


def _address_digest(url: str) -> str:
    """Return a digest of a store's address without its password, which may change."""
    parts = urlsplit(url)
    hosts = parts.netloc.rpartition("@")[2]
    return hashlib.sha256(f"{parts.scheme}://{hosts}{parts.path}".encode()).hexdigest()
