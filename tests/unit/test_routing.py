"""Routing: ranking and choice of replicas, their states, and the meaning of model names."""

from collections import Counter
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.contract import Backend, Capabilities, Operation, ReplicaSpec, Truncate
from backends.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    InvalidWork,
    ModelUnavailable,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
)
from backends.tei import open_replica
from gateway.config import schema as config
from gateway.errors import InvalidInput, ModelForbidden, ModelNotFound, OperationUnsupported
from gateway.events import Event, ReplicaChanged
from gateway.routing.health import ReplicaEvent, State, event_of, next_state
from gateway.routing.policies import Policy, rank_replicas
from gateway.routing.pool import Pool
from gateway.routing.replica import BatchLoad, Replica
from gateway.routing.routes import Route, Routes
from gateway.routing.window import Window
from gateway.tenants.keyring import Tenant

POLICIES: tuple[Policy, ...] = get_args(Policy)
LOADS = st.lists(st.integers(0, 50), min_size=1, max_size=8)

many = settings(max_examples=200, deadline=None)


@many
@given(st.sampled_from(POLICIES), LOADS, st.integers(0, 10**6), st.integers())
def test_every_policy_ranks_every_replica_once(
    policy: Policy, loads: list[int], turn: int, seed: int
) -> None:
    assert list(range(len(loads))) == sorted(rank_replicas(policy, loads, turn, Random(seed)))


@pytest.mark.parametrize("policy", POLICIES)
def test_ranking_of_no_replicas_is_empty(policy: Policy) -> None:
    assert [] == rank_replicas(policy, [], 3, Random(0))


@pytest.mark.parametrize("policy", ["round_robin", "least_tokens"])
def test_equal_replicas_take_turns(policy: Policy) -> None:
    firsts = [rank_replicas(policy, [7, 7, 7], turn, Random(0))[0] for turn in range(6)]

    assert [0, 1, 2, 0, 1, 2] == firsts


def test_round_robin_ignores_loads() -> None:
    assert [1, 2, 0] == rank_replicas("round_robin", [0, 99, 5], 1, Random(0))


@many
@given(LOADS, st.integers(0, 100))
def test_least_tokens_ranks_by_load(loads: list[int], turn: int) -> None:
    order = rank_replicas("least_tokens", loads, turn, Random(0))

    assert sorted(loads) == [loads[index] for index in order]


@many
@given(LOADS, st.integers())
def test_two_choices_ranks_the_better_of_two_first(loads: list[int], seed: int) -> None:
    order = rank_replicas("two_choices", loads, 0, Random(seed))

    assert loads[order[0]] <= loads[order[min(1, len(order) - 1)]]


def test_two_choices_spreads_load_and_avoids_the_busiest() -> None:
    random = Random(1)
    equal = Counter(rank_replicas("two_choices", [1, 1, 1, 1], 0, random)[0] for _ in range(2000))
    uneven = Counter(rank_replicas("two_choices", [9, 1, 1, 1], 0, random)[0] for _ in range(2000))

    assert all(400 < count < 600 for count in equal.values())
    assert 0 == uneven[0]


