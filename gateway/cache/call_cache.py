"""The cache as one call uses it: looked up before dispatch, filled from the reply.

Rule: nothing is read or stored without an identity of the outputs, and nothing is stored if the identity has
changed while the call was computed.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from backends.contract import Operation, Reply, Work
from gateway.cache.entries import SHARED, Entry, SplitCall, decode_entry, encode_entry, entry_keys
from gateway.events import CacheLookedUp, Observe
from gateway.vector_spaces.identity import VectorsIdentity

NO_IDENTITY = "off: no fingerprint of its own, or replicas with other vectors"
NO_SCORES_IDENTITY = "off: scores need the built-in engine, and a hub id with a commit as its `revision`"
SINGLE_TEXTS = "on, only for single texts: the upstream has no `tokenizer`"

logger = logging.getLogger("gateway")


class CacheUse(msgspec.Struct, frozen=True):
    """Texts or pairs of one call that were found and not found, and the tokens of those that were."""

    hits: int
    misses: int
    tokens: int = 0


class Store(Protocol):
    """Store of encoded entries. size_bytes: of all. evictions: those removed or refused for want of room."""

    size_bytes: int
    evictions: int

    async def get(self, keys: Sequence[bytes], owner: str) -> list[bytes | None]:
        """Return the entry of each key, None where there is none. owner: of the entries."""

    def put(self, entries: Sequence[tuple[bytes, bytes]], owner: str) -> None:
        """Store entries of an owner within its share, now or soon. It never waits and never raises."""

    def epoch_of(self, upstream: str) -> int | None:
        """Return the epoch of an upstream's entries, None while it is unknown."""

    def distrust(self, upstream: str) -> None:
        """Begin a new epoch: no entry of an upstream is found again."""

    async def maintain(self) -> None:
        """Run background work until cancelled."""

    async def aclose(self) -> None:
        """Close all connections."""


class ItemCache:
    """Cache of a gateway. shared: a tenant may find entries of others. is_charged: hits count as computed."""

    def __init__(self, store: Store, observe: Observe, *, shared: bool, is_charged: bool) -> None:
        self.store = store
        self.observe = observe
        self.is_charged = is_charged
        self._shared = shared
        self._unidentified: set[str] = set()

    def owner(self, tenant: str) -> str:
        """Return the owner of a tenant's entries."""
        # The prefix keeps a tenant named "shared" apart.
        return SHARED if self._shared else f"tenant {tenant}"

    def report(self, model: str, work: Work, *, is_identified: bool) -> None:
        """Log that a model's outputs cannot be cached, once until they can."""
        if is_identified:
            self._unidentified.discard(model)
        elif model not in self._unidentified:
            self._unidentified.add(model)
            if work.operation is Operation.RERANK:
                logger.warning("model %s: its scores are not cached (%s)", model, NO_SCORES_IDENTITY)
            else:
                logger.warning("model %s: its vectors are not cached (%s)", model, NO_IDENTITY)


class CallOrigin(msgspec.Struct, frozen=True):
    """Tenant, model and upstream of a call."""

    tenant: str
    model: str
    upstream: str


class CallCache:
    """Cache of one call.

    identity: returns the one of the upstream's outputs for a work now, None if it is unknown. is_refreshed:
    entries are written, and not read. use: outcome of the lookup, None if nothing was looked up.
    """

    def __init__(
        self,
        cache: ItemCache,
        origin: CallOrigin,
        identity: Callable[[Work], VectorsIdentity | None],
        *,
        is_refreshed: bool = False,
    ) -> None:
        self.use: CacheUse | None = None
        self.is_charged = cache.is_charged
        self._cache = cache
        self._origin = origin
        self._identity = identity
        self._is_refreshed = is_refreshed
        self._found: VectorsIdentity | None = None
        self._epoch: int | None = None
        self._keys: list[bytes] = []
        self._work: Work | None = None
        self._owner = cache.owner(origin.tenant)

    async def look_up(self, work: Work) -> SplitCall | None:
        """Return the work split into found and missing inputs, None if it cannot be cached."""
        identity, store = self._identity(work), self._cache.store
        self._epoch = store.epoch_of(self._origin.upstream)
        self._cache.report(self._origin.model, work, is_identified=identity is not None)
        if identity is None or self._epoch is None:
            return None
        if not work.is_cacheable(identity.dimensions, is_cut_plainly=not identity.norm_before_cut):
            return None
        self._found, self._work = identity, work
        self._keys = entry_keys(work, self._owner, identity.digest, self._epoch)
        entries: list[Entry | None] = [None] * len(self._keys)
        if not self._is_refreshed:
            stored = await store.get(self._keys, self._owner)
            entries = [
                None if found is None else decode_entry(found, identity.dimensions) for found in stored
            ]
        # An epoch may have begun during the lookup.
        if not self._is_current():
            return None
        split = SplitCall(work, entries, identity.dimensions)
        self.use = CacheUse(split.hits, len(split.missing), split.hit_tokens)
        self._cache.observe(CacheLookedUp(self._origin.model, split.hits, len(split.missing)))
        return split

    def keep(self, split: SplitCall, reply: Reply, tokens: Sequence[int] | None) -> None:
        """Store the outputs of the missing inputs. reply: to them. tokens: of each, None if unknown."""
        if self._is_current():
            entries = split.new_entries(reply, tokens)
            encoded = [(self._keys[index], encode_entry(entry)) for index, entry in entries]
            self._cache.store.put(encoded, self._owner)

    def _is_current(self) -> bool:
        assert self._work is not None
        is_same_epoch = self._cache.store.epoch_of(self._origin.upstream) == self._epoch
        return is_same_epoch and self._identity(self._work) == self._found
