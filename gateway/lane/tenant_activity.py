"""Tenants that have called recently, and tenants whose inputs have caused a shared batch to fail. Pure."""

from collections import OrderedDict
from typing import Any

from gateway.lane.fair_queue import FairQueue

# A tenant counts as active for this long after its last call, which covers callers that pause between calls.
ACTIVE_S = 2.0
# A tenant whose input caused a batch to fail shares no batch with other tenants for this long, so that bad
# inputs cost the other tenants one failed batch.
SUSPECT_S = 10.0


class TenantActivity:
    """Recent calls and recent faults, by tenant. Both expire. queue: waiting tenants are active too."""

    def __init__(self, queue: FairQueue[Any]) -> None:
        self._queue = queue
        # The most recent last.
        self._last_call_s: OrderedDict[str, float] = OrderedDict()
        self._suspect_until_s: dict[str, float] = {}

    def mark_active(self, tenant: str, now_s: float) -> None:
        """Record a tenant's call."""
        self._last_call_s[tenant] = now_s
        self._last_call_s.move_to_end(tenant)

    def has_others(self, tenant: str, now_s: float) -> bool:
        """Return whether another tenant waits or has called recently; forgets tenants that have not."""
        calls, since_s = self._last_call_s, now_s - ACTIVE_S
        while calls and next(iter(calls.values())) < since_s:
            calls.popitem(last=False)
        return len(calls) - (tenant in calls) > 0 or self._queue.has_other_tenants(tenant)

    def mark_suspect(self, tenant: str, now_s: float) -> None:
        """Record that a tenant's input caused a batch to fail."""
        self._suspect_until_s[tenant] = now_s + SUSPECT_S

    def is_suspect(self, tenant: str, now_s: float) -> bool:
        """Return whether a tenant's input caused a batch to fail within `SUSPECT_S`."""
        until_s = self._suspect_until_s.get(tenant)
        if until_s is not None and until_s < now_s:
            del self._suspect_until_s[tenant]
            return False
        return until_s is not None