@pytest.mark.parametrize(
    ("state", "event", "expected"),
    [
        (State.JOINING, ReplicaEvent.JOINED, State.UP),
        (State.JOINING, ReplicaEvent.JOIN_FAILED, State.DOWN),
        (State.JOINING, ReplicaEvent.UNREACHED, State.JOINING),
        (State.JOINING, ReplicaEvent.LOST, State.JOINING),
        (State.UP, ReplicaEvent.JOINED, State.UP),
        (State.UP, ReplicaEvent.JOIN_FAILED, State.DOWN),
        (State.UP, ReplicaEvent.UNREACHED, State.DOWN),
        (State.UP, ReplicaEvent.LOST, State.DOWN),
        (State.DOWN, ReplicaEvent.JOINED, State.PROBATION),
        (State.DOWN, ReplicaEvent.JOIN_FAILED, State.DOWN),
        (State.DOWN, ReplicaEvent.UNREACHED, State.DOWN),
        (State.DOWN, ReplicaEvent.LOST, State.DOWN),
        (State.DOWN, ReplicaEvent.PROVEN, State.DOWN),
        (State.UP, ReplicaEvent.FAILING, State.DOWN),
        (State.UP, ReplicaEvent.STALLED, State.DOWN),
        (State.JOINING, ReplicaEvent.FOREIGN, State.DOWN),
        (State.UP, ReplicaEvent.FOREIGN, State.DOWN),
        (State.PROBATION, ReplicaEvent.FOREIGN, State.DOWN),
        (State.PROBATION, ReplicaEvent.PROVEN, State.UP),
        (State.PROBATION, ReplicaEvent.FAILING, State.DOWN),
        (State.PROBATION, ReplicaEvent.STALLED, State.DOWN),
        (State.PROBATION, ReplicaEvent.JOINED, State.PROBATION),
    ],
)
def test_state_transitions_follow_the_table(state: State, event: ReplicaEvent, expected: State) -> None:
    assert expected is next_state(state, event)


@given(st.lists(st.sampled_from(ReplicaEvent), max_size=20))
@settings(max_examples=100, deadline=None)
def test_down_replica_is_up_only_after_joining_and_probation(history: list[ReplicaEvent]) -> None:
    state = State.JOINING
    for event in history:
        following = next_state(state, event)
        if following is State.UP:
            assert state is not State.DOWN
            assert state is not State.PROBATION or event is ReplicaEvent.PROVEN
        if following is State.PROBATION:
            assert state is State.PROBATION or event is ReplicaEvent.JOINED
        assert following is not State.JOINING or state is State.JOINING
        state = following


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ReplicaUnavailable("refused"), ReplicaEvent.UNREACHED),
        (ConnectionLost("gone"), ReplicaEvent.LOST),
        (ReplicaOverloaded("full"), None),
        (AttemptTimedOut("slow"), None),
        (InvalidWork("no"), None),
        (UnsupportedWork("no"), None),
        (ReplicaFailed("odd"), None),
        (ModelUnavailable("no weights"), None),
    ],
)
def test_first_error_ejects_only_an_unreachable_or_lost_replica(
    error: BackendError, expected: ReplicaEvent | None
) -> None:
    assert expected is event_of(error, 1, is_last=False)


class Watched:
    """A pool of replicas that are never contacted, with its events."""

    def __init__(self, count: int, policy: Policy = "least_tokens", window: int = 2) -> None:
        self.events: list[Event] = []
        backend: Backend = open_replica(ReplicaSpec("http://nowhere"))
        self.replicas = [Replica(f"r{index}", backend, Window(window)) for index in range(count)]
        self.pool = Pool("up", self.replicas, policy, self.events.append)

    def joined(self, **limits: int) -> "Watched":
        """Let every replica join."""
        for replica in self.replicas:
            capabilities = Capabilities(replica.name, frozenset(Operation), **limits)
            self.pool.transition(replica, ReplicaEvent.JOINED, "", capabilities)
        return self


@many
@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.sampled_from(State), st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=6),
)
def test_picked_replica_is_usable_and_has_room(policy: Policy, states: list[tuple[State, int, int]]) -> None:
    watched = Watched(len(states), policy)
    for replica, (state, batches, tokens) in zip(watched.replicas, states, strict=True):
        replica.state, replica.batches, replica.tokens = state, batches, tokens
    picked = watched.pool.pick(1, ())

    slots = {State.UP: 2, State.PROBATION: 1}
    candidates = [replica for replica in watched.replicas if replica.batches < slots.get(replica.state, 0)]
    assert (picked in candidates) if candidates else picked is None


def test_pick_avoids_replicas_that_failed_the_slice() -> None:
    watched = Watched(2).joined()

    assert watched.replicas[1] is watched.pool.pick(1, {watched.replicas[0]})
    assert watched.pool.pick(1, set(watched.replicas)) is None


