"""Choice of a replica from a pool, and the pool's view of its replicas."""

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.contract import Backend, Capabilities, Embed, Operation, ReplicaSpec, Rerank
from backends.contract.errors import ConnectionLost, ReplicaUnavailable
from backends.tei.replica import open_replica
from gateway.events import Event, ReplicaChanged
from gateway.routing.choice import Policy
from gateway.routing.health import ReplicaEvent, State
from gateway.routing.offers import offers
from gateway.routing.pool import Pool
from gateway.routing.replica import SMALL_INPUTS, BatchLoad, LoadKind, Replica
from gateway.routing.window import Window


class PoolBench:
    """Pool of replicas that are never contacted, and the events that it reports."""

    def __init__(self, count: int, policy: Policy = "least_tokens", window: int = 2) -> None:
        self.events: list[Event] = []
        backend: Backend = open_replica(ReplicaSpec("http://nowhere"))
        self.replicas = [Replica(f"r{index}", backend, Window(window)) for index in range(count)]
        self.pool = Pool("up", self.replicas, policy, self.events.append)

    def join_all(self, **limits: int) -> "PoolBench":
        """Let every replica join."""
        for replica in self.replicas:
            capabilities = Capabilities(replica.name, frozenset(Operation), **limits)
            self.pool.transition(replica, ReplicaEvent.JOINED, "", capabilities)
        return self


