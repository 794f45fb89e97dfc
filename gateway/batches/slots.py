"""Slots of one process for work on jobs, and the share of each tenant. Pure.

Rule: no tenant keeps another one out. A tenant has at most a quarter of the slots. While all are taken, a
tenant that has none takes one more, and the tenant that has the most gives one back; tenants with one each
take turns. Validations and chunks of stopped jobs have slots of their own, because they end by themselves and
other chunks might not.
"""

from collections import Counter
from dataclasses import dataclass, field

# Chunks of which a process runs lines: more would only wait for permits, and each is in memory.
CHUNKS_MAX = 16
CHUNKS_PER_TENANT = CHUNKS_MAX // 4
# With those that tenants without a slot have taken until others give theirs back.
CHUNKS_LIMIT = 2 * CHUNKS_MAX
# Of validations and chunks of stopped jobs: one of each tenant.
BRIEF_MAX = 4
# A tenant's only chunk gives way to another tenant after so long.
TURN_S = 10.0
# Tenants whose last turn is remembered.
TENANTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot that is taken. since_s: on a clock that never goes back. is_brief: its work ends by itself."""

    job: str
    number: int
    tenant: str
    since_s: float
    is_brief: bool


@dataclass(slots=True)
class Slots:
    """Slots that are taken. last_s: when each tenant took its last one."""

    taken: set[Slot] = field(default_factory=set)
    last_s: dict[str, float] = field(default_factory=dict)

    def take(self, slot: Slot) -> None:
        """Take a slot."""
        self.taken.add(slot)
        self.last_s.pop(slot.tenant, None)
        self.last_s[slot.tenant] = slot.since_s
        while len(self.last_s) > TENANTS_MAX:
            self.last_s.pop(next(iter(self.last_s)))

    def may_take(self, tenant: str, *, is_brief: bool) -> bool:
        """Return whether a slot is free for a tenant."""
        of_tenant = self.of_tenant(is_brief=is_brief)
        if is_brief:
            return not of_tenant[tenant] and of_tenant.total() < BRIEF_MAX
        most = CHUNKS_MAX if of_tenant[tenant] else CHUNKS_LIMIT
        return of_tenant[tenant] < CHUNKS_PER_TENANT and of_tenant.total() < most

    def of_tenant(self, *, is_brief: bool) -> Counter[str]:
        """Return how many slots each tenant has."""
        return Counter(slot.tenant for slot in self.taken if slot.is_brief is is_brief)

    def need(self, tenant: str) -> tuple[int, float]:
        """Return what sorts the tenant first that has the fewest slots, and took its last one longest ago."""
        return self.of_tenant(is_brief=False)[tenant], self.last_s.get(tenant, 0.0)

    def to_give_back(self, now_s: float) -> list[Slot]:
        """Return the slots that are too many."""
        chunks = [slot for slot in self.taken if not slot.is_brief]
        have = self.of_tenant(is_brief=False)
        found: list[Slot] = []
        for _ in range(len(chunks) - CHUNKS_MAX):
            slot = max(
                (slot for slot in chunks if have[slot.tenant] > 1 or now_s - slot.since_s >= TURN_S),
                key=lambda slot: (have[slot.tenant], now_s - slot.since_s),
                default=None,
            )
            if slot is None:
                break
            chunks.remove(slot)
            have[slot.tenant] -= 1
            found.append(slot)
        return found