def test_full_window_has_room_after_a_batch_ends() -> None:
    watched = Watched(1).joined()
    for _ in range(2):
        watched.replicas[0].add_batch(BatchLoad(4, 100, ["acme"]), 0)
    assert watched.pool.pick(1, ()) is None
    watched.replicas[0].remove_batch(BatchLoad(4, 100, ["acme"]))

    assert watched.replicas[0] is watched.pool.pick(1, ())


@pytest.mark.parametrize(
    ("in_flight", "more", "room"), [(0, 9, True), (3, 5, True), (4, 5, False), (8, 1, False)]
)
def test_permits_hold_but_a_batch_over_all_of_them_may_go_alone(
    in_flight: int, more: int, *, room: bool
) -> None:
    replica = Watched(1).joined(concurrent_inputs=8).replicas[0]
    replica.add_batch(BatchLoad(in_flight, 0, ["acme"]), 0)

    assert room == replica.has_room(more, slots=9)


def test_state_change_is_observed_and_reported_once() -> None:
    watched, states = Watched(1), []
    watched.pool.on_change = lambda: states.append(watched.replicas[0].state)
    for event in (ReplicaEvent.JOINED, ReplicaEvent.JOINED, ReplicaEvent.LOST, ReplicaEvent.UNREACHED):
        watched.pool.transition(watched.replicas[0], event, event.value)

    assert [
        ReplicaChanged("up", "r0", "up", "joined"),
        ReplicaChanged("up", "r0", "down", "lost"),
    ] == watched.events
    assert [State.UP, State.DOWN] == states


def test_capabilities_of_a_down_replica_still_count() -> None:
    watched = Watched(2)
    assert watched.pool.is_joining()
    assert watched.pool.capabilities() is None
    watched.joined()
    watched.pool.transition(watched.replicas[0], ReplicaEvent.LOST, "")

    capabilities = watched.pool.capabilities()
    assert "r0" == (capabilities.model_id if capabilities else None)
    assert [watched.replicas[1]] == watched.pool.usable()
    assert not watched.pool.is_joining()


EMBEDS = frozenset({Operation.EMBED, Operation.TOKENIZE})
RERANKS = frozenset({Operation.RERANK, Operation.TOKENIZE})
ANYONE = Tenant("anyone")
MODELS = {
    "bge": config.ModelSettings("embedder", truncate="left", deadline_s=7.5),
    "org/bge": config.ModelSettings("embedder"),
    "plain": config.ModelSettings("embedder", rerank=False),
    "cross": config.ModelSettings("reranker"),
    "new": config.ModelSettings("loading"),
}
OFFERED: dict[str, frozenset[Operation] | None] = {"embedder": EMBEDS, "reranker": RERANKS, "loading": None}


def routes(*names: str, embed: str | None = None, rerank: str | None = None) -> Routes:
    """Return routes of some models, or of all."""
    models = {name: MODELS[name] for name in names or MODELS}
    return Routes(models, config.Defaults(embed, rerank), OFFERED.__getitem__)


def test_route_has_the_models_options() -> None:
    expected = Route("bge", "embedder", Operation.EMBED, Truncate.LEFT, 7.5)

    assert expected == routes().resolve(ANYONE, "bge", Operation.EMBED)


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("org/bge", Operation.EMBED),
        ("bge", Operation.TOKENIZE),
        ("bge", Operation.RERANK),
        ("cross", Operation.RERANK),
        ("new", Operation.RERANK),
        ("new", Operation.EMBED),
    ],
)
def test_resolves_offered_and_still_unknown_operations(name: str, operation: Operation) -> None:
    assert (name, operation) == (
        (route := routes().resolve(ANYONE, name, operation)).model,
        route.operation,
    )


@pytest.mark.parametrize(("name", "operation"), [("plain", Operation.RERANK), ("cross", Operation.EMBED)])
def test_unsupported_operation_names_the_model(name: str, operation: Operation) -> None:
    with pytest.raises(OperationUnsupported, match=name) as caught:
        routes().resolve(ANYONE, name, operation)

    assert "model" == caught.value.param


