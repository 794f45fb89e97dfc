"""State machine of a replica as a table: state × event → state. Pure.

Rule: every change of a replica's state is a row here. A pair that is not in the table changes nothing.

joining ─joined─▶ up ─unreached, lost, failing, stalled, foreign─▶ down ─joined─▶ probation ─proven─▶ up
up ─changed─▶ probation · any ─removed─▶ gone
"""

from enum import StrEnum

from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    ReplicaFailed,
    ReplicaUnavailable,
)

# Failures in a row, without a success between them, that eject a replica.
FAILURES_MAX = 3
# Batches that a replica in probation must complete before it may have more than one at once.
PROBATION_BATCHES = 3


class State(StrEnum):
    """State of a replica, which decides whether it is given work.

    joining: it has not responded yet. probation: it is given one batch at a time. gone: its name no longer
    resolves to it, or the configuration no longer lists it; it completes its batches in flight.
    """

    JOINING = "joining"
    UP = "up"
    PROBATION = "probation"
    DOWN = "down"
    GONE = "gone"


class ReplicaEvent(StrEnum):
    """Observation about a replica, from a probe or from an attempt.

    failing: several failures in a row. stalled: it has work, returns nothing, and fails a probe too.
    foreign: its vectors belong to a different vector space than its upstream's. changed: it serves a
    different model, or offers different operations.
    """

    JOINED = "joined"
    JOIN_FAILED = "join_failed"
    UNREACHED = "unreached"
    LOST = "lost"
    FAILING = "failing"
    STALLED = "stalled"
    FOREIGN = "foreign"
    PROVEN = "proven"
    CHANGED = "changed"
    REMOVED = "removed"


_EJECTING = (
    ReplicaEvent.JOIN_FAILED,
    ReplicaEvent.UNREACHED,
    ReplicaEvent.LOST,
    ReplicaEvent.FAILING,
    ReplicaEvent.STALLED,
    ReplicaEvent.FOREIGN,
)

TRANSITIONS: dict[tuple[State, ReplicaEvent], State] = {
    (State.JOINING, ReplicaEvent.JOINED): State.UP,
    (State.JOINING, ReplicaEvent.JOIN_FAILED): State.DOWN,
    (State.JOINING, ReplicaEvent.FOREIGN): State.DOWN,
    (State.DOWN, ReplicaEvent.JOINED): State.PROBATION,
    (State.PROBATION, ReplicaEvent.PROVEN): State.UP,
    (State.UP, ReplicaEvent.CHANGED): State.PROBATION,
    **{(state, ReplicaEvent.REMOVED): State.GONE for state in State},
    **{(state, event): State.DOWN for state in (State.UP, State.PROBATION) for event in _EJECTING},
}
USABLE = frozenset({State.UP, State.PROBATION})


def next_state(state: State, event: ReplicaEvent) -> State:
    """Return the state that follows an event."""
    return TRANSITIONS.get((state, event), state)


def event_of(error: BackendError, failures: int, *, is_last: bool) -> ReplicaEvent | None:
    """Map an attempt's error to a replica event, or None if the replica is not at fault.

    failures: consecutive failures, including this one. is_last: no other replica is usable. The last replica
    that still responds is not ejected for consecutive failures, because the callers' inputs may cause them.
    """
    if isinstance(error, ReplicaUnavailable):
        return ReplicaEvent.UNREACHED
    if isinstance(error, ConnectionLost):
        return ReplicaEvent.LOST
    if isinstance(error, ReplicaFailed | AttemptTimedOut) and failures >= FAILURES_MAX and not is_last:
        return ReplicaEvent.FAILING
    return None
