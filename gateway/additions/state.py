"""Additions as the parent process of one gateway knows them: the stored ones, and those that are served."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gateway.additions.composing import ComposedConfig, Rejected, compose, listing_of
from gateway.additions.entries import Additions, Edit, Listing, apply_edit
from gateway.additions.store import AdditionStore, StoredAdditions
from gateway.config.schema import Config
from gateway.store.errors import StoreUnavailable

# Every gateway follows within about a second.
LOOK_EVERY_S = 1.0

logger = logging.getLogger("gateway")


class AdditionsState:
    """State of the additions in one gateway. environment: for references to variables."""

    def __init__(self, store: AdditionStore, environment: Mapping[str, str]) -> None:
        self._store = store
        self._environment = environment
        self._current = StoredAdditions()
        self._rejected: Rejected = {}
        # Upstreams whose models could not be loaded: their settings as written, and why.
        self._unusable: dict[str, tuple[Any, str]] = {}

    @property
    def current(self) -> StoredAdditions:
        """The additions that this gateway has adopted."""
        return self._current

    @property
    def listing(self) -> Listing:
        """The adopted additions as operators see them."""
        return listing_of(self._current.additions, self._rejected)

    async def load(self) -> StoredAdditions:
        """Return the stored additions. Raises: StoreUnavailable."""
        return await self._store.load()

    async def preview(self, file: Config, edit: Edit) -> StoredAdditions:
        """Return the additions after an edit, with the version before it.

        Raises: StoreUnavailable, ConfigError, UnknownAddition.
        """
        before = await self._store.load()
        return StoredAdditions(before.version, apply_edit(file, before.additions, edit))

    async def compose(
        self, file: Config, additions: Additions, *, with_engines: bool = True
    ) -> ComposedConfig:
        """Compose the file with the additions, in a thread.

        A file system may be slow, and the parent process has to look after its children.
        """
        unusable = {
            name: reason
            for name, (written, reason) in self._unusable.items()
            if additions.upstreams.get(name) == written
        }
        return await asyncio.to_thread(
            compose, file, additions, self._environment, unusable, with_engines=with_engines
        )

    async def store(self, wanted: StoredAdditions) -> StoredAdditions | None:
        """Replace the stored additions, or return None if their version has changed meanwhile.

        Raises: StoreUnavailable.
        """
        return await self._store.replace(wanted.version, wanted.additions)

    def mark_unusable(self, additions: Additions, reasons: Mapping[str, str]) -> None:
        """Reject these upstreams until their settings change, or the file is read again."""
        for name, reason in reasons.items():
            self._unusable[name] = additions.upstreams[name], reason

    def forget_unusable(self, name: str | None = None) -> None:
        """Allow a new attempt with one upstream, or with all of them."""
        for upstream in [name] if name is not None else list(self._unusable):
            self._unusable.pop(upstream, None)

    def adopt(self, additions: StoredAdditions, composed: ComposedConfig) -> None:
        """Make these the current additions, and log the newly rejected ones."""
        for key, problems in composed.rejected.items():
            if problems != self._rejected.get(key):
                for problem in problems:
                    logger.warning("%s: addition is not served: %s", problem.path, problem.message)
        self._current, self._rejected = additions, composed.rejected

    async def follow(self, on_change: Callable[[], Awaitable[None]]) -> None:
        """Report changes by other gateways, repeatedly until they are adopted; runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                version = await self._store.version()
            except StoreUnavailable:
                continue
            if version != self._current.version:
                await on_change()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._store.aclose()
