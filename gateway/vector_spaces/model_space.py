"""Vector space of a model that several upstreams serve, with which each of them is compared.

Rule: the first upstream whose vectors are known defines the space, and no upstream of another one ever serves
the model. Where gateways share fingerprints, they agree on the space before any of them serves a call from
it; while Redis does not reply, this gateway's own counts.
"""

import logging
from collections.abc import Collection, Mapping

from gateway.store.errors import StoreUnavailable
from gateway.vector_spaces.fingerprint import Fingerprint, cosine_text, matches, needed_cosine, similarity
from gateway.vector_spaces.store import ModelSpaceStore, StoredSpace

logger = logging.getLogger("gateway")


class ModelSpace:
    """Space of one model.

    upstreams: names of all that may serve it. store: None if this gateway does not share its spaces.
    reference: fingerprint of the space, None until one is known. wanted: the one to share, None if there is
    nothing to share.
    """

    def __init__(self, model: str, upstreams: Collection[str], store: ModelSpaceStore | None) -> None:
        self.model = model
        self.upstreams = tuple(upstreams)
        self.reference: Fingerprint | None = None
        self.wanted: Fingerprint | None = None
        self._store = store
        # Whether `wanted` replaces a stored space that none of the upstreams is of any more.
        self._is_replacement = False

    @property
    def id(self) -> str | None:
        """Id shown to callers; None until the space is known."""
        return None if self.reference is None else self.reference.id

    def propose(self, known: Mapping[str, Fingerprint], *, is_complete: bool) -> None:
        """Define the space by the first known upstream, if none defines it yet, or none is of it any more.

        known: fingerprints by upstream, in the order of preference. is_complete: of all upstreams. That none
        of them is of the space any more happens only where an operator has replaced or accepted them.
        """
        first = next(iter(known.values()), None)
        if first is None or self.wanted is not None:
            return
        reference = self.reference
        is_left = is_complete and reference is not None and not any(map(self.includes, known.values()))
        if reference is not None and not is_left:
            return
        if is_left:
            logger.warning("model %s: all its upstreams are of another vector space now", self.model)
            self.reference = None
        if self._store is None:
            self.reference = first
        else:
            self.wanted, self._is_replacement = first, is_left

    def inherit(self, reference: Fingerprint) -> None:
        """Take over the space in which the model was served before its upstreams changed."""
        self.reference = reference
        if self._store is not None:
            self.wanted = reference

    def includes(self, fingerprint: Fingerprint) -> bool:
        """Return whether vectors of a fingerprint are of this space."""
        return self.reference is not None and matches(self.reference, fingerprint, None)

    def mismatch_reason(self, fingerprint: Fingerprint) -> str:
        """Describe for operators why an upstream does not serve the model."""
        assert self.reference is not None
        return difference(self.reference, fingerprint)

    async def share(self) -> None:
        """Agree with the other gateways on the space; without a reply of Redis, this gateway's own counts."""
        if self._store is None:
            return
        wanted = self.wanted
        try:
            stored = await self._share(self._store, wanted)
        except StoreUnavailable as error:
            if self.reference is None and self.wanted is not None:
                logger.warning("model %s: its vector space cannot be shared (%s)", self.model, error)
                self.reference = self.wanted
            return
        # Another one may have been proposed meanwhile.
        if self.wanted is wanted:
            self.wanted = None
        if stored is not None and stored.fingerprint != self.reference:
            self.reference = stored.fingerprint

    async def _share(self, store: ModelSpaceStore, wanted: Fingerprint | None) -> StoredSpace | None:
        """Return the space that all gateways agree on, None if there is none. Raises: StoreUnavailable."""
        stored = await store.load(self.model) if wanted is None else None
        if wanted is None:
            return stored if stored is not None and self._is_ours(stored) else None
        own = StoredSpace(wanted, self.upstreams)
        stored = await store.claim(self.model, own)
        if self._is_ours(stored) and not self._is_replacement:
            own = StoredSpace(stored.fingerprint, self.upstreams)
        if own != stored:
            await store.replace(self.model, own)
        self._is_replacement = False
        return own

    def _is_ours(self, stored: StoredSpace) -> bool:
        """Return whether a stored space is of an upstream that the model still has."""
        return not set(self.upstreams).isdisjoint(stored.upstreams)


def difference(first: Fingerprint, second: Fingerprint) -> str:
    """Describe how two fingerprints differ that are not of one space."""
    if first.dimensions != second.dimensions:
        return f"its vectors have {second.dimensions} dimensions, those of the model {first.dimensions}"
    needed = needed_cosine(first, second, None)
    cosine = cosine_text(similarity(first, second), needed)
    return f"its vectors are not those of the model's other upstreams: cosine {cosine}, {needed} needed"
