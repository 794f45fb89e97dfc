"""One upstream in use: its replicas, the lane in front of them, and the inputs of its model.

To the request path it is a group of one upstream: it serves every call of its model, and no call moves.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from backends.checkpoints.needed_files import is_path
from backends.contract import Capabilities, Operation, Residence, Work
from gateway.calls import Call, Deadline
from gateway.config import schema
from gateway.config.schema import COMMIT
from gateway.errors import GatewayError
from gateway.events import LaneBacklog, ReplicaState
from gateway.lane.lane import Lane
from gateway.lane.slices import Bounds
from gateway.lane.upstream_limits import UpstreamLimits
from gateway.routing.pool import Pool
from gateway.routing.replica import LoadKind, Replica, kind_of
from gateway.routing.routes import Route
from gateway.routing.split import Health
from gateway.upstreams.member import MIXED, UpstreamState, known_dimensions
from gateway.upstreams.model_inputs import ModelInputs
from gateway.upstreams.token_ids import IdDecoder
from gateway.vector_spaces.fingerprint import Fingerprint
from gateway.vector_spaces.identity import IdentitySource, VectorsIdentity
from gateway.vector_spaces.space import VectorSpace

Lanes: TypeAlias = Mapping[LoadKind, Lane]


class Upstream:
    """Upstream of the config with its collaborators. lanes: one for each kind of batch.

    limits: of its account, None without any.
    """

    def __init__(
        self,
        name: str,
        settings: schema.UpstreamSettings,
        pool: Pool,
        lanes: Lanes,
        space: VectorSpace,
        model_inputs: ModelInputs,
        limits: UpstreamLimits | None = None,
    ) -> None:
        self.name = name
        self.limits = limits
        self.settings = settings
        self.pool = pool
        self.lanes = lanes
        self.space = space
        self.model_inputs = model_inputs
        self.identities = IdentitySource(name, settings)
        self.ids = IdDecoder(settings.token_encoding, model_inputs.tokenizer_source)
        self._names = (name,)
        # Calls in progress, from the route to the reply; the upstream may be closed when there are none.
        self._calls = 0

    def follow(self, settings: schema.UpstreamSettings) -> None:
        """Replace the settings by others of the same server."""
        self.settings = settings

    def enter(self) -> None:
        """Count one call in progress."""
        self._calls += 1

    def leave(self) -> None:
        """Stop counting a call, whatever its outcome."""
        self._calls -= 1

    async def candidates(
        self,
        route: Route,
        _tenant: str,
        _call: Call,
        _deadline: Deadline,
    ) -> tuple[Route, Sequence[str]]:
        """Return the route, and the upstreams that may serve a call: itself."""
        return route, self._names

    def record_failure(self, upstream: str, error: GatewayError) -> None:
        """Record nothing: its pool has recorded what replicas did."""

    def may_move(self, error: GatewayError, deadline: Deadline) -> bool:  # noqa: ARG002
        """Return False: no other upstream serves the model."""
        return False

    def accepts(self, upstream: str) -> bool:  # noqa: ARG002
        """Return whether a reply is used: always, as its own space decides which replicas get work."""
        return True

    @property
    def idle(self) -> bool:
        """True if no call is in progress and nothing is in flight to any replica."""
        return not self._calls and not any(replica.batches for replica in self.pool.replicas)

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
        return [(replica, replica.shown_state) for replica in self.pool.replicas]

    @property
    def startup_done(self) -> bool:
        """True once it no longer delays readiness: its engine has loaded, or each replica was tried."""
        if self.settings.is_local and (self.capabilities is not None or self.pool.has_rejected()):
            return True
        return not self.pool.is_joining()

    @property
    def fingerprint(self) -> str | None:
        """Id of the vector space of its vectors; `mixed` while a replica in use gives different ones."""
        own = self.space.id
        return MIXED if own and self.pool.is_mixed() else own

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
        return "expected" if self.pool.is_expected else "out"

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
    if capabilities is None or not settings.is_local or is_path(settings.model or ""):
        return None
    if settings.revision is None or not COMMIT.fullmatch(settings.revision):
        return None
    return upstream.identities.scores_of(capabilities)


def identity_of(upstream: Upstream, work: Work) -> VectorsIdentity | None:
    """Return the identity of an upstream's outputs for a work, None if it is unknown."""
    return scores_identity(upstream) if work.operation is Operation.RERANK else vectors_identity(upstream)
