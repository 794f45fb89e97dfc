"""The fingerprints that gateways share, in Redis: one for each upstream, made by whoever comes first."""

from backends.canaries import EDITION
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.vector_spaces.fingerprint import Fingerprint, decoded, encoded

# Those of other canaries stand elsewhere: releases that know different ones do not meet.
SPACES = f"gw:spaces:{EDITION}"


class FingerprintStore:
    """All operations raise StoreUnavailable where Redis does not answer, or holds what nobody can read."""

    def __init__(self, door: RedisClient) -> None:
        self._door = door

    async def claim(self, upstream: str, mine: Fingerprint) -> Fingerprint:
        """The fingerprint that stands; mine, where none stood. Of several at once the first wins."""
        await self._door.execute("HSETNX", SPACES, upstream, encoded(mine))
        return await self.load(upstream) or mine

    async def load(self, upstream: str) -> Fingerprint | None:
        """What stands of an upstream."""
        stored = await self._door.execute("HGET", SPACES, upstream)
        if stored is None:
            return None
        try:
            return decoded(stored)
        except ValueError as error:
            raise StoreUnavailable(f"the fingerprint of {upstream!r} there cannot be read") from error

    async def replace(self, upstream: str, accepted: Fingerprint) -> None:
        """From now on this one stands; every gateway follows within seconds."""
        await self._door.execute("HSET", SPACES, upstream, encoded(accepted))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._door.aclose()
