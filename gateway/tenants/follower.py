"""Follower of the stored keys and tenants: it reads their changes into a gateway's keyring."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

from gateway.events import Observe, StoreLost, tenants_and_keys
from gateway.store.errors import StoreUnavailable
from gateway.tenants.file_store import FileTenantStore
from gateway.tenants.keyring import Keyring
from gateway.tenants.snapshot import Loss, Snapshot, SnapshotFile, Stored, loss_between, tenants_end_first_key
from gateway.tenants.store import FIRST_KEY, StoreState, TenantStore

# A revoked key is refused everywhere within a second: two polls.
LOOK_EVERY_S = 0.4
# Time between two notes of the days on which keys were used.
NOTE_USES_EVERY_S = 10.0
# Longest wait of an operator's request for the change that it made.
REFRESH_TIMEOUT_S = 2.0

logger = logging.getLogger("gateway")


class StoredState(msgspec.Struct, frozen=True):
    """Stored keys and tenants of one gateway, for its status and metrics.

    keys, tenants: in the store, as it was last read. kept_keys, kept_tenants: those that the store has lost
    and that are still valid here. loss, until_s: of these, None if nothing is kept; in seconds since 1970.
    trouble: why the store cannot be read now; nothing if it can.
    """

    keys: int = 0
    tenants: int = 0
    kept_keys: int = 0
    kept_tenants: int = 0
    loss: Loss | None = None
    until_s: float | None = None
    trouble: str = ""


class KeyFollower:
    """The only reader of the store for one keyring.

    grace_s: how long the stored keys stay valid while the store is down, or after it has lost them.
    on_change: called after the keyring has changed. clock: the wall clock, which the keyring uses too.
    snapshot: file of the stored keys, None if there is no folder for it. on_removed: called with the names of
    tenants that operators have removed, also if they are there again.
    """

    def __init__(
        self,
        keyring: Keyring,
        store: TenantStore | FileTenantStore,
        grace_s: float,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.time,
        *,
        observe: Observe = lambda _: None,
        snapshot: SnapshotFile | None = None,
        on_removed: Callable[[Collection[str]], None] = lambda _: None,
    ) -> None:
        self.store = store
        self._keyring = keyring
        self._grace_s = grace_s
        self._on_change = on_change
        self._clock = clock
        self._observe = observe
        self._snapshot = snapshot
        self._on_removed = on_removed
        # The store as it was last read, or as the snapshot has it.
        self._seen: StoreState | None = None
        self._seen_s = time.monotonic()
        self._stored = Stored()
        self._loss: Loss | None = None
        self._kept = Stored()
        # Tenants in the store have ended the first key, also if they are lost since.
        self._first_key_has_ended = False
        # The store has been read since the start.
        self._has_read = False
        # The keyring has what the store or the snapshot has.
        self._serves = False
        self._trouble: StoreUnavailable | None = None
        self._noted_s = 0.0
        self._wake = asyncio.Event()
        # Requests that wait until a read that begins after their change has ended.
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def state(self) -> StoredState:
        """State of the stored keys and tenants."""
        trouble = "" if self._trouble is None else str(self._trouble)
        counts = StoredState(len(self._stored.keys), len(self._stored.tenants), trouble=trouble)
        if self._loss is None:
            return counts
        return msgspec.structs.replace(
            counts,
            kept_keys=len(self._kept.keys),
            kept_tenants=len(self._kept.tenants),
            loss=self._loss,
            until_s=self._loss.at_s + self._grace_s,
        )

    @property
    def stored(self) -> Stored:
        """Keys and tenants in the store, as it was last read."""
        return self._stored

    @property
    def kept(self) -> Stored:
        """Keys and tenants that the store has lost, and that are still valid."""
        return self._kept

    def require_store(self) -> None:
        """Check that what is known of the store is what it has now. Raises: StoreUnavailable."""
        if self._trouble is not None or not self._has_read:
            raise self._trouble or StoreUnavailable("the store has not answered yet")

    @property
    def refusal(self) -> str:
        """Why the store has refused this gateway since its start; nothing if it has not."""
        if self._has_read or self._trouble is None or not self._trouble.is_refusal:
            return ""
        return str(self._trouble)

    @property
    def unserved(self) -> str:
        """Why no stored key is known here; nothing if they are."""
        if self._serves:
            return ""
        return "it has not answered yet" if self._trouble is None else str(self._trouble)

    @property
    def first_key_is_ending(self) -> bool:
        """True if the first key is valid here until the next start, because the store has tenants."""
        return self._keyring.first_key_is_ending

    def keeps_key(self, id_: str) -> bool:
        """Return whether a key is valid only because the store has lost it."""
        return any(key.id == id_ for key in self._kept.keys)

    async def run(self) -> None:
        """Follow the store's changes until cancelled; close the store then."""
        try:
            if self._snapshot is not None:
                await self._restore(self._snapshot)
            while True:
                self._wake.clear()
                waiters, self._waiters = self._waiters, []
                await self._read()
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(None)
                await self._note_uses()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), LOOK_EVERY_S)
        finally:
            await self._note_uses(at_once=True)
            await self.store.aclose()

    async def _note_uses(self, *, at_once: bool = False) -> None:
        """Store on which day each key was used last, now and then: once for each key and day."""
        now_s = time.monotonic()
        if not at_once and now_s - self._noted_s < NOTE_USES_EVERY_S:
            return
        self._noted_s = now_s
        if not (uses := self._keyring.take_uses()):
            return
        try:
            await self.store.note_uses(uses)
        except StoreUnavailable:
            self._keyring.return_uses(uses)

    async def refresh(self) -> None:
        """Wait until the keyring has every change made so far, or the store does not reply in time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(waiter, REFRESH_TIMEOUT_S)

    async def _restore(self, file: SnapshotFile) -> None:
        """Begin with what the snapshot has; its keys are valid if it was confirmed within `grace_s`."""
        found = await asyncio.to_thread(file.read)
        if found is None:
            return
        snapshot, confirmed_s = found
        age_s = max(0.0, self._clock() - confirmed_s)
        self._seen = snapshot.state(confirmed_s)
        self._first_key_has_ended = snapshot.ends_first_key
        self._stored, self._loss, self._kept = snapshot.stored, snapshot.loss, snapshot.kept
        if age_s <= self._grace_s:
            self._seen_s = time.monotonic() - age_s
            self._end_loss_in_time()
            if self._loss is not None:
                self._report_loss(self._loss, is_repeated=True)
            self._serves = True
            self._apply(is_current=False)

    async def _read(self) -> None:
        try:
            sent_s = self._clock()
            state = await self.store.look()
            self._keyring.follow_clock(state.clock_s - (sent_s + self._clock()) / 2)
            await self._report_removed(state)
            await self._follow(state)
        except StoreUnavailable as error:
            self._record_trouble(error)
            return
        self._trouble = None
        self._keyring.record_store(is_away=False)
        # A store that refuses to be written to can still be read.
        with suppress(StoreUnavailable):
            await self._share_first_key(state.first_key)

    async def _report_removed(self, state: StoreState) -> None:
        """Report tenants that were removed since the store was seen. Raises: StoreUnavailable."""
        if self._seen is None or self._seen.version == state.version:
            return
        removed = await self.store.removed_tenants(self._seen.clock_s)
        if removed := removed.difference(self._keyring.file_tenants):
            self._on_removed(removed)

    async def _follow(self, state: StoreState) -> None:
        """Take over the store's content if it has changed. Raises: StoreUnavailable."""
        seen = self._seen
        reason = "" if seen is None else loss_between(seen, state)
        has_ended = tenants_end_first_key(seen, state, reason, has_ended=self._first_key_has_ended)
        is_changed = seen is None or state.version != seen.version or bool(reason)
        if is_changed or not self._has_read or not self._serves:
            current = Stored(tuple(await self.store.keys()), await self.store.tenants())
            removals = frozenset[str]()
            if reason and seen is not None:
                removals = await self.store.removals(seen.clock_s)
            elif self._loss is not None:
                removals = await self.store.removals(self._loss.seen_s)
            again = await self.store.look()
            if loss_between(state, again):
                # It was emptied meanwhile: the next read compares that with what is known now.
                return
            if self._keyring.first_key_pending:
                has_tenants = bool(again.tenants or current.tenants)
                self._keyring.resolve_first_key(
                    is_active=not (has_tenants or has_ended), has_lost_tenants=not has_tenants
                )
            if reason and seen is not None:
                self._begin_loss(seen, current, removals, reason)
            self._kept = self._kept.lacking_in(current, removals)
            self._stored, self._has_read, self._serves = current, True, True
            self._apply()
        self._seen, self._seen_s = state, time.monotonic()
        self._first_key_has_ended = has_ended
        if self._end_loss_in_time():
            is_changed = True
            self._apply()
        await self._keep_snapshot(state, is_changed=is_changed)

    def _begin_loss(self, seen: StoreState, current: Stored, removals: Collection[str], reason: str) -> None:
        """Keep everything that was valid before the store lost it, and report that."""
        known = self._stored.joined(self._kept)
        missing = known.lacking_in(current, removals)
        if not missing:
            return
        self._kept = missing
        keys, tenants = len(missing.keys), len(missing.tenants)
        self._loss = Loss(self._clock(), seen.clock_s, reason, keys, tenants)
        self._report_loss(self._loss, is_repeated=False)

    def _report_loss(self, loss: Loss, *, is_repeated: bool) -> None:
        until = datetime.fromtimestamp(loss.at_s + self._grace_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        keys, tenants = len(self._kept.keys), len(self._kept.tenants)
        self._observe(StoreLost(keys, tenants, loss.reason, until, is_repeated))

    def _end_loss_in_time(self) -> bool:
        """Forget what is kept if it has been restored, or after `grace_s`. Return whether the loss ended."""
        if self._loss is None:
            return False
        if not self._kept:
            logger.info("all keys and tenants that Redis had lost were restored, replaced or removed")
            self._loss = None
            return True
        if self._clock() - self._loss.at_s <= self._grace_s:
            return False
        logger.error(
            "what Redis has lost is refused from now on (%s): quotas.key_grace_s is over",
            tenants_and_keys(len(self._kept.tenants), len(self._kept.keys)),
        )
        self._loss, self._kept = None, Stored()
        return True

    def _apply(self, *, is_current: bool = True) -> None:
        """Bring the keyring to what is stored and kept. is_current: the store was read."""
        valid = self._stored.joined(self._kept)
        self._keyring.replace_stored(valid.keys, valid.tenants, is_current=is_current)
        self._on_change()

    def _record_trouble(self, error: StoreUnavailable) -> None:
        """Note why the store cannot be read, and drop its keys once they cannot be trusted any more."""
        if error.is_refusal and not self.refusal and not self._has_read:
            logger.error("Redis refuses this gateway (%s): it is not ready, and knows no stored key", error)
        self._trouble = error
        self._keyring.record_store(is_away=True)
        if self._serves and time.monotonic() - self._seen_s > self._grace_s:
            self._keyring.forget_stored()
            self._serves = False
        elif self._end_loss_in_time() and self._serves:
            self._apply(is_current=self._has_read)

    async def _keep_snapshot(self, state: StoreState, *, is_changed: bool) -> None:
        """Write the snapshot after a change, and confirm it now and then."""
        if self._snapshot is None or state.keys is None or state.tenants is None:
            return
        file = self._snapshot
        if not is_changed and (not file.is_due or await asyncio.to_thread(file.confirm)):
            return
        snapshot = Snapshot(
            self._snapshot.store,
            state.version.decode(errors="replace"),
            state.keys,
            state.tenants,
            self._stored.keys,
            dict(self._stored.tenants),
            self._loss,
            self._kept.keys,
            dict(self._kept.tenants),
            self._first_key_has_ended,
        )
        await asyncio.to_thread(self._snapshot.write, snapshot)

    async def _share_first_key(self, stored: str) -> None:
        """Store the digest of this gateway's first key again if the store has lost it; follow another one.

        stored: the digest in the store, empty if there is none. Raises: StoreUnavailable.
        """
        own = self._keyring.shared_first_key
        if own is None or own == stored or (self._first_key_has_ended and not stored):
            return
        agreed = stored or await self.store.agree_on_first_key(own)
        if agreed == own:
            return
        if own:
            logger.warning(
                "the first key of this gateway is refused from now on: Redis has that of another gateway; to "
                "choose this one, stop every gateway, remove %s from Redis, and start this gateway first",
                FIRST_KEY,
            )
        self._keyring.adopt_first_key(agreed)
        self._on_change()
