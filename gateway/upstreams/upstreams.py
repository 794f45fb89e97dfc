"""All upstreams of one worker: created, maintained, and closed when no call uses them.

Rule: a reload leaves an unchanged upstream untouched, with the health and windows of its replicas. If only
the list of replicas changed, or which of them are drained, the upstream follows in place. Any other change
creates a new upstream, which takes over while the old one finishes its calls.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

import msgspec

from gateway.config.schema import UpstreamSettings
from gateway.events import (
    ConnectionFaulted,
    DescriptionRejected,
    Event,
    ModelStateReported,
    Observe,
    ReplicaChanged,
    SpaceChecked,
)
from gateway.routing.discovery import drain_replica
from gateway.routing.health import ReplicaEvent
from gateway.routing.replica import Replica
from gateway.upstreams.factory import (
    Dependencies,
    background_tasks,
    create_replica,
    create_upstream,
    replica_places,
    watch_replica,
)
from gateway.upstreams.upstream import Upstream

DRAIN_POLL_S = 0.1

# Events of an upstream that name its replicas, or its model.
SCOPED_EVENTS = (ReplicaChanged, ConnectionFaulted, DescriptionRejected, ModelStateReported, SpaceChecked)

logger = logging.getLogger("gateway")


class ScopedObserver:
    """Observer of one upstream's events.

    After retirement it drops events about replicas: a different upstream may use the same replica names.
    """

    def __init__(self, observe: Observe) -> None:
        self._observe = observe
        self._is_retired = False

    def retire(self) -> None:
        """Forward no events about replicas any more."""
        self._is_retired = True

    def observe(self, event: Event) -> None:
        """Forward one event."""
        if not (self._is_retired and isinstance(event, SCOPED_EVENTS)):
            self._observe(event)


class RunningUpstream:
    """One upstream with its background tasks.

    engines: addresses of its model in the gateway's own engines, none for a remote upstream. observer: the
    receiver of `dependencies.observe`.
    """

    def __init__(
        self,
        upstream: Upstream,
        engines: Mapping[str, str],
        dependencies: Dependencies,
        observer: ScopedObserver,
    ) -> None:
        self.upstream = upstream
        self.engines = engines
        self.observer = observer
        self._dependencies = dependencies
        self._watchers: dict[Replica, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start to contact the replicas."""
        for coroutine in background_tasks(self.upstream, self._dependencies):
            self._run(coroutine)
        for replica in self.upstream.pool.replicas:
            self._watch(replica)

    def update_replicas(self, settings: UpstreamSettings) -> None:
        """Add, remove and drain replicas as `settings` say; the rest keep their state."""
        before, places = self.upstream.settings.replicas, replica_places(settings, self.engines)
        names = {place.name for place in places}
        self.upstream.follow(settings)
        # Add before removing: calls wait for a replica that joins, and fail if there is none at all.
        for place in places:
            if place.address not in (*before, *self.engines.values()):
                opener = self._dependencies.opener(self.upstream.name)
                replica = create_replica(settings, place, opener)
                self.upstream.pool.add(replica)
                self._watch(replica)
        for replica in [replica for replica in self._watchers if replica.name not in names]:
            self._watchers.pop(replica).cancel()
            reason = "it is no longer in the configuration"
            self.upstream.pool.transition(replica, ReplicaEvent.REMOVED, reason)
            self._run(drain_replica(self.upstream.pool, replica))
        self.upstream.pool.apply_drains(settings.drained)

    async def drain(self) -> None:
        """Close the upstream once no call uses it, which its deadlines guarantee."""
        while not self.upstream.idle:  # noqa: ASYNC110 - calls finish in many ways, and none sets an event
            await asyncio.sleep(DRAIN_POLL_S)
        await self.aclose()
        logger.info("upstream %s: the replaced or removed upstream is closed", self.upstream.name)

    async def aclose(self) -> None:
        """Cancel the background tasks and close the replicas' connections."""
        tasks = [*self._watchers.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self.upstream.pool.replicas:
            await replica.backend.aclose()

    def _watch(self, replica: Replica) -> None:
        task = asyncio.create_task(watch_replica(self._dependencies.observe, self.upstream, replica))
        task.add_done_callback(log_failure)
        self._watchers[replica] = task

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(log_failure)


class Upstreams:
    """Upstreams by name. It contacts no server before `start`."""

    def __init__(self, dependencies: Dependencies) -> None:
        self._dependencies = dependencies
        self._running: dict[str, RunningUpstream] = {}
        self._retiring: dict[asyncio.Task[None], list[RunningUpstream]] = {}
        self._started = False

    @property
    def by_name(self) -> dict[str, Upstream]:
        """Upstreams of the last config that was applied, by name."""
        return {name: running.upstream for name, running in self._running.items()}

    def start(self) -> None:
        """Start to contact replicas, of these upstreams and of all that a reload creates."""
        self._started = True
        for running in self._running.values():
            running.start()

    def apply(
        self, settings_by_name: Mapping[str, UpstreamSettings], engines: Mapping[str, Mapping[str, str]]
    ) -> list[RunningUpstream]:
        """Switch to the upstreams of a config; return those that are no longer part of it, to be retired.

        engines: upstream name → addresses of its model in engines. Raises: OSError if a file cannot be read;
        then nothing has changed.
        """
        before = self._running
        after = {}
        for name, settings in settings_by_name.items():
            own = engines.get(name, {})
            after[name] = self._unchanged(name, settings, own) or self._create(name, settings, own)
        self._running = after
        for name, running in after.items():
            if running is not before.get(name):
                if self._started:
                    running.start()
            elif running.upstream.settings != settings_by_name[name]:
                running.update_replicas(settings_by_name[name])
        removed = [running for name, running in before.items() if after.get(name) is not running]
        for running in removed:
            running.observer.retire()
        return removed

    def retire(self, removed: Iterable[RunningUpstream]) -> "asyncio.Task[None]":
        """Return a task that completes when these upstreams have finished their calls and are closed."""
        retiring = list(removed)
        task = asyncio.create_task(_drain_all(retiring))
        self._retiring[task] = retiring
        task.add_done_callback(log_failure)
        task.add_done_callback(self._retiring.pop)
        return task

    async def aclose(self) -> None:
        """Close all upstreams, with or without calls."""
        retiring = [running for group in self._retiring.values() for running in group]
        tasks = list(self._retiring)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for running in [*self._running.values(), *retiring]:
            await running.aclose()

    def _unchanged(
        self, name: str, settings: UpstreamSettings, engines: Mapping[str, str]
    ) -> RunningUpstream | None:
        running = self._running.get(name)
        if running is None or running.engines != engines:
            return None
        return running if is_same_server(running.upstream.settings, settings) else None

    def _create(self, name: str, settings: UpstreamSettings, engines: Mapping[str, str]) -> RunningUpstream:
        observer = ScopedObserver(self._dependencies.observe)
        dependencies = msgspec.structs.replace(self._dependencies, observe=observer.observe)
        upstream = create_upstream(name, settings, engines, dependencies)
        return RunningUpstream(upstream, engines, dependencies, observer)


def is_same_server(old: UpstreamSettings, new: UpstreamSettings) -> bool:
    """Return whether the settings are equal, or differ only in the listed replicas and the drained ones."""
    replicas = old.replicas if old.discover is None else new.replicas
    return old == msgspec.structs.replace(new, replicas=replicas, drained=old.drained)


async def _drain_all(retiring: Iterable[RunningUpstream]) -> None:
    await asyncio.gather(*(running.drain() for running in retiring))


def log_failure(task: "asyncio.Task[None]") -> None:
    """Log why a background task failed, unless it was cancelled or is done: a fault of the gateway."""
    if not task.cancelled() and (error := task.exception()):
        logger.error("a background task has ended unexpectedly", exc_info=error)
