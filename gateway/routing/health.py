"""The life of a replica as a table: state × event → state. Pure.

Rule: everything that changes a replica's state is a row here; what is absent changes nothing.

joining ─joined─▶ up ─unreached, lost, failing, stalled, strayed─▶ down ─joined─▶ probation ─proven─▶ up
any ─vanished─▶ gone
"""

from enum import StrEnum

from backends.errors import AttemptTimedOut, BackendError, ConnectionLost, ReplicaFailed, ReplicaUnavailable

# Failures in a row, with no success between, after which a replica is given no more work.
FAILURES_MAX = 3
# Batches that a replica which came back must do well before it is trusted with more than one at once.
PROVEN_BY = 3


class State(StrEnum):
    """Whether a replica is given work. joining: it has not answered yet. probation: one batch at a time.

    gone: its name no longer leads to it; it ends what it is doing.
    """

    JOINING = "joining"
    UP = "up"
    PROBATION = "probation"
    DOWN = "down"
    GONE = "gone"


class ReplicaEvent(StrEnum):
    """What was learnt of a replica, from a probe or from its attempts.

    failing: several failures in a row. stalled: work in flight, and nothing comes back, a probe neither.
    strayed: its vectors are of another space than its upstream's.
    """

    JOINED = "joined"
    JOIN_FAILED = "join_failed"
    UNREACHED = "unreached"
    LOST = "lost"
    FAILING = "failing"
    STALLED = "stalled"
    STRAYED = "strayed"
    PROVEN = "proven"
    VANISHED = "vanished"


_BAD = (
    ReplicaEvent.JOIN_FAILED,
    ReplicaEvent.UNREACHED,
    ReplicaEvent.LOST,
    ReplicaEvent.FAILING,
    ReplicaEvent.STALLED,
    ReplicaEvent.STRAYED,
)

TRANSITIONS: dict[tuple[State, ReplicaEvent], State] = {
    (State.JOINING, ReplicaEvent.JOINED): State.UP,
    (State.JOINING, ReplicaEvent.JOIN_FAILED): State.DOWN,
    (State.JOINING, ReplicaEvent.STRAYED): State.DOWN,
    (State.DOWN, ReplicaEvent.JOINED): State.PROBATION,
    (State.PROBATION, ReplicaEvent.PROVEN): State.UP,
    **{(state, ReplicaEvent.VANISHED): State.GONE for state in State},
    **{(state, bad): State.DOWN for state in (State.UP, State.PROBATION) for bad in _BAD},
}
USABLE = frozenset({State.UP, State.PROBATION})


def after(state: State, happened: ReplicaEvent) -> State:
    """The state that follows."""
    return TRANSITIONS.get((state, happened), state)


def event_of(error: BackendError, failures: int, *, last: bool) -> ReplicaEvent | None:
    """What an attempt's error says about the replica itself; None if nothing.

    failures: how many in a row, this one included. last: no other replica is usable; one that at least
    answers is not given up then, for it may be the callers' doing.
    """
    if isinstance(error, ReplicaUnavailable):
        return ReplicaEvent.UNREACHED
    if isinstance(error, ConnectionLost):
        return ReplicaEvent.LOST
    if isinstance(error, ReplicaFailed | AttemptTimedOut) and failures >= FAILURES_MAX and not last:
        return ReplicaEvent.FAILING
    return None
