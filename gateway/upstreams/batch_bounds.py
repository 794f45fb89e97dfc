"""Size of one upstream request: accepted by every replica, and restricted by the config."""

from backends.contract import Capabilities
from gateway.batching.slices import Bounds, bounds_of, tightest
from gateway.config import schema
from gateway.routing.pool import Pool


class BatchBounds:
    """Returns the current bounds; computes them again only when a replica reports different capabilities."""

    def __init__(self, pool: Pool, settings: schema.UpstreamSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._capabilities: list[Capabilities | None] = []
        self._bounds = Bounds()

    def __call__(self) -> Bounds:
        """Return the maximum size of one upstream request."""
        capabilities = [replica.capabilities for replica in self._pool.replicas]
        if capabilities != self._capabilities:
            self._capabilities = capabilities
            self._bounds = self._tightest()
        return self._bounds

    def _tightest(self) -> Bounds:
        settings = self._settings
        bounds = [
            bounds_of(reported, settings.batch_inputs, settings.batch_tokens)
            for reported in self._capabilities
            if reported is not None
        ]
        return tightest(bounds) if bounds else Bounds()
