"""Vector spaces that gateways share, in Redis: one per upstream, and one per model with several upstreams.

The first gateway that has one writes it. Releases with other reference texts use different keys: their
fingerprints cannot be compared.
"""

from typing import Generic, TypeVar

import msgspec

from backends.reference_texts import EDITION
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.vector_spaces.fingerprint import Fingerprint, decode_fingerprint

# Releases with other reference texts use a different key: their fingerprints cannot be compared.
SPACES = f"gw:spaces:{EDITION}"
MODEL_SPACES = f"gw:model_spaces:{EDITION}"


class StoredSpace(msgspec.Struct, frozen=True):
    """Space of a model in Redis. upstreams: those of the model when it was stored."""

    fingerprint: Fingerprint
    upstreams: tuple[str, ...]


Space = TypeVar("Space", Fingerprint, StoredSpace)


class _Store(Generic[Space]):
    """Shared spaces by name. All operations raise StoreUnavailable if Redis does not reply as expected."""

    KEY: str
    NOUN: str

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def claim(self, name: str, own: Space) -> Space:
        """Store this gateway's own space unless there is one, and return the stored one.

        Of several concurrent claims the first wins.
        """
        await self._client.execute("HSETNX", self.KEY, name, msgspec.msgpack.encode(own))
        return await self.load(name) or own

    async def load(self, name: str) -> Space | None:
        """Return the stored space."""
        stored = await self._client.execute("HGET", self.KEY, name)
        if stored is None:
            return None
        try:
            return self._decode(stored)
        except ValueError as error:
            raise StoreUnavailable(f"the {self.NOUN} {name!r} there cannot be read") from error

    async def replace(self, name: str, space: Space) -> None:
        """Replace the stored space; every gateway follows within seconds."""
        await self._client.execute("HSET", self.KEY, name, msgspec.msgpack.encode(space))

    def _decode(self, stored: bytes) -> Space:
        """Decode a space. Raises: ValueError if this release cannot read it."""
        raise NotImplementedError


class FingerprintStore(_Store[Fingerprint]):
    """Shared fingerprints of upstreams."""

    KEY, NOUN = SPACES, "fingerprint of"

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _decode(self, stored: bytes) -> Fingerprint:
        return decode_fingerprint(stored)


class ModelSpaceStore(_Store[StoredSpace]):
    """Shared spaces of models, over a client that others close."""

    KEY, NOUN = MODEL_SPACES, "vector space of the model"

    def _decode(self, stored: bytes) -> StoredSpace:
        return msgspec.msgpack.decode(stored, type=StoredSpace)
