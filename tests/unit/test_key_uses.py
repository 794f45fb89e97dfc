"""The day on which a key was used last: one note for each key and day, in batches."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.config.schema import TenantConfig
from gateway.store.errors import StoreUnavailable
from gateway.tenants import follower as follower_module
from gateway.tenants.file_store import FILE_NAME, FileTenantStore
from gateway.tenants.follower import KeyFollower
from gateway.tenants.keyring import Keyring, StoredKey, key_digest
from tests.actors import TESTER
from tests.waiting import PATIENCE_S

NOON_S = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()
DAY_S = 24 * 3600


class Store(FileTenantStore):
    """Store that counts what it is told of uses. away: it cannot be written to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.notes: list[dict[str, str]] = []
        self.away = False

    async def note_uses(self, days: Mapping[str, str]) -> None:
        """Note uses, and count that."""
        if self.away:
            raise StoreUnavailable("no answer")
        self.notes.append(dict(days))
        await super().note_uses(days)


def test_a_key_is_noted_once_a_day() -> None:
    clock = [NOON_S]
    keyring = Keyring({}, None, lambda: clock[0], has_store=True)
    keys = [StoredKey(id_, key_digest(id_), "acme") for id_ in ("a", "b")]
    keyring.replace_stored(keys, {"acme": TenantConfig()})
    assert {} == keyring.take_uses()
    for _ in range(3):
        keyring.identify("a")
    assert {"a": "2026-11-21"} == keyring.take_uses()
    # Reading the keys again, after any change, does not note them again.
    keyring.replace_stored(keys, {"acme": TenantConfig(weight=2)})
    keyring.identify("a")
    keyring.identify("b")
    assert {"b": "2026-11-21"} == keyring.take_uses()
    clock[0] += DAY_S
    keyring.take_uses()
    keyring.identify("a")
    assert {"a": "2026-11-22"} == keyring.take_uses()


async def test_notes_are_stored_together_and_kept_while_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "NOTE_USES_EVERY_S", 0.0)
    store, keyring = Store(tmp_path / FILE_NAME), Keyring({}, None, has_store=True)
    await store.put_tenant("acme", TenantConfig(), by=TESTER)
    for id_ in ("a", "b", "c"):
        await store.create_key(StoredKey(id_, key_digest(id_), "acme"), by=TESTER)
    follower = KeyFollower(keyring, store, 60.0, lambda: None)
    running = asyncio.create_task(follower.run())
    await follower.refresh()
    store.away = True
    keyring.identify("a")
    keyring.identify("b")
    await follower.refresh()
    assert {} == await store.last_uses()
    store.away = False
    async with asyncio.timeout(PATIENCE_S):
        while not store.notes:  # noqa: ASYNC110 - the follower has no event for it
            await asyncio.sleep(0.01)
    assert [{"a", "b"}] == [set(days) for days in store.notes]
    keyring.identify("c")
    # The last ones are noted at the end.
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert {"a", "b", "c"} == (await store.last_uses()).keys()
    assert all(keyring.take_uses() == {} for _ in range(2))