# Events that lead to a state.
HISTORIES: dict[State, list[ReplicaEvent]] = {
    State.JOINING: [],
    State.UP: [ReplicaEvent.JOINED],
    State.DOWN: [ReplicaEvent.JOIN_FAILED],
    State.PROBATION: [ReplicaEvent.JOIN_FAILED, ReplicaEvent.JOINED],
    State.GONE: [ReplicaEvent.REMOVED],
}


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(get_args(Policy)),
    st.lists(
        st.tuples(st.sampled_from(State), st.integers(0, 3), st.integers(0, 3), st.integers(0, 9)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(get_args(LoadKind)),
)
def test_picked_replica_is_usable_and_has_room(
    policy: Policy, states: list[tuple[State, int, int, int]], kind: LoadKind
) -> None:
    bench = PoolBench(len(states), policy)
    for replica, (state, texts, media, tokens) in zip(bench.replicas, states, strict=True):
        for other, batches in (("texts", texts), ("media", media)):
            for _ in range(batches):
                replica.add_batch(BatchLoad(1, tokens, ["acme"], other), 0)
        for event in HISTORIES[state]:
            bench.pool.transition(replica, event, "")
    picked = bench.pool.pick(1, (), kind=kind)

    slots = {State.UP: 2, State.PROBATION: 1}
    candidates = [
        replica for replica in bench.replicas if replica.slots_by_kind[kind] < slots.get(replica.state, 0)
    ]
    assert (picked in candidates) if candidates else picked is None


def test_pick_avoids_replicas_that_failed_the_slice() -> None:
    bench = PoolBench(2).join_all()

    assert bench.replicas[1] is bench.pool.pick(1, {bench.replicas[0]})
    assert bench.pool.pick(1, set(bench.replicas)) is None


def test_two_small_batches_fill_a_window_of_sixteen() -> None:
    backend = PoolBench(1).replicas[0].backend
    replica = Replica("r", backend, Window(start=16), small_batch_slots=8)
    replica.enter(State.UP)
    small, full = BatchLoad(31, 100, ["acme"]), BatchLoad(SMALL_INPUTS, 100, ["acme"])

    assert (replica.free_slots("texts", 1), replica.free_slots("texts", SMALL_INPUTS)) == (2, 16)
    replica.add_batch(small, 0)
    # The rest is for other tenants, if there are any.
    assert not replica.admits(1, "acme", is_only_tenant=False)
    assert replica.admits(1, "other", is_only_tenant=False)
    replica.add_batch(small, 0)
    assert not replica.admits(1, "other", is_only_tenant=True)
    replica.remove_batch(small)
    replica.remove_batch(small)
    for _ in range(15):
        replica.add_batch(full, 0)
    # A lone text goes between full batches.
    assert replica.admits(1, "other", is_only_tenant=True)
    replica.add_batch(small, 0)
    assert (replica.free_slots("texts", 1), replica.free_slots("texts", SMALL_INPUTS)) == (0, 0)


def test_small_batches_do_not_teach_a_window_that_they_cannot_fill() -> None:
    window = Window(start=16)
    replica = Replica("r", PoolBench(1).replicas[0].backend, window, small_batch_slots=8)
    load = BatchLoad(4, 100, ["acme"])
    for now_s in range(1000):
        replica.add_batch(load, now_s)
        replica.record_success(load, 1.0, now_s, was_full=True)
        replica.remove_batch(load)
    assert window.size == 16


def test_full_window_has_room_after_a_batch_ends() -> None:
    bench = PoolBench(1).join_all()
    for _ in range(2):
        bench.replicas[0].add_batch(BatchLoad(4, 100, ["acme"]), 0)
    assert bench.pool.pick(1, ()) is None
    bench.replicas[0].remove_batch(BatchLoad(4, 100, ["acme"]))

    assert bench.replicas[0] is bench.pool.pick(1, ())


@pytest.mark.parametrize(
    ("in_flight", "more", "room"), [(0, 9, True), (3, 5, True), (4, 5, False), (8, 1, False)]
)
def test_permits_bound_inputs_in_flight_except_of_a_single_large_batch(
    in_flight: int, more: int, *, room: bool
) -> None:
    replica = PoolBench(1).join_all(concurrent_inputs=8).replicas[0]
    replica.add_batch(BatchLoad(in_flight, 0, ["acme"]), 0)

    assert room == replica.has_room(more, slots=9)


def test_state_change_is_observed_and_reported_once() -> None:
    bench, states = PoolBench(1), []
    bench.pool.subscribe(lambda: states.append(bench.replicas[0].state), lambda _: None)
    for event in (ReplicaEvent.JOINED, ReplicaEvent.JOINED, ReplicaEvent.LOST, ReplicaEvent.UNREACHED):
        bench.pool.transition(bench.replicas[0], event, event.value)

    assert [
        ReplicaChanged("up", "r0", "up", "joined"),
        ReplicaChanged("up", "r0", "down", "lost"),
    ] == bench.events
    assert [State.UP, State.DOWN] == states


def capabilities_of(name: str, *operations: Operation) -> Capabilities:
    return Capabilities(name, frozenset(operations))


def offered(pool: Pool) -> set[Operation]:
    capabilities = pool.capabilities()
    return set() if capabilities is None else set(capabilities.operations)


def test_offer_is_the_union_over_all_replicas_also_those_that_are_down() -> None:
    bench = PoolBench(3)
    assert bench.pool.is_joining()
    assert bench.pool.capabilities() is None
    for replica, operation in zip(bench.replicas, (Operation.EMBED, Operation.RERANK), strict=False):
        bench.pool.transition(replica, ReplicaEvent.JOINED, "", capabilities_of(replica.name, operation))
    assert {Operation.EMBED, Operation.RERANK} == offered(bench.pool)
    bench.pool.transition(bench.replicas[0], ReplicaEvent.LOST, "")

    # Calls that only it can serve get a 503, and are not called wrong.
    assert {Operation.EMBED, Operation.RERANK} == offered(bench.pool)
    assert [bench.replicas[1]] == bench.pool.usable()
    bench.pool.transition(bench.replicas[0], ReplicaEvent.REMOVED, "")
    assert {Operation.RERANK} == offered(bench.pool)


def test_broken_connection_of_a_replica_that_does_not_work_ejects_it() -> None:
    bench = PoolBench(2).join_all()
    for replica in bench.replicas:
        bench.pool.record_failure(replica, ConnectionLost("reset"), 0, 0)

    assert [State.DOWN, State.DOWN] == [replica.state for replica in bench.replicas]


def test_calls_wait_a_moment_for_a_replica_that_broke_its_connections() -> None:
    bench = PoolBench(1).join_all()
    (replica,) = bench.replicas
    bench.pool.expect_return(replica)
    assert not bench.pool.is_expected
    bench.pool.record_failure(replica, ConnectionLost("reset"), 0, 0)
    assert bench.pool.is_expected
    bench.pool.give_up(replica)
    assert not bench.pool.is_expected


def test_unreachable_replica_is_ejected_without_a_probe() -> None:
    bench = PoolBench(1).join_all()
    bench.pool.record_failure(bench.replicas[0], ReplicaUnavailable("refused"), 0, 0)

    assert State.DOWN is bench.replicas[0].state


def test_work_goes_only_to_replicas_that_offer_it() -> None:
    bench, (embed, rerank) = PoolBench(2), (Embed(("a",)), Rerank("q", ("a",)))
    both = ((Operation.EMBED,), (Operation.EMBED, Operation.RERANK))
    for replica, operations in zip(bench.replicas, both, strict=True):
        bench.pool.transition(replica, ReplicaEvent.JOINED, "", capabilities_of("m", *operations))

    assert [] == list(bench.pool.lacking(embed))
    assert [bench.replicas[0]] == list(bench.pool.lacking(rerank))
    assert offers(bench.pool.capabilities(), rerank)
    bench.pool.update_capabilities(bench.replicas[0], capabilities_of("m", *both[1]))
    assert () == bench.pool.lacking(rerank)


def test_equal_capabilities_stay_the_same_object_while_replicas_come_and_go() -> None:
    bench = PoolBench(2)
    for replica in bench.replicas:
        bench.pool.transition(replica, ReplicaEvent.JOINED, "", capabilities_of("m", Operation.EMBED))
    before = bench.pool.capabilities()
    bench.pool.transition(bench.replicas[0], ReplicaEvent.LOST, "")

    # Work that was prepared with it needs no refresh.
    assert before is bench.pool.capabilities()


def test_looking_for_room_takes_no_turn() -> None:
    bench = PoolBench(3, policy="round_robin").join_all()
    picked = []
    for _ in range(3):
        assert bench.pool.has_room(1)
        picked.append(bench.pool.pick(1, ()))

    assert bench.replicas == picked


def test_changed_model_is_on_probation() -> None:
    bench = PoolBench(1).join_all()
    changed = capabilities_of("other", Operation.RERANK)
    bench.pool.transition(bench.replicas[0], ReplicaEvent.CHANGED, "now other", changed)

    assert State.PROBATION is bench.replicas[0].state
    assert ReplicaChanged("up", "r0", "probation", "now other") == bench.events[-1]
    assert {Operation.RERANK} == offered(bench.pool)


def test_a_replica_that_is_down_for_another_reason_is_reported_once_more() -> None:
    bench = PoolBench(1).join_all()
    (replica,) = bench.replicas
    for event, reason in (
        (ReplicaEvent.LOST, "nothing listens"),
        (ReplicaEvent.UNREACHED, "nothing listens"),
        (ReplicaEvent.FOREIGN, "512 dimensions"),
        (ReplicaEvent.FOREIGN, "512 dimensions"),
    ):
        bench.pool.transition(replica, event, reason)

    downs = [
        each.reason for each in bench.events if isinstance(each, ReplicaChanged) and each.state == "down"
    ]
    assert ["nothing listens", "512 dimensions"] == downs
