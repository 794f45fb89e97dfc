"""Fingerprints that gateways share, in Redis: one per upstream, written by the first gateway that has one."""

from backends.reference_texts import EDITION
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.vector_spaces.fingerprint import Fingerprint, decode_fingerprint, encode_fingerprint

# Releases with other reference texts use a different key: their fingerprints cannot be compared.
SPACES = f"gw:spaces:{EDITION}"


class FingerprintStore:
    """Shared fingerprints. All operations raise StoreUnavailable if Redis does not reply or is unreadable."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def claim(self, upstream: str, own: Fingerprint) -> Fingerprint:
        """Store this gateway's own fingerprint unless there is one, and return the stored one.

        Of several concurrent claims the first wins.
        """
        await self._client.execute("HSETNX", SPACES, upstream, encode_fingerprint(own))
        return await self.load(upstream) or own

    async def load(self, upstream: str) -> Fingerprint | None:
        """Return the stored fingerprint of an upstream."""
        stored = await self._client.execute("HGET", SPACES, upstream)
        if stored is None:
            return None
        try:
            return decode_fingerprint(stored)
        except ValueError as error:
            raise StoreUnavailable(f"the fingerprint of {upstream!r} there cannot be read") from error

    async def replace(self, upstream: str, accepted: Fingerprint) -> None:
        """Replace the stored fingerprint; every gateway follows within seconds."""
        await self._client.execute("HSET", SPACES, upstream, encode_fingerprint(accepted))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
