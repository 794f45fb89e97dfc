"""The life of a replica as a table: state × event → state. Pure.

Rule: everything that changes a replica's state is a row here; what is absent changes nothing.
"""

from enum import StrEnum

from backends.errors import BackendError, Lost, Unavailable


class State(StrEnum):
    """Whether a replica is given work. joining: it has not answered yet."""

    JOINING = "joining"
    UP = "up"
    DOWN = "down"


class Happened(StrEnum):
    """What was learnt of a replica, from a probe or from an attempt."""

    JOINED = "joined"
    JOIN_FAILED = "join_failed"
    UNREACHED = "unreached"
    LOST = "lost"


TRANSITIONS: dict[tuple[State, Happened], State] = {
    (State.JOINING, Happened.JOINED): State.UP,
    (State.JOINING, Happened.JOIN_FAILED): State.DOWN,
    (State.DOWN, Happened.JOINED): State.UP,
    (State.UP, Happened.JOIN_FAILED): State.DOWN,
    (State.UP, Happened.UNREACHED): State.DOWN,
    (State.UP, Happened.LOST): State.DOWN,
}


def after(state: State, happened: Happened) -> State:
    """The state that follows."""
    return TRANSITIONS.get((state, happened), state)


def lesson(error: BackendError) -> Happened | None:
    """What an attempt's error says about the replica itself; None if nothing."""
    if isinstance(error, Unavailable):
        return Happened.UNREACHED
    return Happened.LOST if isinstance(error, Lost) else None
