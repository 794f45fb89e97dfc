"""Scheduler: the next batch for a queue and a pool, without an event loop."""

from typing import Any

import pytest

from backends.contract import Backend, Capabilities, Embed, EmbedParts, Operation, ReplicaSpec
from backends.contract.errors import BackendError, ReplicaFailed
from backends.tei.replica import open_replica
from gateway.errors import NoReplica
from gateway.lane.fair_queue import FairQueue
from gateway.lane.isolation import ACTIVE_S, ALONE_MAX, SUSPECT_S, IsolatedQueue, Isolation, TenantActivity
from gateway.lane.measures import BatchSizer
from gateway.lane.schedule import LOOK_AHEAD, Dispatch, Rejection, Scheduler, SchedulingPass
from gateway.lane.slices import Bounds, Slice
from gateway.lane.ticket import Attempt, Owner, Ticket
from gateway.routing.health import ReplicaEvent, State
from gateway.routing.pool import Pool
from gateway.routing.replica import BatchLoad, LoadKind, Replica
from gateway.routing.window import Window

# Text, tenant, and options of the owner.
Arrival = tuple[str, str] | tuple[str, str, dict[str, Any]]


def text_of(ticket: Ticket) -> str:
    """Return the only input of a ticket."""
    work = ticket.piece.work
    assert isinstance(work, Embed | EmbedParts)
    return work.inputs[0] if isinstance(work, Embed) else str(work.inputs[0][0])


class Bench:
    """A scheduler over a queue and replicas that are never contacted."""

    def __init__(
        self,
        replicas: int = 1,
        window: int = 1,
        *,
        reports_tokens: bool = True,
        holds: bool = False,
        bounds: Bounds | None = None,
        small_batch_slots: int = 1,
        kind: LoadKind = "texts",
    ) -> None:
        backend: Backend = open_replica(ReplicaSpec("http://nowhere"))
        self.replicas = [
            Replica(f"r{index}", backend, Window(window), small_batch_slots) for index in range(replicas)
        ]
        self.pool = Pool("up", self.replicas, "least_tokens", lambda _: None, seed=0, holds=holds)
        self.queue: FairQueue[Ticket] = FairQueue()
        self.activity = TenantActivity(self.queue)
        self.sizer = BatchSizer()
        self.in_flight: list[Attempt] = []
        self.isolated: IsolatedQueue[Ticket] = IsolatedQueue(lambda: self.in_flight)
        self.scheduler = Scheduler(self.queue, self.pool, self.activity, self.sizer, self.isolated, kind)
        self.bounds = bounds or Bounds()
        self.kind: LoadKind = kind
        self.now_s = 0.0
        self._flows = 0
        capabilities = Capabilities("m", frozenset({Operation.EMBED}), reports_input_tokens=reports_tokens)
        for replica in self.replicas:
            self.pool.transition(replica, ReplicaEvent.JOINED, "", capabilities)

    def add(self, text: str, tenant: str = "acme", **options: Any) -> Ticket:
        """Queue a call of one input, whose tokens are its characters."""
        self._flows += 1
        piece = Slice(0, Embed((text,)), 1, len(text), len(text))
        ticket = Ticket(piece, Owner(tenant, self._flows, **options), 30, self.now_s)
        ticket.enqueue(self.queue, self.now_s)
        return ticket

    def add_alone(self, text: str, level: Isolation = Isolation.ALONE, tenant: str = "acme") -> Ticket:
        """Queue a call of one input that shares no batch."""
        ticket = self.add(text, tenant)
        self.queue.remove(ticket.entry)
        self.isolated.enqueue(ticket, level, self.now_s)
        return ticket

    def run(self) -> list[tuple[str, list[str]] | Exception]:
        """Act on every decision of one pass, as a lane does, and return them."""
        scheduling_pass = SchedulingPass()
        decisions: list[tuple[str, list[str]] | Exception] = []
        while (
            decision := self.scheduler.decide(scheduling_pass, self.now_s, lambda: self.bounds)
        ) is not None:
            match decision:
                case Dispatch(tickets, replica):
                    texts = [text_of(ticket) for ticket in tickets]
                    attempt = Attempt(tickets, tickets[0].piece, replica, self.now_s, is_hedge=False)
                    tenants = tuple({ticket.owner.tenant for ticket in tickets})
                    attempt.load = BatchLoad(
                        len(tickets), 1, tenants, self.kind, is_extra=attempt.isolation > 0
                    )
                    replica.add_batch(attempt.load, self.now_s)
                    self.in_flight.append(attempt)
                    decisions.append((replica.name, texts))
                case Rejection(ticket, error):
                    ticket.settle(error)
                    decisions.append(error)
        self.scheduler.end_pass(scheduling_pass)
        return decisions

    def run_batches(self) -> list[list[str]]:
        """Act on every decision of one pass, and return the texts of each batch."""
        decisions = self.run()
        assert not any(isinstance(decision, Exception) for decision in decisions)
        return [decision[1] for decision in decisions if isinstance(decision, tuple)]


