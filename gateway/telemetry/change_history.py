"""Recent changes, and the state of each replica since its last change, for the status page.

This is the view of one worker: each worker judges the health of replicas itself. The history is bounded, and
contains no inputs, as events contain none.
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
    StoreLost,
    UpstreamJudged,
    tenants_and_keys,
)
from gateway.telemetry.snapshot import StatusChange

CHANGES_MAX = 50
# Types of events that are changes.
CHANGES = (ReplicaChanged, StoreChanged, StoreLost, SpaceChecked, UpstreamJudged, ProcessRestarted)
# Weight of the newest latency in the running mean.
NEWEST_SHARE = 0.1


class ReplicaHistory(msgspec.Struct):
    """State of one replica. since_s: of its last change, in seconds since 1970."""

    since_s: float | None = None
    reason: str = ""
    latency_s: float | None = None

    def change(self, at_s: float, reason: str) -> None:
        """Record a change."""
        self.since_s, self.reason = at_s, reason

    def add_latency(self, seconds: float) -> None:
        """Take a latency into the running mean."""
        before_s = seconds if self.latency_s is None else self.latency_s
        self.latency_s = before_s + (seconds - before_s) * NEWEST_SHARE


class ChangeHistory:
    """History of changes that events report. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._changes: deque[StatusChange] = deque(maxlen=CHANGES_MAX)
        self._replicas: dict[tuple[str, str], ReplicaHistory] = {}
        # Why the quota store is away, as this worker saw it; nothing while it answers.
        self.store_trouble = ""

    def observe(self, event: Event) -> None:
        """Record one event."""
        match event:
            case AttemptFinished():
                self.observe_attempt(event)
            case ReplicaChanged():
                self._replica_changed(event)
            case StoreChanged():
                self.store_trouble = event.reason if event.away else ""
                self._add("quota store", "away" if event.away else "back", event.reason)
            case StoreLost():
                still = "still lacks" if event.is_repeated else "lost"
                what = f"{still} {tenants_and_keys(event.tenants, event.keys)}"
                self._add("keys and tenants in Redis", what, event.reason)
            case SpaceChecked(changed=True, outcome=outcome) if outcome != "fits":
                self._add(_name(event), f"vectors: {outcome}", event.reason)
            case UpstreamJudged():
                self._add(f"{event.model} on {event.upstream}", event.standing, event.reason)
            case ProcessRestarted(times=times) if times:
                what = "hung, started again" if event.reason == "hung" else "ended, started again"
                self._changes.append(StatusChange(event.at_s, event.process, what, event.how))

    def changes(self) -> tuple[StatusChange, ...]:
        """Return the changes, the newest first."""
        return tuple(reversed(self._changes))

    def of(self, upstream: str, replica: str) -> ReplicaHistory:
        """Return the state of a replica; empty if it never changed or was removed."""
        return self._replicas.get((upstream, replica)) or ReplicaHistory()

    def forget(self, upstream: str) -> None:
        """Drop the replicas of a removed or replaced upstream; the changes stay listed."""
        self._replicas = {key: history for key, history in self._replicas.items() if key[0] != upstream}

    def _replica_changed(self, event: ReplicaChanged) -> None:
        self._add(_name(event), event.state, event.reason)
        if event.state == "gone":
            self._replicas.pop((event.upstream, event.replica), None)
            return
        history = self._replicas.setdefault((event.upstream, event.replica), ReplicaHistory())
        history.change(self._clock(), event.reason)

    def _add(self, subject: str, what: str, reason: str) -> None:
        self._changes.append(StatusChange(self._clock(), subject, what, reason))

    def observe_attempt(self, event: AttemptFinished) -> None:
        """Take the latency of a successful attempt into the mean of its replica.

        A replica that was removed before the end of its last attempt has no entry: nothing would remove it.
        """
        history = self._replicas.get((event.upstream, event.replica))
        if history is not None and event.outcome == "ok":
            history.add_latency(event.duration_s)


def _name(event: ReplicaChanged | SpaceChecked) -> str:
    if event.upstream == event.replica:
        return event.upstream
    return f"{event.upstream} {event.replica}"
