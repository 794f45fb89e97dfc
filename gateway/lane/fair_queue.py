"""Tenant-fair queue: deficit round robin between tenants by token cost. Pure.

*Promises.* Between tenants that wait in one priority class, tokens are shared by weight. Interactive entries
go before bulk ones, but bulk gets one of every `BULK_EVERY` tokens that leave while both wait. A tenant that
waits alone gets everything. Within a tenant and class, expensive calls do not delay cheap ones: a tenant's
calls take turns, and the parts of a call stay in order.

Knows nothing of futures, replicas or time.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Generic, Literal, TypeVar

import msgspec

Priority = Literal["interactive", "bulk"]
T = TypeVar("T")

# Tokens of one turn for a weight of 1: about one forward pass, so that turns are short.
QUANTUM_TOKENS = 2048
# Guaranteed share of bulk: one token in this many, while interactive entries wait too.
BULK_EVERY = 5


class Entry(msgspec.Struct, Generic[T], frozen=True):
    """One waiting item. flow: identifies its call, which all parts of the call share."""

    item: T
    tenant: str
    cost: int
    flow: int = 0
    weight: int = 1
    priority: Priority = "interactive"


class _TenantQueue(Generic[T]):
    """Waiting calls of one tenant in one class, and the tokens it may still take in this round."""

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.deficit = 0
        self.tokens = 0
        # By call, the parts in order and keyed by identity, so that a part can be removed without a search.
        self.calls: OrderedDict[int, OrderedDict[int, Entry[T]]] = OrderedDict()

    def push(self, entry: Entry[T], *, first: bool) -> None:
        self.weight = entry.weight
        self.tokens += entry.cost
        call = self.calls.get(entry.flow)
        if call is None:
            call = self.calls[entry.flow] = OrderedDict()
        call[id(entry)] = entry
        if first:
            call.move_to_end(id(entry), last=False)
            self.calls.move_to_end(entry.flow, last=False)

    @property
    def head(self) -> Entry[T]:
        return next(iter(next(iter(self.calls.values())).values()))

    def pop(self) -> None:
        """Take the head, which its tenant pays for."""
        flow, call = next(iter(self.calls.items()))
        _, entry = call.popitem(last=False)
        self.tokens -= entry.cost
        self.deficit = max(0, self.deficit - entry.cost)
        if call:
            # The next part waits behind the tenant's other calls: a big call does not block small ones.
            self.calls.move_to_end(flow)
        else:
            del self.calls[flow]

    def remove(self, entry: Entry[T]) -> bool:
        """Remove an entry out of turn; return False if it is not here."""
        call = self.calls.get(entry.flow)
        if call is None or call.pop(id(entry), None) is None:
            return False
        self.tokens -= entry.cost
        if not call:
            del self.calls[entry.flow]
        return True

    def can_pay(self) -> bool:
        """Return whether it may send its head in this turn, or with the tokens of the next."""
        cost = self.head.cost
        if self.deficit < cost:
            self.deficit += QUANTUM_TOKENS * self.weight
        return self.deficit >= cost


class _PriorityClass(Generic[T]):
    """Deficit round robin over the tenants of one priority class."""

    def __init__(self) -> None:
        self.tenants: OrderedDict[str, _TenantQueue[T]] = OrderedDict()

    def push(self, entry: Entry[T], *, first: bool) -> None:
        tenant = self.tenants.get(entry.tenant)
        if tenant is None:
            tenant = self.tenants[entry.tenant] = _TenantQueue(entry.weight)
        tenant.push(entry, first=first)

    def remove(self, entry: Entry[T]) -> bool:
        tenant = self.tenants.get(entry.tenant)
        if tenant is None or not tenant.remove(entry):
            return False
        if not tenant.calls:
            del self.tenants[entry.tenant]
        return True

    def has_entries(self, skip: Collection[str]) -> bool:
        """Return whether a tenant that is not skipped waits."""
        return bool(self.tenants) and (not skip or any(name not in skip for name in self.tenants))

    def next_entry(self, skip: Collection[str]) -> Entry[T]:
        """Return the head of the tenant whose turn it is.

        A tenant that cannot pay for its next call yet moves to the end.
        """
        if len(self.tenants) == 1:
            (only,) = self.tenants.values()
            return only.head
        while True:
            name = next(name for name in self.tenants if name not in skip)
            tenant = self.tenants[name]
            if tenant.can_pay():
                return tenant.head
            self.tenants.move_to_end(name)

    def pop(self, entry: Entry[T]) -> None:
        """Remove the head of the tenant whose turn it was."""
        tenant = self.tenants[entry.tenant]
        tenant.pop()
        if not tenant.calls:
            # Credit does not accumulate while there is nothing to spend it on.
            del self.tenants[entry.tenant]
        elif tenant.deficit < tenant.head.cost:
            self.tenants.move_to_end(entry.tenant)


class FairQueue(Generic[T]):
    """All entries that wait in front of one upstream. size: their number. tokens: their cost."""

    def __init__(self) -> None:
        self._interactive: _PriorityClass[T] = _PriorityClass()
        self._bulk: _PriorityClass[T] = _PriorityClass()
        self._classes = {"interactive": self._interactive, "bulk": self._bulk}
        # Tokens that bulk is owed for the interactive tokens that left while it waited.
        self._bulk_credit = 0
        # The entry of a queue of one, as nearly every queue is: it waits for no turn, and is in no class.
        self._only: Entry[T] | None = None
        self.size = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self.size

    def has_other_tenants(self, tenant: str) -> bool:
        """Return whether any other tenant waits."""
        if self._only is not None:
            return self._only.tenant != tenant
        # Not a generator: every call asks.
        for priority_class in (self._interactive, self._bulk):
            if len(priority_class.tenants) > (tenant in priority_class.tenants):
                return True
        return False

    def tokens_of(self, tenant: str) -> int:
        """Return the tokens of one tenant that wait."""
        if self._only is not None:
            return self._only.cost if self._only.tenant == tenant else 0
        queues = (priority_class.tenants.get(tenant) for priority_class in self._classes.values())
        return sum(queue.tokens for queue in queues if queue is not None)

    def items(self) -> Iterator[T]:
        """Yield all waiting items, in no particular order."""
        if self._only is not None:
            yield self._only.item
        for priority_class in self._classes.values():
            for tenant in priority_class.tenants.values():
                for call in tenant.calls.values():
                    for entry in call.values():
                        yield entry.item

    def push(self, entry: Entry[T], *, first: bool = False) -> None:
        """Add an entry; first: before the tenant's other calls, to continue after a failed attempt."""
        self.size += 1
        self.tokens += entry.cost
        if self.size == 1:
            self._only = entry
            return
        if self._only is not None:
            self._classes[self._only.priority].push(self._only, first=False)
            self._only = None
        self._classes[entry.priority].push(entry, first=first)

    def peek(self, skip: Collection[str] = ()) -> Entry[T] | None:
        """Return the next entry of a tenant that is not skipped, or None."""
        if self._only is not None:
            return None if self._only.tenant in skip else self._only
        interactive, bulk = self._interactive, self._bulk
        if not bulk.has_entries(skip):
            return interactive.next_entry(skip) if interactive.has_entries(skip) else None
        if interactive.has_entries(skip) and self._bulk_credit < bulk.next_entry(skip).cost:
            return interactive.next_entry(skip)
        return bulk.next_entry(skip)

    def pop(self, entry: Entry[T]) -> None:
        """Remove the entry that `peek` has just returned."""
        self.size -= 1
        self.tokens -= entry.cost
        if self._only is not None:
            self._only, self._bulk_credit = None, 0
            return
        self._classes[entry.priority].pop(entry)
        if not self._bulk.tenants:
            self._bulk_credit = 0
        elif entry.priority == "bulk":
            self._bulk_credit = max(0, self._bulk_credit - entry.cost)
        else:
            self._bulk_credit += max(1, entry.cost // (BULK_EVERY - 1))

    def remove(self, entry: Entry[T]) -> bool:
        """Remove an entry out of turn; return False if it is not in the queue."""
        if self._only is entry:
            self._only = None
        elif not self._classes[entry.priority].remove(entry):
            return False
        self.size -= 1
        self.tokens -= entry.cost
        return True