@pytest.mark.parametrize(
    ("slots", "batches"),
    [(3, [["a"], ["b"], ["c"]]), (2, [["a", "b"], ["c"]]), (1, [["a", "b", "c"]])],
)
def test_waiting_calls_are_spread_over_the_free_slots(slots: int, batches: list[list[str]]) -> None:
    bench = Bench(window=slots)
    for text in "abc":
        bench.add(text)

    assert batches == bench.run_batches()
    assert 0 == len(bench.queue)


def test_single_texts_share_batches_where_a_small_batch_takes_half_the_window() -> None:
    bench = Bench(window=16, small_batch_slots=8)
    for text in "abcdefg":
        bench.add(text)

    assert [list("abcd"), list("efg")] == bench.run_batches()


def test_calls_wait_while_no_replica_has_room() -> None:
    bench = Bench()
    bench.add("a")
    bench.run()
    bench.add("b")

    assert [] == bench.run()
    assert 1 == len(bench.queue)


@pytest.mark.parametrize(
    ("bounds", "batch"),
    [(Bounds(), "abcd"), (Bounds(inputs=2), "ab"), (Bounds(tokens=3), "abc"), (Bounds(bytes=1), "a")],
)
def test_batch_stays_within_the_bounds_of_a_request(bounds: Bounds, batch: str) -> None:
    bench = Bench(bounds=bounds)
    for text in "abcd":
        bench.add(text)

    assert [("r0", list(batch))] == bench.run()


@pytest.mark.parametrize(("priority", "count"), [("interactive", 3), ("bulk", 5)])
def test_only_interactive_batches_are_kept_short(priority: str, count: int) -> None:
    bench = Bench()
    bench.sizer.tokens = 30
    for index in range(5):
        bench.add(f"{index:010}", priority=priority)
    [texts] = bench.run_batches()

    assert count == len(texts)


@pytest.mark.parametrize(
    ("other", "reports_tokens", "together"),
    [
        ({}, True, True),
        ({"tenant": "acme"}, False, True),
        ({}, False, False),
        ({"shares_batches": False}, True, False),
        ({"priority": "bulk"}, True, False),
    ],
)
def test_tenants_share_a_batch_only_if_they_may(
    other: dict[str, Any], *, reports_tokens: bool, together: bool
) -> None:
    bench = Bench(reports_tokens=reports_tokens)
    bench.add("mine")
    bench.add("theirs", **({"tenant": "other"} | other))
    [texts] = bench.run_batches()

    assert (["mine", "theirs"] if together else ["mine"]) == texts


@pytest.mark.parametrize(("later_s", "together"), [(0.0, False), (SUSPECT_S + 0.1, True)])
def test_suspect_tenant_shares_no_batch_for_a_while(later_s: float, *, together: bool) -> None:
    bench = Bench()
    bench.activity.mark_suspect("poisoner", 0.0)
    bench.now_s = later_s
    bench.add("mine")
    bench.add("theirs", "poisoner")
    [texts] = bench.run_batches()

    assert together is (["mine", "theirs"] == texts)


def test_slices_that_go_alone_share_no_batch_and_take_no_slots() -> None:
    bench = Bench()
    for text in "ab":
        bench.add_alone(text)
    for text in "cd":
        bench.add(text)

    assert [["a"], ["b"], ["c", "d"]] == bench.run_batches()


def test_few_slices_go_alone_at_a_replica_and_one_that_is_known_to_fail() -> None:
    bench = Bench()
    for text in "abcde":
        bench.add_alone(text)
    for text in "fg":
        bench.add_alone(text, Isolation.KNOWN)
    assert [["a"], ["b"], ["c"], ["d"]] == bench.run_batches()

    known = Bench()
    for text in "fg":
        known.add_alone(text, Isolation.KNOWN)
    assert [["f"]] == known.run_batches()


def test_a_replica_in_probation_gets_one_slice_that_goes_alone() -> None:
    bench = Bench(window=4)
    bench.pool.transition(bench.replicas[0], ReplicaEvent.LOST, "")
    bench.pool.transition(bench.replicas[0], ReplicaEvent.JOINED, "")
    for text in "ab":
        bench.add_alone(text)

    assert [["a"]] == bench.run_batches()


def test_few_slices_go_alone_at_a_time_over_the_lane() -> None:
    bench = Bench(replicas=4, window=8)
    for index in range(20):
        bench.add_alone(f"text {index}")

    assert ALONE_MAX == len(bench.run())


def test_a_tenant_whose_inputs_break_servers_pauses_and_blocks_nobody() -> None:
    bench = Bench(window=4)
    bench.isolated.suspects.add_crash("breaker", 0.0)
    bench.isolated.suspects.add_crash("breaker", 0.0)
    bench.add_alone("a", tenant="breaker")
    bench.add_alone("b", tenant="fine")

    assert [["b"]] == bench.run_batches()
    bench.now_s = 2.0
    assert [["a"]] == bench.run_batches()


def test_halves_of_a_split_batch_stay_apart() -> None:
    bench = Bench()
    first, second = object(), object()
    for text, half in (("a", first), ("b", first), ("c", second), ("d", None)):
        bench.add(text).half = half

    assert [("r0", ["a", "b"])] == bench.run()


