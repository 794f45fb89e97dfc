"""The replicas of one upstream: the one owner of their health and of what is in flight at each."""

from collections import Counter
from collections.abc import Callable, Collection
from random import Random

from backends.contract import Backend, Capabilities
from gateway.config import Policy
from gateway.events import Observe, ReplicaChanged
from gateway.routing.health import Happened, State, after
from gateway.routing.policies import ranked


class Replica:
    """One server or engine of an upstream. name: what logs and metrics call it."""

    def __init__(self, name: str, backend: Backend) -> None:
        self.name = name
        self.backend = backend
        self.state = State.JOINING
        self.capabilities: Capabilities | None = None
        self.batches = 0
        self.batches_of: Counter[str] = Counter()
        self.inputs = 0
        self.tokens = 0

    def has_room(self, inputs: int, window: int) -> bool:
        """Whether one more batch of so many inputs may go: a window's slots, and the replica's permits."""
        permits = self.capabilities.concurrent_inputs if self.capabilities else None
        # A batch larger than all permits could never go; alone it may try.
        free = permits is None or self.inputs == 0 or self.inputs + inputs <= permits
        return self.batches < window and free

    def started(self, inputs: int, tokens: int, tenant: str) -> None:
        """A batch is on its way."""
        self.batches += 1
        self.batches_of[tenant] += 1
        self.inputs += inputs
        self.tokens += tokens

    def finished(self, inputs: int, tokens: int, tenant: str) -> None:
        """A batch came back, well or badly."""
        self.batches -= 1
        self.batches_of[tenant] -= 1
        if not self.batches_of[tenant]:
            del self.batches_of[tenant]
        self.inputs -= inputs
        self.tokens -= tokens


class Pool:
    """Equal replicas behind one lane.

    window: batches in flight to each. changed: called after any change of a replica's state.
    """

    def __init__(
        self, upstream: str, replicas: list[Replica], policy: Policy, window: int, observe: Observe
    ) -> None:
        self.upstream = upstream
        self.replicas = replicas
        self.changed: Callable[[], None] = lambda: None
        self._policy = policy
        self._window = window
        self._observe = observe
        self._turn = 0
        self._random = Random()  # noqa: S311 - it spreads load, it keeps no secret

    def usable(self, avoid: Collection[Replica] = ()) -> list[Replica]:
        """Replicas that are up, without those to avoid."""
        return [one for one in self.replicas if one.state is State.UP and one not in avoid]

    def pick(
        self, inputs: int, avoid: Collection[Replica], tenant: str = "", *, alone: bool = True
    ) -> Replica | None:
        """The best replica with room for so many inputs, or None.

        Not alone, a tenant that has a batch at a replica leaves the last slot there to the others.
        """
        usable = self.usable(avoid)
        order = ranked(self._policy, [one.tokens for one in usable], self._turn, self._random)
        for index in order:
            one = usable[index]
            spare = 0 if alone or self._window == 1 or not one.batches_of[tenant] else 1
            if one.has_room(inputs, self._window - spare):
                self._turn += 1
                return usable[index]
        return None

    def joining(self) -> bool:
        """Whether a replica has not yet had its first attempt to join."""
        return any(one.state is State.JOINING for one in self.replicas)

    def capabilities(self) -> Capabilities | None:
        """What the upstream can do, as the replica that joined first tells it."""
        return next((one.capabilities for one in self.replicas if one.capabilities), None)

    def learn(
        self, replica: Replica, happened: Happened, reason: str, told: Capabilities | None = None
    ) -> None:
        """Move a replica along the table, and tell those who wait for one."""
        replica.capabilities = told or replica.capabilities
        state = after(replica.state, happened)
        if state is replica.state:
            return
        replica.state = state
        self._observe(ReplicaChanged(self.upstream, replica.name, state.value, reason))
        self.changed()
