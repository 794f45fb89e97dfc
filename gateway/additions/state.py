"""What was added, as the parent of one gateway knows it: what stands, and what of it is served."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gateway.additions.composing import ComposedConfig, compose, listing_of
from gateway.additions.entries import Additions, Edit, Listing, Part, apply_edit
from gateway.additions.store import AdditionStore, StoredAdditions
from gateway.config.problems import Problem
from gateway.config.schema import Config
from gateway.store.errors import StoreUnavailable

# Every gateway follows within about a second.
LOOK_EVERY_S = 1.0

logger = logging.getLogger("gateway")


class AdditionsState:
    """environment: what references to variables are filled from."""

    def __init__(self, store: AdditionStore, environment: Mapping[str, str]) -> None:
        self._store = store
        self._environment = environment
        self._standing = StoredAdditions()
        self._left_out: Mapping[tuple[Part, str], tuple[Problem, ...]] = {}
        # Upstreams whose models could not be loaded, as they were written, and why.
        self._unusable: dict[str, tuple[Any, str]] = {}

    @property
    def current(self) -> StoredAdditions:
        """What this gateway goes by."""
        return self._standing

    @property
    def listing(self) -> Listing:
        """As operators see it."""
        return listing_of(self._standing.additions, self._left_out)

    async def load(self) -> StoredAdditions:
        """What stands now. Raises: StoreUnavailable."""
        return await self._store.load()

    async def preview(self, file: Config, edit: Edit) -> StoredAdditions:
        """What would stand after an edit, with the version before it.

        Raises: StoreUnavailable, ConfigError, UnknownAddition.
        """
        before = await self._store.load()
        return StoredAdditions(before.version, apply_edit(file, before.additions, edit))

    async def compose(
        self, file: Config, additions: Additions, *, with_engines: bool = True
    ) -> ComposedConfig:
        """What can be served of both."""
        unusable = {
            name: why
            for name, (written, why) in self._unusable.items()
            if additions.upstreams.get(name) == written
        }
        # A file system may be slow, and the parent has children to look after.
        return await asyncio.to_thread(
            compose, file, additions, self._environment, unusable, with_engines=with_engines
        )

    async def store(self, wanted: StoredAdditions) -> StoredAdditions | None:
        """Replace what stands, if it is of that version still; None where it is not.

        Raises: StoreUnavailable.
        """
        return await self._store.replace(wanted.version, wanted.additions)

    def mark_unusable(self, additions: Additions, why: Mapping[str, str]) -> None:
        """These are left out until they are written anew, or the file is read again."""
        for name, one in why.items():
            self._unusable[name] = additions.upstreams[name], one

    def forget_unusable(self, name: str | None = None) -> None:
        """It is tried again; without a name, all are."""
        for one in [name] if name is not None else list(self._unusable):
            self._unusable.pop(one, None)

    def adopt(self, standing: StoredAdditions, served: ComposedConfig) -> None:
        """From now on this is what the gateway goes by; who is left out anew is named."""
        for key, problems in served.left_out.items():
            if problems != self._left_out.get(key):
                for problem in problems:
                    logger.warning("%s: left out of what was added: %s", problem.path, problem.message)
        self._standing, self._left_out = standing, served.left_out

    async def follow(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Tell of what other gateways have changed, again until it is taken; runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                version = await self._store.version()
            except StoreUnavailable:
                continue
            if version != self._standing.version:
                await changed()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._store.aclose()
