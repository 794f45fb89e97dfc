"""Settings of a lane, from its upstream's configuration."""

import msgspec

from gateway.routing.load import LoadKind


class LaneSettings(msgspec.Struct, frozen=True):
    """Bounds and rules of one lane.

    holds: work waits while no replica is usable, because one is expected to return. waits_for_loading: work
    also waits while a model is being loaded. retry_share, hedge_share: added attempts per attempt that
    callers cause. kind: of its batches.
    """

    queue_tokens: int
    attempt_timeout_s: float
    holds: bool
    retry_share: float = 0.2
    hedge_share: float = 0.05
    waits_for_loading: bool = True
    kind: LoadKind = "texts"
