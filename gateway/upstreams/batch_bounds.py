"""Size of one upstream request: accepted by every replica, and restricted by the config."""

from backends.contract import Capabilities
from gateway.config import schema
from gateway.lane.slices import Bounds, ConfiguredBounds, bounds_of, tightest
from gateway.routing.pool import Pool


class BatchBounds:
    """Returns the current bounds; computes them again only when what is known of a replica has changed."""

    def __init__(self, pool: Pool, settings: schema.UpstreamSettings) -> None:
        self._pool = pool
        # The engine cuts forward passes itself, by counts that it knows; here only upper bounds are known.
        tokens = None if settings.is_local else settings.request_tokens
        self._configured = ConfiguredBounds(settings.request_inputs, tokens, settings.request_bytes)
        # Of each replica: its capabilities, and the bytes learned from its refusals.
        self._known: list[tuple[Capabilities | None, int | None]] = []
        self._bounds = Bounds()

    def __call__(self) -> Bounds:
        """Return the maximum size of one upstream request."""
        known = [(replica.capabilities, replica.refusals.learned_bytes) for replica in self._pool.replicas]
        if known != self._known:
            self._known = known
            self._bounds = self._tightest()
        return self._bounds

    def _tightest(self) -> Bounds:
        bounds = [
            bounds_of(capabilities, self._configured, learned_bytes)
            for capabilities, learned_bytes in self._known
            if capabilities is not None
        ]
        return tightest(bounds) if bounds else Bounds()
