"""Vector space of one upstream, with which its replicas are compared.

Rule: a replica with other vectors is distinguished from one that does not reply, and no request to Redis
takes longer than its client's timeout. While Redis is down this gateway uses its own fingerprint, and
offers it to Redis afterwards.
"""

import asyncio
import logging
from contextlib import suppress

import numpy as np

from backends.contract import Backend, Capabilities, Operation, Vectors
from backends.contract.errors import InvalidWork, ReplicaFailed, UnsupportedWork
from backends.reference_texts import REFERENCE_TEXTS, embed_reference_texts, max_inputs_per_request
from gateway.config.schema import UpstreamSettings
from gateway.events import Observe, SpaceChecked, SpaceOutcome
from gateway.store.errors import StoreUnavailable
from gateway.vector_spaces.fingerprint import (
    Fingerprint,
    cosine_text,
    fingerprint_of,
    matches,
    needed_cosine,
    similarity,
)
from gateway.vector_spaces.store import FingerprintStore
from gateway.vector_spaces.zero_vectors import gives_zeros

# How soon this gateway learns that a new fingerprint was accepted.
FOLLOW_EVERY_S = 2.0

logger = logging.getLogger("gateway")


class VectorSpace:
    """Vector space of one upstream. Replicas are identified by name.

    store: None if this gateway does not share its fingerprints. reference: fingerprint with which replicas
    are compared, None until a replica has embedded the reference texts.
    """

    def __init__(
        self, upstream: str, settings: UpstreamSettings, store: FingerprintStore | None, observe: Observe
    ) -> None:
        self.upstream = upstream
        self._kind = settings.backend
        self._settings = settings.vector_space
        self._request_inputs = settings.request_inputs
        # The timeout of any attempt: a large model on few cores takes long even for a few texts.
        self._timeout_s = settings.attempt_timeout_s
        self._store = store
        self._observe = observe
        self.reference: Fingerprint | None = None
        # Per replica: its fingerprint and the outcome of the last check.
        self._fingerprints: dict[str, Fingerprint] = {}
        self._outcomes: dict[str, SpaceOutcome] = {}
        # Per replica: the reference texts that failed while others did not.
        self._notes: dict[str, str] = {}
        self._store_is_down = False

    @property
    def refuses(self) -> bool:
        """True if a replica with other vectors is excluded."""
        return self._settings.on_mismatch == "refuse"

    @property
    def id(self) -> str | None:
        """Id shown to callers; None until a replica has embedded the reference texts."""
        return None if self.reference is None else self.reference.id

    def is_foreign(self, replica: str) -> bool:
        """Return True if the last check found other vectors than those of this space."""
        return self._outcomes.get(replica) == "differs"

    def dimensions_of(self, replica: str) -> int | None:
        """Return the length of a replica's vectors in the last check; None if it embeds no reference text."""
        fingerprint = self._fingerprints.get(replica)
        return None if fingerprint is None else fingerprint.dimensions

    def note_of(self, replica: str) -> str | None:
        """Return what operators have to know of a replica's last check, None if there is nothing."""
        return self._notes.get(replica)

    def mismatch_reason(self, replica: str) -> str:
        """Describe for operators why a replica is foreign."""
        reference, fingerprint = self.reference, self._fingerprints[replica]
        assert reference is not None
        if fingerprint.dimensions != reference.dimensions:
            return (
                f"its vectors have {fingerprint.dimensions} dimensions, the upstream's {reference.dimensions}"
            )
        needed = needed_cosine(reference, fingerprint, self._settings.min_cosine)
        cosine = cosine_text(similarity(reference, fingerprint), needed)
        return (
            f"its vectors are not the upstream's: cosine {cosine}, {needed} needed; "
            f"`gateway verify {self.upstream}` shows more"
        )

    async def check(self, replica: str, backend: Backend, capabilities: Capabilities) -> bool:
        """Return True if a replica's vectors are of this space; the first replica defines it.

        A replica that does not embed, or rejects the reference texts, is not judged. Raises: BackendError.
        """
        if Operation.EMBED not in capabilities.operations:
            return True
        try:
            fingerprint = await self._embed_reference_texts(replica, backend, capabilities)
            reference = await self._claim(fingerprint)
            if not matches(reference, fingerprint, self._settings.min_cosine):
                # One mismatch may be a glitch; the second is a different model.
                fingerprint = await self._embed_reference_texts(replica, backend, capabilities)
        except (InvalidWork, UnsupportedWork) as error:
            self._fingerprints.pop(replica, None)
            self._report(replica, "unchecked", None, error.message)
            return True
        self._fingerprints[replica] = fingerprint
        self._judge(replica)
        return not self.is_foreign(replica)

    async def follow_store(self) -> None:
        """Follow the shared fingerprint until cancelled."""
        while self._store is not None:
            await asyncio.sleep(FOLLOW_EVERY_S)
            with suppress(StoreUnavailable):
                await self.follow(self._store)

    async def follow(self, store: FingerprintStore) -> None:
        """Adopt the stored fingerprint, or store this gateway's own if there is none.

        Raises: StoreUnavailable.
        """
        reference = await store.load(self.upstream)
        if reference is None and self.reference is not None:
            reference = await store.claim(self.upstream, self.reference)
        self._store_is_down = False
        if reference is not None:
            self._adopt(reference)

    async def _embed_reference_texts(
        self, replica: str, backend: Backend, capabilities: Capabilities
    ) -> Fingerprint:
        inputs_max = max_inputs_per_request(capabilities, self._request_inputs)
        reply, failure = await embed_reference_texts(backend, inputs_max, self._timeout_s)
        await _check_not_zero(backend, reply.vectors)
        self._notes.pop(replica, None)
        if failure is not None:
            failed = int(np.isnan(reply.vectors).any(axis=1).sum())
            self._notes[replica] = (
                f"{failed} of {len(REFERENCE_TEXTS)} reference texts fail there: {failure.explanation}"
            )
        return fingerprint_of(reply.vectors, self._kind, capabilities)

    async def _claim(self, fingerprint: Fingerprint) -> Fingerprint:
        """Return the reference; this gateway's own if the store does not reply."""
        reference = self.reference or fingerprint
        if self._store is not None:
            try:
                reference = await self._store.claim(self.upstream, reference)
                self._store_is_down = False
            except StoreUnavailable as error:
                self._on_store_error(error)
        self._adopt(reference)
        return reference

    def _adopt(self, reference: Fingerprint) -> None:
        """Replace the reference, and judge all replicas by the new one."""
        if reference == self.reference:
            return
        self.reference = reference
        for replica in self._fingerprints:
            self._judge(replica)

    def _on_store_error(self, error: StoreUnavailable) -> None:
        if not self._store_is_down:
            logger.warning(
                "upstream %s: fingerprints cannot be shared (%s): this gateway's own counts until they can",
                self.upstream,
                error,
            )
        self._store_is_down = True

    def _judge(self, replica: str) -> None:
        reference, fingerprint = self.reference, self._fingerprints[replica]
        assert reference is not None
        fits = matches(reference, fingerprint, self._settings.min_cosine)
        reason = reference.id if fits else self.mismatch_reason(replica)
        self._report(replica, "fits" if fits else "differs", similarity(reference, fingerprint), reason)

    def _report(self, replica: str, outcome: SpaceOutcome, cosine: float | None, reason: str) -> None:
        changed = self._outcomes.get(replica) != outcome
        self._outcomes[replica] = outcome
        self._observe(SpaceChecked(self.upstream, replica, outcome, cosine, reason, changed))


async def _check_not_zero(backend: Backend, vectors: Vectors) -> None:
    """Check that a replica gives no vector of zeros, unless its model is static. Raises: ReplicaFailed."""
    zeros = ~vectors.any(axis=1)
    if not zeros.any():
        return
    if zeros.all():
        raise ReplicaFailed("it gives vectors of zeros for all reference texts")
    if not await gives_zeros(backend):
        raise ReplicaFailed(
            f"it gives a vector of zeros for {REFERENCE_TEXTS[int(np.flatnonzero(zeros)[0])]!r}"
        )
