"""Pace of refusals that cost their caller nothing, such as those of wrong keys. Pure."""

from collections import OrderedDict

PER_S = 100
# A pause of this length earns as many refusals at once.
BURST_S = 1.0
# A client that repeats at once is slowed to one call in this time on each of its connections.
WAIT_MAX_S = 5.0
# More owners than these evict the oldest; memory stays bounded.
OWNERS_MAX = 10_000


class RefusalPace:
    """Times of replies to refused requests. Rule: a loop of refused requests takes no time from calls.

    An owner is a tenant, or the address of a client without a valid key.
    """

    def __init__(self) -> None:
        self._free_at_s: OrderedDict[str, float] = OrderedDict()

    def wait_s(self, owner: str, now_s: float) -> float:
        """Count one refusal, and return the time until its reply."""
        before_s = max(self._free_at_s.pop(owner, 0.0), now_s - BURST_S)
        reply_s = min(before_s + 1 / PER_S, now_s + WAIT_MAX_S)
        self._free_at_s[owner] = reply_s
        if len(self._free_at_s) > OWNERS_MAX:
            self._free_at_s.popitem(last=False)
        return max(0.0, reply_s - now_s)
