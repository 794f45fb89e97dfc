"""Keys of one issuer, which are read in the background and again when they change."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from gateway.config.schema import IssuerSettings
from gateway.errors import SignOnUnavailable, TokenRefused
from gateway.tenants.sign_on.issuer_client import (
    Description,
    IssuerFault,
    fetch_description,
    fetch_keys,
)
from gateway.tenants.sign_on.jose import NO_KEYS, Key, KeySet, read_keys
from gateway.tenants.sign_on.token_form import UnverifiedToken

logger = logging.getLogger("gateway")

# Between two readings, whatever tokens ask for: a flood of unknown keys costs the issuer one reading.
REREAD_INTERVAL_S = 10.0
# The interval, and the time of a reading.
READING_WAIT_S = 20.0


class KeySource:
    """Keys and endpoints of an issuer. name: in router.yaml. version: grows with each change of the keys."""

    def __init__(
        self, name: str, settings: IssuerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.settings = settings
        self.description: Description | None = None
        self.version = 0
        self._clock = clock
        self._keys: KeySet = NO_KEYS
        self._digest = b""
        # When the last successful reading began.
        self._read_at_s: float | None = None
        self._fault = ""
        self._wanted = asyncio.Event()
        self._was_read = asyncio.Event()

    @property
    def issuer(self) -> str:
        """Address of the issuer, in the form of its description once that was read."""
        return self.settings.issuer if self.description is None else self.description.issuer

    def serves(self, settings: IssuerSettings) -> bool:
        """Return whether these settings need the same keys."""
        mine = self.settings
        return all(
            getattr(mine, field) == getattr(settings, field)
            for field in ("issuer", "algorithms", "ca", "refresh_s", "keys_grace_s")
        )

    def key_for(self, token: UnverifiedToken) -> Key:
        """Return the key that a token names. An unknown one has the keys read again.

        Raises: TokenRefused; SignOnUnavailable until it is known whether there is such a key.
        """
        if (key := self._keys.find(token.key_id, token.algorithm)) is not None:
            return key
        if self._keys.has(token.key_id):
            raise TokenRefused("algorithm", "the token's key is not for its algorithm")
        age_s = float("inf") if self._read_at_s is None else self._clock() - self._read_at_s
        if self._keys and age_s < REREAD_INTERVAL_S:
            raise TokenRefused("key", "the token names no key of its issuer (kid)")
        self._was_read.clear()
        self._wanted.set()
        raise SignOnUnavailable("the keys of the token's issuer are being read; send the request again")

    async def follow(self) -> None:
        """Read the keys now, at each interval, and when a token names an unknown one."""
        while True:
            self._wanted.clear()
            delay_s = self.settings.refresh_s if await self.read() else REREAD_INTERVAL_S
            await asyncio.sleep(min(delay_s, REREAD_INTERVAL_S))
            try:
                async with asyncio.timeout(max(0.0, delay_s - REREAD_INTERVAL_S)):
                    await self._wanted.wait()
            except TimeoutError:
                continue

    async def wait_for_reading(self) -> None:
        """Wait for the reading that an unknown key has asked for, or until it is too late."""
        with suppress(TimeoutError):
            async with asyncio.timeout(READING_WAIT_S):
                await self._was_read.wait()

    async def read(self) -> bool:
        """Read description and keys once; return whether it succeeded."""
        try:
            return await self._read()
        finally:
            self._was_read.set()

    async def _read(self) -> bool:
        began_s = self._clock()
        try:
            description = await fetch_description(self.settings)
            document = await fetch_keys(description.jwks_uri, self.settings)
            digest = hashlib.sha256(description.issuer.encode() + document).digest()
            if digest != self._digest:
                self._replace(read_keys(document, self.settings.algorithms), digest)
        except (IssuerFault, ValueError) as error:
            self._on_fault(str(error))
            return False
        self.description, self._read_at_s = description, began_s
        if self._fault:
            logger.info("sign_on.%s: the issuer can be read again", self.name)
            self._fault = ""
        return True

    def _replace(self, keys: KeySet, digest: bytes) -> None:
        self._keys, self._digest = keys, digest
        self.version += 1
        logger.info("sign_on.%s: the issuer has %d keys", self.name, len(keys))

    def _on_fault(self, reason: str) -> None:
        """Log a fault that is new, and drop keys that were read too long ago."""
        if reason != self._fault:
            self._fault = reason
            logger.warning("sign_on.%s: the issuer cannot be read: %s", self.name, reason)
        is_old = self._read_at_s is not None and (
            self._clock() - self._read_at_s > self.settings.keys_grace_s
        )
        if is_old and self._keys:
            logger.error("sign_on.%s: its keys are too old, and its tokens are refused", self.name)
            self._keys, self._digest = NO_KEYS, b""
            self.version += 1
