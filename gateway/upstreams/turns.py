"""Failover of a call between the upstreams of its model, within its deadline and the reserved quota."""

from collections.abc import Sequence
from typing import Protocol

from backends.contract import Reply
from gateway.calls import Deadline
from gateway.errors import GatewayError, NoReplica
from gateway.events import Observe, UpstreamTried
from gateway.routing.pool import PROBED_WITHIN_S
from gateway.upstreams.group import UpstreamGroup

# Outcome of a reply that is dropped, because its upstream turned out to give other vectors.
OTHER_VECTORS = "other_vectors"


class Send(Protocol):
    """Sends a call to one upstream."""

    async def __call__(self, upstream: str, /, *, is_last: bool) -> Reply:
        """Return the reply. is_last: no other upstream could take over. Raises: GatewayError."""


async def send_in_turn(
    group: UpstreamGroup, upstreams: Sequence[str], send: Send, deadline: Deadline, observe: Observe
) -> tuple[str, Reply]:
    """Return the reply of the first upstream that gives one, with its name.

    upstreams: in the order of preference, at least one. Raises: GatewayError, of the last one tried.
    """
    for index, upstream in enumerate(upstreams):
        is_last = index == len(upstreams) - 1
        try:
            reply = await send(upstream, is_last=is_last)
        except GatewayError as error:
            group.record(upstream, error)
            observe(UpstreamTried(group.model, upstream, error.kind))
            if is_last or not group.may_move(error, deadline):
                raise
            continue
        group.record(upstream, None)
        # Its vectors may have turned out to be others while it computed them.
        is_kept = not group.rejects(upstream)
        observe(UpstreamTried(group.model, upstream, "ok" if is_kept else OTHER_VECTORS))
        if is_kept:
            return upstream, reply
    reason = "the last upstream of this model returned vectors of a different space, which are not used"
    raise NoReplica(reason, retry_after_s=PROBED_WITHIN_S)
