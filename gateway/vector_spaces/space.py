"""The vector space of one upstream: what its replicas are held against.

Rule: a replica that gives other vectors is told from one that cannot be asked, and no answer of Redis is
waited for longer than its door waits. While Redis is away this gateway's own fingerprint stands in, and is
offered to Redis when that is back.
"""

import asyncio
import logging
from contextlib import suppress

from backends.canaries import CANARIES, embed_in_batches, max_inputs_per_request
from backends.contract import Backend, Capabilities, Operation
from backends.errors import InvalidWork, UnsupportedWork
from gateway.config.schema import UpstreamSettings
from gateway.events import Observe, SpaceChecked, SpaceOutcome
from gateway.store.errors import StoreUnavailable
from gateway.vector_spaces.fingerprint import Fingerprint, fingerprint_of, likeness, needed_cosine
from gateway.vector_spaces.store import FingerprintStore

# How soon this gateway learns that another fingerprint was accepted.
FOLLOW_EVERY_S = 2.0

logger = logging.getLogger("gateway")


class VectorSpace:
    """store: None where this gateway keeps to itself. Replicas are known by their names."""

    def __init__(
        self, upstream: str, settings: UpstreamSettings, store: FingerprintStore | None, observe: Observe
    ) -> None:
        self.upstream = upstream
        self._kind = settings.backend
        self._settings = settings.vector_space
        self._batch_inputs = settings.batch_inputs
        # As any attempt: a large model on few cores takes its time for a few texts too.
        self._timeout_s = settings.attempt_timeout_s
        self._store = store
        self._observe = observe
        self._standing: Fingerprint | None = None
        # What each replica gave when it was last asked, and what was said of it.
        self._given: dict[str, Fingerprint] = {}
        self._outcomes: dict[str, SpaceOutcome] = {}
        self._store_is_away = False

    @property
    def refuses(self) -> bool:
        """Whether a replica that gives other vectors is kept out."""
        return self._settings.on_mismatch == "refuse"

    @property
    def id(self) -> str | None:
        """What callers are told; None while nobody has embedded anything."""
        return None if self._standing is None else self._standing.id

    def is_foreign(self, replica: str) -> bool:
        """Whether a replica's vectors were not those of this space when it was last asked."""
        return self._outcomes.get(replica) == "differs"

    def dimensions_of(self, replica: str) -> int | None:
        """How wide a replica's vectors were when it was last asked; None where it takes no canary."""
        given = self._given.get(replica)
        return None if given is None else given.dimensions

    def mismatch_reason(self, replica: str) -> str:
        """What is wrong with a replica that is_foreign, for its operator."""
        standing, given = self._standing, self._given[replica]
        assert standing is not None
        if given.dimensions != standing.dimensions:
            return f"its vectors have {given.dimensions} dimensions, the upstream's {standing.dimensions}"
        return (
            f"its vectors are not the upstream's: cosine {likeness(standing, given):.4f}, "
            f"{self._needed(standing, given)} needed; `gateway verify {self.upstream}` shows more"
        )

    async def check(self, replica: str, backend: Backend, told: Capabilities) -> bool:
        """Whether a replica's vectors are of this space; the first makes it.

        A replica that does not embed, or takes no canary, is not judged. Raises: BackendError.
        """
        if Operation.EMBED not in told.operations:
            return True
        try:
            given = await self._embedded(backend, told)
            standing = await self._claimed(given)
            if not self._fits(standing, given):
                # One miss may be a glitch; the second is another model.
                given = await self._embedded(backend, told)
        except (InvalidWork, UnsupportedWork) as error:
            self._given.pop(replica, None)
            self._say(replica, "unchecked", None, error.message)
            return True
        self._given[replica] = given
        self._judge(replica)
        return not self.is_foreign(replica)

    async def follow_store(self) -> None:
        """Follow the store; runs until cancelled."""
        while self._store is not None:
            await asyncio.sleep(FOLLOW_EVERY_S)
            with suppress(StoreUnavailable):
                await self.follow(self._store)

    async def follow(self, store: FingerprintStore) -> None:
        """Learn what stands, or offer what this gateway has where nothing does. Raises: StoreUnavailable."""
        standing = await store.load(self.upstream)
        if standing is None and self._standing is not None:
            standing = await store.claim(self.upstream, self._standing)
        self._store_is_away = False
        if standing is not None:
            self._adopt(standing)

    async def _embedded(self, backend: Backend, told: Capabilities) -> Fingerprint:
        most = max_inputs_per_request(told, self._batch_inputs)
        reply = await embed_in_batches(backend, CANARIES, most, self._timeout_s)
        return fingerprint_of(reply.vectors, self._kind, told)

    async def _claimed(self, given: Fingerprint) -> Fingerprint:
        """What stands now; as far as this gateway knows, where the store does not answer."""
        mine = self._standing or given
        if self._store is not None:
            try:
                mine = await self._store.claim(self.upstream, mine)
                self._store_is_away = False
            except StoreUnavailable as error:
                self._miss_store(error)
        self._adopt(mine)
        return mine

    def _adopt(self, standing: Fingerprint) -> None:
        """From now on this one counts, also for those that were held against another."""
        if standing == self._standing:
            return
        self._standing = standing
        for replica in self._given:
            self._judge(replica)

    def _miss_store(self, error: StoreUnavailable) -> None:
        if not self._store_is_away:
            logger.warning(
                "upstream %s: fingerprints cannot be shared (%s): this gateway's own counts until they can",
                self.upstream,
                error,
            )
        self._store_is_away = True

    def _needed(self, standing: Fingerprint, given: Fingerprint) -> float:
        return needed_cosine(standing, given, self._settings.min_cosine)

    def _fits(self, standing: Fingerprint, given: Fingerprint) -> bool:
        return likeness(standing, given) >= self._needed(standing, given)

    def _judge(self, replica: str) -> None:
        standing, given = self._standing, self._given[replica]
        assert standing is not None
        fits = self._fits(standing, given)
        reason = standing.id if fits else self.mismatch_reason(replica)
        self._say(replica, "fits" if fits else "differs", likeness(standing, given), reason)

    def _say(self, replica: str, outcome: SpaceOutcome, cosine: float | None, reason: str) -> None:
        changed = self._outcomes.get(replica) != outcome
        self._outcomes[replica] = outcome
        self._observe(SpaceChecked(self.upstream, replica, outcome, cosine, reason, changed))
