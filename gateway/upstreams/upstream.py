"""One upstream in use: its replicas, the lane in front of them, and the inputs of its model."""

from collections.abc import Mapping
from typing import TypeAlias

from backends.checkpoints.model_names import is_path
from backends.contract import Capabilities, Operation, Residence, Work
from gateway.config import schema
from gateway.config.schema import COMMIT
from gateway.events import LaneBacklog, ReplicaState
from gateway.lane.lane import Lane
from gateway.lane.slices import Bounds
from gateway.routing.load import LoadKind, kind_of
from gateway.routing.pool import Pool, is_replica_expected
from gateway.routing.replica import Replica, shown_state
from gateway.routing.split import Health
from gateway.upstreams.member import MIXED, UpstreamState, known_dimensions
from gateway.upstreams.model_inputs import ModelInputs
from gateway.upstreams.token_ids import IdDecoder
from gateway.vector_spaces.fingerprint import Fingerprint
from gateway.vector_spaces.identity import IdentitySource, VectorsIdentity
from gateway.vector_spaces.space import VectorSpace

Lanes: TypeAlias = Mapping[LoadKind, Lane]


class Upstream:
    """Upstream of the config with its collaborators. lanes: one for each kind of batch."""

    def __init__(
        self, name: str, settings: schema.UpstreamSettings, pool: Pool, lanes: Lanes, space: VectorSpace
    ) -> None:
        self.name = name
        self.settings = settings
        self.pool = pool
        self.lanes = lanes
        self.space = space
        self.model_inputs = ModelInputs(settings, pool.capabilities)
        pool.count_tokens = self.model_inputs.count_few
        self.identities = IdentitySource(name, settings)
        self.ids = IdDecoder(settings.token_encoding, self.model_inputs.tokenizer_source)
        # Calls in progress, from the route to the reply; the upstream may be closed when there are none.
        self.calls = 0

    def hold(self) -> "CallHold":
        """Return a context manager that counts one call in progress."""
        return CallHold(self)

    @property
    def idle(self) -> bool:
        """True if no call is in progress and nothing is in flight to any replica."""
        return not self.calls and not any(replica.batches for replica in self.pool.replicas)

    @property
    def capabilities(self) -> Capabilities | None:
        """Capabilities of its replicas; None while none has joined."""
        return self.pool.capabilities()

    @property
    def bounds(self) -> Bounds:
        """Maximum size of one upstream request."""
        return self.lanes["texts"].bounds()

    def lane_of(self, work: Work) -> Lane:
        """Return the lane of a piece of work."""
        return self.lanes[kind_of(work)]

    def backlog(self) -> LaneBacklog:
        """Return the size and age of what waits in all lanes."""
        parts = [lane.backlog() for lane in self.lanes.values()]
        return LaneBacklog(
            sum(part.tokens for part in parts),
            sum(part.inputs for part in parts),
            max(part.oldest_s for part in parts),
        )

    def replica_states(self) -> list[tuple[Replica, ReplicaState]]:
        """Return the replicas with their states for operators."""
        return [(replica, shown_state(replica)) for replica in self.pool.replicas]

    @property
    def startup_done(self) -> bool:
        """True once it no longer delays readiness: its engine has loaded, or each replica was tried."""
        if self.settings.is_hosted and (self.capabilities is not None or self.pool.has_rejected()):
            return True
        return not self.pool.is_joining()

    @property
    def fingerprint(self) -> str | None:
        """Id of the vector space of its vectors; `mixed` while a replica in use gives different ones."""
        return MIXED if self.space.id and self.pool.is_mixed() else self.space.id

    @property
    def dimensions(self) -> int | None:
        """Length of its vectors, None while it is not known."""
        return known_dimensions(self.capabilities, self.space.reference)

    @property
    def checked_fingerprint(self) -> Fingerprint | None:
        """Fingerprint of the vectors that it computes now, None unless every usable replica was checked."""
        reference = self.space.reference
        if reference is None or self.capabilities is None or self.pool.is_mixed():
            return None
        if any(self.space.dimensions_of(replica.name) is None for replica in self.pool.usable()):
            return None
        return reference

    @property
    def health(self) -> Health:
        """Health: it can serve a call now, or after a wait, or not."""
        if self.pool.usable():
            return "ready"
        return "expected" if is_replica_expected(self.pool, holds=self.pool.holds) else "out"

    @property
    def state(self) -> UpstreamState:
        """State for operators: `ready` if it can serve calls, else the reason."""
        if self.pool.usable():
            return "ready"
        if self.pool.has_rejected():
            return "refused"
        return "unavailable" if self.startup_done else "loading"

    @property
    def residence(self) -> Residence | None:
        """Residence of its model in memory; None if the backend does not report it."""
        return next((replica.residence for replica in self.pool.replicas), None)


class CallHold:
    """Counts one call of an upstream while its block runs; a generator would cost more per call."""

    __slots__ = ("_upstream",)

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def __enter__(self) -> Upstream:
        """Count the call in."""
        self._upstream.calls += 1
        return self._upstream

    def __exit__(self, *_: object) -> None:
        """Decrement the count of calls, whatever the call's outcome."""
        self._upstream.calls -= 1


def vectors_identity(upstream: Upstream) -> VectorsIdentity | None:
    """Return the identity of an upstream's vectors, None unless every replica was checked."""
    fingerprint, capabilities = upstream.checked_fingerprint, upstream.capabilities
    if fingerprint is None or capabilities is None:
        return None
    return upstream.identities.identity_of(fingerprint, capabilities)


def scores_identity(upstream: Upstream) -> VectorsIdentity | None:
    """Return the identity of an upstream's scores, None unless a commit determines the model.

    Scores have no fingerprint. The engine of this gateway loads the files of that commit and checks them.
    """
    settings, capabilities = upstream.settings, upstream.capabilities
    if capabilities is None or not settings.is_hosted or is_path(settings.model or ""):
        return None
    if settings.revision is None or not COMMIT.fullmatch(settings.revision):
        return None
    return upstream.identities.scores_of(capabilities)


def identity_of(upstream: Upstream, work: Work) -> VectorsIdentity | None:
    """Return the identity of an upstream's outputs for a work, None if it is unknown."""
    return scores_identity(upstream) if work.operation is Operation.RERANK else vectors_identity(upstream)
