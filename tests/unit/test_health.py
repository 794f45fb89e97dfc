"""Health states of a replica and the errors that eject it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.contract.errors import (
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
from gateway.routing.health import ReplicaEvent, State, event_of, next_state


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
        (State.UP, ReplicaEvent.CHANGED, State.PROBATION),
        (State.PROBATION, ReplicaEvent.CHANGED, State.PROBATION),
        (State.DOWN, ReplicaEvent.CHANGED, State.DOWN),
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
            assert state is State.PROBATION or event in (ReplicaEvent.JOINED, ReplicaEvent.CHANGED)
        assert following is not State.JOINING or state is State.JOINING
        state = following


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ReplicaUnavailable("refused"), ReplicaEvent.UNREACHED),
        (ConnectionLost("reset"), ReplicaEvent.LOST),
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
