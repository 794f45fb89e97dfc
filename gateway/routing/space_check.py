"""Interface between routing and the vector space that an upstream's replicas have to share."""

from typing import Protocol

from backends.contract import Backend, Capabilities


class SpaceCheck(Protocol):
    """Comparison of replicas' vectors with their upstream's; `vector_spaces.space.VectorSpace` in production.

    Declared here so that routing does not import the fingerprints and their store.
    """

    @property
    def refuses(self) -> bool:
        """True if replicas with different vectors are kept out."""

    async def check(self, replica: str, backend: Backend, capabilities: Capabilities, /) -> bool:
        """Embed the canaries on a replica and return whether its vectors belong to the space.

        Raises: BackendError.
        """

    def is_foreign(self, replica: str, /) -> bool:
        """Return whether a replica's last check found vectors of a different space."""

    def dimensions_of(self, replica: str, /) -> int | None:
        """Return the dimensions of a replica's vectors at its last check, or None without one."""

    def note_of(self, replica: str, /) -> str | None:
        """Return what operators have to know of a replica's last check, None if there is nothing."""

    def mismatch_reason(self, replica: str, /) -> str:
        """Return the reason, for the operator, that a replica is foreign."""
