"""What has changed of late, and since when replicas are as they are; for whoever looks at this gateway.

One worker's view: each has its own replicas' health. Bounded, and without inputs, as events are.
"""

import time
from collections import deque
from collections.abc import Callable

import msgspec

from gateway.events import (
    AttemptFinished,
    Event,
    ProcessRestarted,
    ReplicaChanged,
    SpaceChecked,
    StoreChanged,
)
from gateway.telemetry.snapshot import Change

CHANGES_MAX = 50
# How much of a running mean of latencies the newest one is.
NEWEST_SHARE = 0.1


class Standing(msgspec.Struct):
    """What is known of one replica. since_s: seconds since 1970."""

    since_s: float | None = None
    reason: str = ""
    latency_s: float | None = None


class Recent:
    """Observes events. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._changes: deque[Change] = deque(maxlen=CHANGES_MAX)
        self._standings: dict[tuple[str, str], Standing] = {}

    def observe(self, event: Event) -> None:
        """Take note of one event."""
        match event:
            case AttemptFinished(outcome="ok"):
                self._took(event)
            case ReplicaChanged():
                self._replica_changed(event)
            case StoreChanged():
                self._note("quota store", "away" if event.away else "back", event.reason)
            case SpaceChecked(changed=True, outcome=outcome) if outcome != "fits":
                self._note(_name(event), f"vectors: {outcome}", event.reason)
            case ProcessRestarted(times=times) if times:
                what = "hung, started again" if event.reason == "hung" else "ended, started again"
                self._changes.append(Change(event.at_s, event.process, what, event.how))

    def changes(self) -> tuple[Change, ...]:
        """The newest first."""
        return tuple(reversed(self._changes))

    def of(self, upstream: str, replica: str) -> Standing:
        """What is known of a replica; nothing of one that never changed, or is gone."""
        return self._standings.get((upstream, replica)) or Standing()

    def forget(self, upstream: str) -> None:
        """It is no more, or another of its name has replicas of its own; what has happened stays told."""
        self._standings = {key: one for key, one in self._standings.items() if key[0] != upstream}

    def _replica_changed(self, event: ReplicaChanged) -> None:
        self._note(_name(event), event.state, event.reason)
        if event.state == "gone":
            self._standings.pop((event.upstream, event.replica), None)
            return
        standing = self._standings.setdefault((event.upstream, event.replica), Standing())
        standing.since_s, standing.reason = self._clock(), event.reason

    def _note(self, subject: str, what: str, reason: str) -> None:
        self._changes.append(Change(self._clock(), subject, what, reason))

    def _took(self, event: AttemptFinished) -> None:
        standing = self._standings.get((event.upstream, event.replica))
        if standing is None:
            # Gone before its last attempt ended: it must not come back here, for nobody would remove it.
            return
        before_s = event.duration_s if standing.latency_s is None else standing.latency_s
        standing.latency_s = before_s + (event.duration_s - before_s) * NEWEST_SHARE


def _name(event: ReplicaChanged | SpaceChecked) -> str:
    if event.upstream == event.replica:
        return event.upstream
    return f"{event.upstream} {event.replica}"