@pytest.mark.parametrize("name", ["", "BGE", "bge/", "nobody"])
def test_unknown_model_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        routes(embed="bge").resolve(ANYONE, name, Operation.EMBED)
    with pytest.raises(ModelNotFound):
        routes().upstream_of(name)

    assert "model" == caught.value.param


def test_tenant_may_use_only_its_own_models() -> None:
    tenant = Tenant("acme", models=frozenset({"bge", "cross"}))

    assert ["bge", "cross"] == routes().names(tenant)
    assert list(MODELS) == routes().names(ANYONE)
    with pytest.raises(ModelForbidden, match="org/bge"):
        routes().resolve(tenant, "org/bge", Operation.EMBED)


def test_tenant_with_an_empty_list_may_use_no_model() -> None:
    tenant = Tenant("acme", models=frozenset())

    assert [] == routes().names(tenant)
    with pytest.raises(ModelForbidden):
        routes("bge").resolve(tenant, "bge", Operation.EMBED)


def test_forbidden_default_model_is_forbidden() -> None:
    tenant = Tenant("acme", models=frozenset({"cross"}))

    with pytest.raises(ModelForbidden):
        routes(embed="bge").resolve(tenant, None, Operation.EMBED)


def test_forbidden_takes_precedence_over_unsupported() -> None:
    with pytest.raises(ModelForbidden):
        routes().resolve(Tenant("acme", models=frozenset()), "cross", Operation.EMBED)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [(Operation.EMBED, "bge"), (Operation.TOKENIZE, "bge"), (Operation.RERANK, "cross")],
)
def test_request_without_model_uses_the_operations_default(operation: Operation, expected: str) -> None:
    route = routes(embed="bge", rerank="cross").resolve(ANYONE, None, operation)

    assert expected == route.model


@pytest.mark.parametrize(
    ("names", "operation", "expected"),
    [
        (["bge"], Operation.EMBED, "bge"),
        (["plain", "cross"], Operation.EMBED, "plain"),
        (["plain", "cross"], Operation.RERANK, "cross"),
        (["bge"], Operation.RERANK, "bge"),
        (["new"], Operation.RERANK, "new"),
    ],
)
def test_only_capable_model_is_the_default(names: list[str], operation: Operation, expected: str) -> None:
    assert expected == routes(*names).default_model(operation)


@pytest.mark.parametrize(
    ("names", "operation"),
    [
        (["bge", "org/bge"], Operation.EMBED),
        (["bge", "cross"], Operation.RERANK),
        (["bge", "new"], Operation.EMBED),
    ],
)
def test_several_capable_models_require_a_name(names: list[str], operation: Operation) -> None:
    with pytest.raises(InvalidInput) as caught:
        routes(*names).default_model(operation)

    assert "model" == caught.value.param
    assert f"`defaults.{operation}`" in caught.value.message


def test_no_capable_model_is_unsupported() -> None:
    with pytest.raises(OperationUnsupported, match="no model here does embed"):
        routes("cross").default_model(Operation.EMBED)


def test_configured_classifier_is_the_default() -> None:
    defaults = config.Defaults(embed="bge", rerank="cross", classify="new")
    all_routes = Routes(MODELS, defaults, OFFERED.__getitem__)

    assert ["bge", "cross", "new", "bge"] == [
        all_routes.default_model(operation)
        for operation in (Operation.EMBED, Operation.RERANK, Operation.CLASSIFY, Operation.DETOKENIZE)
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bge", {Operation.EMBED, Operation.RERANK, Operation.TOKENIZE}),
        ("plain", EMBEDS),
        ("cross", RERANKS),
        ("new", set(Operation)),
    ],
)
def test_model_lists_its_operations(name: str, expected: set[Operation]) -> None:
    assert expected == set(routes().operations(name))


def test_alias_has_the_upstream_of_its_model() -> None:
    assert "embedder" == routes().upstream_of("org/bge") == routes().upstream_of("bge")
