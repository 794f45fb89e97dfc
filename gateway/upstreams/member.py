"""An upstream as the groups of upstreams know it; `upstream.Upstream` in production."""

from typing import Literal, Protocol

from backends.contract import Capabilities, Residence
from gateway.config.schema import UpstreamSettings
from gateway.events import LaneBacklog
from gateway.lane.slices import Bounds
from gateway.routing.split import Health
from gateway.vector_spaces.fingerprint import Fingerprint

MIXED = "mixed"
# refused: the replicas that respond belong to a different vector space. canary_only: of a model, whose canary
# serves its share of the calls, and nothing the others.
UpstreamState = Literal["ready", "loading", "refused", "unavailable", "canary_only"]


def known_dimensions(capabilities: Capabilities | None, reference: Fingerprint | None) -> int | None:
    """Return the length of vectors, None while it is not known.

    TEI does not report it; the reference texts, whose vectors `reference` has, show it.
    """
    if capabilities is not None and capabilities.dimensions is not None:
        return capabilities.dimensions
    return None if reference is None else reference.dimensions


class JudgedUpstream(Protocol):
    """Upstream whose vectors and capabilities decide whether it serves a model."""

    @property
    def name(self) -> str:
        """Name in the configuration."""

    @property
    def settings(self) -> UpstreamSettings:
        """Settings of the configuration."""

    @property
    def capabilities(self) -> Capabilities | None:
        """Capabilities of its replicas; None while none has joined."""

    @property
    def checked_fingerprint(self) -> Fingerprint | None:
        """Fingerprint of the vectors that it computes now, None unless every usable replica was checked."""

    @property
    def fingerprint(self) -> str | None:
        """Id of the vector space of its vectors; `MIXED` while a replica in use gives different ones."""

    @property
    def health(self) -> Health:
        """Health: it can serve a call now, or after a wait, or not."""

    @property
    def startup_done(self) -> bool:
        """True once it no longer delays readiness."""

    @property
    def residence(self) -> Residence | None:
        """Residence of its model in memory; None if the backend does not report it."""

    @property
    def bounds(self) -> Bounds:
        """Maximum size of one upstream request."""

    def enter(self) -> None:
        """Count one call in progress."""

    def leave(self) -> None:
        """Stop counting a call."""

    def backlog(self) -> LaneBacklog:
        """Return the size and age of what waits."""
