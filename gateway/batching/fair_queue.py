"""Who goes next when many wait: deficit round robin between tenants by token cost. Pure.

*Promises.* Between tenants that wait in one class, tokens are shared by weight. Interactive goes before
bulk, but of every `BULK_EVERY` tokens' worth that leave while both wait, bulk gets one share. A lone
tenant gets everything. Within a tenant and class, cheap calls are not held up by expensive ones: a tenant's
calls take turns, and a call's own parts stay in order.
Knows nothing of futures, replicas or time.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Generic, Literal, TypeVar

import msgspec

Priority = Literal["interactive", "bulk"]
T = TypeVar("T")

# A turn's worth of tokens for a weight of 1: about one forward pass, so that turns are short.
QUANTUM_TOKENS = 2048
# Bulk's floor: one token in so many leaves from bulk while interactive waits too.
BULK_EVERY = 5


class Entry(msgspec.Struct, Generic[T], frozen=True):
    """One thing that waits. flow: whose call it is part of; the parts of one call share it."""

    item: T
    tenant: str
    cost: int
    flow: int = 0
    weight: int = 1
    priority: Priority = "interactive"


class _Tenant(Generic[T]):
    """One tenant's waiting calls in one class, and what it may still take this round."""

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.deficit = 0
        self.tokens = 0
        # By call, its parts by identity, in order: so that one that leaves need not be looked for.
        self.calls: OrderedDict[int, OrderedDict[int, Entry[T]]] = OrderedDict()

    def push(self, entry: Entry[T], *, first: bool) -> None:
        self.weight = entry.weight
        self.tokens += entry.cost
        call = self.calls.setdefault(entry.flow, OrderedDict())
        call[id(entry)] = entry
        if first:
            call.move_to_end(id(entry), last=False)
            self.calls.move_to_end(entry.flow, last=False)

    @property
    def head(self) -> Entry[T]:
        return next(iter(next(iter(self.calls.values())).values()))

    def pop(self) -> None:
        flow, call = next(iter(self.calls.items()))
        _, entry = call.popitem(last=False)
        self.tokens -= entry.cost
        if call:
            # The next part waits behind the tenant's other calls: a big one does not block small ones.
            self.calls.move_to_end(flow)
        else:
            del self.calls[flow]


class _Class(Generic[T]):
    """Deficit round robin over the tenants of one class."""

    def __init__(self) -> None:
        self.tenants: OrderedDict[str, _Tenant[T]] = OrderedDict()

    def push(self, entry: Entry[T], *, first: bool) -> None:
        if entry.tenant not in self.tenants:
            self.tenants[entry.tenant] = _Tenant(entry.weight)
        self.tenants[entry.tenant].push(entry, first=first)

    def has(self, skip: Collection[str]) -> bool:
        """Whether anybody waits who is not skipped."""
        return bool(self.tenants) and (not skip or any(name not in skip for name in self.tenants))

    def turn(self, skip: Collection[str]) -> _Tenant[T]:
        """The tenant whose turn it is; who cannot pay for its next call yet goes to the end."""
        if len(self.tenants) == 1:
            return next(iter(self.tenants.values()))
        while True:
            name = next(name for name in self.tenants if name not in skip)
            tenant = self.tenants[name]
            if tenant.deficit >= tenant.head.cost:
                return tenant
            tenant.deficit += QUANTUM_TOKENS * tenant.weight
            if tenant.deficit >= tenant.head.cost:
                return tenant
            self.tenants.move_to_end(name)

    def pop(self, entry: Entry[T]) -> None:
        """Let the head of a tenant go, whose turn it was."""
        tenant = self.tenants[entry.tenant]
        tenant.pop()
        tenant.deficit = max(0, tenant.deficit - entry.cost)
        if not tenant.calls:
            # Credit is not saved up while there is nothing to spend it on.
            del self.tenants[entry.tenant]
        elif tenant.deficit < tenant.head.cost:
            self.tenants.move_to_end(entry.tenant)


class FairQueue(Generic[T]):
    """Everything that waits in front of one upstream."""

    def __init__(self) -> None:
        self._classes: dict[Priority, _Class[T]] = {"interactive": _Class(), "bulk": _Class()}
        self._count = 0
        # What bulk is owed for the interactive tokens that left while it waited.
        self._bulk_credit = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self._count

    def others_than(self, tenant: str) -> bool:
        """Whether somebody else waits."""
        return self._count > 0 and any(
            len(one.tenants) > (tenant in one.tenants) for one in self._classes.values()
        )

    def tokens_of(self, tenant: str) -> int:
        """How much of one tenant waits."""
        waiting = (one.tenants.get(tenant) for one in self._classes.values())
        return sum(one.tokens for one in waiting if one is not None)

    def items(self) -> Iterator[T]:
        """All that waits, in no order that matters."""
        for of_class in self._classes.values():
            for tenant in of_class.tenants.values():
                for call in tenant.calls.values():
                    for entry in call.values():
                        yield entry.item

    def push(self, entry: Entry[T], *, first: bool = False) -> None:
        """Join the queue; first: go on where an attempt has failed, before the tenant's other calls."""
        self._classes[entry.priority].push(entry, first=first)
        self._count += 1
        self.tokens += entry.cost

    def peek(self, skip: Collection[str] = ()) -> Entry[T] | None:
        """The next to go, of a tenant that is not skipped; or None."""
        of_class = self._next_class(skip)
        return None if of_class is None else of_class.turn(skip).head

    def pop(self, entry: Entry[T]) -> None:
        """Let go what `peek` has just given."""
        self._classes[entry.priority].pop(entry)
        self._count -= 1
        self.tokens -= entry.cost
        if not self._classes["bulk"].tenants:
            self._bulk_credit = 0
        elif entry.priority == "bulk":
            self._bulk_credit = max(0, self._bulk_credit - entry.cost)
        else:
            self._bulk_credit += max(1, entry.cost // (BULK_EVERY - 1))

    def remove(self, entry: Entry[T]) -> bool:
        """Leave the queue without having gone; False where it is not there."""
        of_class = self._classes[entry.priority]
        tenant = of_class.tenants.get(entry.tenant)
        call = tenant.calls.get(entry.flow) if tenant else None
        if tenant is None or call is None or call.pop(id(entry), None) is None:
            return False
        tenant.tokens -= entry.cost
        if not call:
            del tenant.calls[entry.flow]
        if not tenant.calls:
            del of_class.tenants[entry.tenant]
        self._count -= 1
        self.tokens -= entry.cost
        return True

    def _next_class(self, skip: Collection[str]) -> _Class[T] | None:
        interactive, bulk = self._classes["interactive"], self._classes["bulk"]
        if not bulk.has(skip):
            return interactive if interactive.has(skip) else None
        if not interactive.has(skip) or self._bulk_credit >= bulk.turn(skip).head.cost:
            return bulk
        return interactive
