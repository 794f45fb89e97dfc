"""Follower of the stored keys and tenants: it reads their changes into a gateway's keyring."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from gateway.store.errors import StoreUnavailable
from gateway.tenants.file_store import FileTenantStore
from gateway.tenants.keyring import Keyring
from gateway.tenants.store import FIRST_KEY, TenantStore

# A revoked key is refused everywhere within a second: two polls.
LOOK_EVERY_S = 0.4
# Longest wait of an operator's request for the change that it made.
REFRESH_TIMEOUT_S = 2.0

logger = logging.getLogger("gateway")


class KeyFollower:
    """The only reader of the store for one keyring.

    grace_s: how long the stored keys stay valid while the store is down. on_change: called after the keyring
    has changed. clock: the wall clock, which the keyring uses too.
    """

    def __init__(
        self,
        keyring: Keyring,
        store: TenantStore | FileTenantStore,
        grace_s: float,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self._keyring = keyring
        self._grace_s = grace_s
        self._on_change = on_change
        self._clock = clock
        self._seen: bytes | None = None
        self._seen_s = time.monotonic()
        self._wake = asyncio.Event()
        # Requests that wait until a read that begins after their change has ended.
        self._waiters: list[asyncio.Future[None]] = []

    async def run(self) -> None:
        """Follow the store's changes until cancelled; close the store then."""
        try:
            while True:
                self._wake.clear()
                waiters, self._waiters = self._waiters, []
                await self._read()
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(None)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), LOOK_EVERY_S)
        finally:
            await self.store.aclose()

    async def refresh(self) -> None:
        """Wait until the keyring has every change made so far, or the store does not reply in time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(waiter, REFRESH_TIMEOUT_S)

    async def _read(self) -> None:
        keyring = self._keyring
        try:
            sent_s = self._clock()
            state = await self.store.look()
            keyring.clock_offset_s = state.clock_s - (sent_s + self._clock()) / 2
            if keyring.first_key_pending:
                keyring.resolve_first_key(is_active=not await self.store.has_tenants())
            if state.version != self._seen:
                keyring.replace_stored(await self.store.keys(), await self.store.tenants())
                self._seen = state.version
                self._on_change()
            self._seen_s = time.monotonic()
        except StoreUnavailable:
            if self._seen is not None and time.monotonic() - self._seen_s > self._grace_s:
                keyring.forget_stored()
                self._seen = None
            return
        # A store that refuses to be written to can still be read.
        with suppress(StoreUnavailable):
            await self._share_first_key(state.first_key)

    async def _share_first_key(self, stored: str) -> None:
        """Store the digest of this gateway's first key again if the store has lost it; follow another one.

        stored: the digest in the store, empty if there is none. Raises: StoreUnavailable.
        """
        own = self._keyring.shared_first_key
        if own is None or own == stored or (self._keyring.first_key_is_ending and not stored):
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