def test_last_slot_is_left_to_another_active_tenant() -> None:
    bench = Bench(window=3)
    bench.bounds = Bounds(inputs=1)
    bench.activity.mark_active("victim", 0.0)
    for text in "abcd":
        bench.add(text, "flood")

    assert [("r0", ["a"]), ("r0", ["b"])] == bench.run()
    bench.add("mine", "victim")
    assert [("r0", ["mine"])] == bench.run()


@pytest.mark.parametrize("size", [2, 1])
def test_a_tenants_first_picture_passes_those_that_fill_a_window(size: int) -> None:
    bench = Bench(window=4, kind="media")
    bench.bounds = Bounds(inputs=1)

    def add(name: str, tenant: str, tokens: int) -> None:
        bench.activity.mark_active(tenant, bench.now_s)
        piece = Slice(0, EmbedParts(((name,),)), 1, tokens)
        Ticket(piece, Owner(tenant, len(bench.queue)), 30, 0).enqueue(bench.queue, 0)

    for name in "abcdef":
        add(name, "flood", 1)
    assert [("r0", [name]) for name in "abcd"] == bench.run()
    # The window shrinks while the pictures that it allowed are still in flight.
    bench.replicas[0].window = Window(size)
    add("mine", "victim", 90_000)
    add("next", "victim", 90_000)
    add("other", "third", 90_000)
    # Fewer tenants than slots may have one in flight, and each of them only its first.
    assert ([("r0", ["mine"])] if size == 2 else []) == bench.run()
    bench.replicas[0].window = Window(3)
    sent = [("r0", ["other"])] if size == 2 else [("r0", ["mine"]), ("r0", ["other"])]
    assert sent == sorted(bench.run(), key=str)


def test_last_slot_is_used_once_no_other_tenant_is_active() -> None:
    bench = Bench(window=2)
    bench.bounds = Bounds(inputs=1)
    bench.activity.mark_active("victim", 0.0)
    for text in "abc":
        bench.add(text, "flood")
    bench.run()
    bench.now_s = ACTIVE_S + 0.1

    assert [("r0", ["b"])] == bench.run()


def test_call_is_not_sent_to_a_replica_that_failed_it() -> None:
    bench = Bench(replicas=2)
    failed = bench.add("again")
    failed.avoid(bench.replicas[0])

    assert [("r1", ["again"])] == bench.run()


def test_call_that_must_wait_for_a_replica_does_not_block_its_tenants_others() -> None:
    bench = Bench(replicas=2)
    bench.replicas[1].add_batch(BatchLoad(1, 1, ("acme",)), 0.0)
    waiting = [bench.add(f"again {index}") for index in range(LOOK_AHEAD)]
    for ticket in waiting:
        ticket.avoid(bench.replicas[0])
    bench.add("next")

    assert [("r0", ["next"])] == bench.run()
    # In the same order as before.
    assert waiting == list(bench.queue.items())


def error_of(bench: Bench) -> Exception:
    """Return the rejection of the only call."""
    [error] = bench.run()
    assert isinstance(error, Exception)
    return error


def test_call_fails_with_its_own_error_once_every_usable_replica_failed_it() -> None:
    bench = Bench()
    ticket = bench.add("a")
    ticket.fail(ReplicaFailed("it broke"), bench.replicas[0])

    assert ticket.last_error is error_of(bench)
    assert ticket.is_done
    assert 0 == len(bench.queue)


@pytest.mark.parametrize(
    ("holds", "state", "is_foreign", "fails"),
    [
        (False, State.DOWN, False, True),
        (False, State.JOINING, False, False),
        (True, State.DOWN, False, False),
        # A replica that is kept out because of its vectors will not return by itself.
        (True, State.DOWN, True, True),
    ],
)
def test_call_fails_without_replica_unless_one_is_expected(
    state: State, *, holds: bool, is_foreign: bool, fails: bool
) -> None:
    bench = Bench(holds=holds)
    replica = bench.replicas[0]
    if state is State.DOWN:
        bench.pool.transition(replica, ReplicaEvent.LOST, "")
        replica.record_space(None, is_foreign=is_foreign)
    else:
        bench.pool.add(Replica("later", replica.backend))
        bench.pool.remove(replica)
    bench.add("a")

    if fails:
        assert isinstance(error_of(bench), NoReplica)
    else:
        assert [] == bench.run()
        assert 1 == len(bench.queue)


def test_call_without_waiters_leaves_the_queue() -> None:
    bench = Bench()
    bench.add("gone").settle(ReplicaFailed("it broke"))
    bench.add("a")

    assert [("r0", ["a"])] == bench.run()
    assert 0 == len(bench.queue)


def test_error_of_another_attempt_is_kept_for_the_caller() -> None:
    bench = Bench()
    error: BackendError = ReplicaFailed("it broke")
    bench.add("a").fail(error)
    bench.pool.transition(bench.replicas[0], ReplicaEvent.LOST, "")

    assert error is error_of(bench)
