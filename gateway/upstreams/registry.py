"""All upstreams of one worker: opened, looked after, and closed once nothing goes by them any more.

Knows nothing of calls beyond their number. Rule: what a reload leaves as it was goes on untouched, with its
replicas' health and windows; replicas alone are exchanged within their upstream; any other change of an
upstream is a new one, which takes over while the old one ends what it has.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

import msgspec

from gateway.config.schema import Upstream as UpstreamConfig
from gateway.events import Event, ModelStateReported, Observe, ReplicaChanged, SpaceChecked
from gateway.routing.discovery import Resolve, let_go
from gateway.routing.health import ReplicaEvent
from gateway.routing.pool import Replica
from gateway.upstreams.factory import OpenReplica, background_tasks, open_upstream, replica_of, watching
from gateway.upstreams.upstream import Upstream
from gateway.vector_spaces.store import FingerprintStore

DRAIN_POLL_S = 0.1

logger = logging.getLogger("gateway")


class Dependencies(msgspec.Struct, frozen=True):
    """What upstreams are opened with. fingerprints: those that gateways share, if any."""

    open_replica: OpenReplica
    look_up: Resolve
    observe: Observe
    fingerprints: FingerprintStore | None = None


class ScopedObserver:
    """What is told of an upstream; of its replicas only until it is left: another may have their names."""

    def __init__(self, observe: Observe) -> None:
        self._observe = observe
        self.is_left = False

    def observe(self, event: Event) -> None:
        """Pass on one event."""
        if not (self.is_left and isinstance(event, ReplicaChanged | ModelStateReported | SpaceChecked)):
            self._observe(event)


class RunningUpstream:
    """One upstream, and the tasks that go on beside it.

    engine: where its engine has its model, if it has one. voice: what means observe with.
    """

    def __init__(
        self, upstream: Upstream, engine: str | None, means: Dependencies, voice: ScopedObserver
    ) -> None:
        self.upstream = upstream
        self.engine = engine
        self.voice = voice
        self._means = means
        self._watching: dict[Replica, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """From now on its replicas are spoken to."""
        for one in background_tasks(
            self.upstream, self._means.open_replica, self._means.look_up, self._means.observe
        ):
            self._beside(one)
        for replica in self.upstream.pool.replicas:
            self._watch(replica)

    def update_replicas(self, settings: UpstreamConfig) -> None:
        """Take these replicas; who was there before stays as it is."""
        before, after = self.upstream.settings.replicas, settings.replicas
        self.upstream.settings = settings
        # Who comes first: calls wait for somebody who joins, and not for nobody.
        for address in after:
            if address not in before:
                replica = replica_of(settings, address, address, None, self._means.open_replica)
                self.upstream.pool.add(replica)
                self._watch(replica)
        for replica in [one for one in self._watching if one.name not in after]:
            self._watching.pop(replica).cancel()
            self.upstream.pool.transition(
                replica, ReplicaEvent.VANISHED, "it is no longer in the configuration"
            )
            self._beside(let_go(self.upstream.pool, replica))

    async def drained(self) -> None:
        """Wait until no call goes by it, then close it. Each call ends, at its deadline at the latest."""
        while not self.upstream.idle:  # noqa: ASYNC110 - calls end in many ways, and tell nobody who waits here
            await asyncio.sleep(DRAIN_POLL_S)
        await self.aclose()
        logger.info("upstream %s: what was replaced or removed is closed", self.upstream.name)

    async def aclose(self) -> None:
        """End what goes on beside it, and its connections."""
        tasks = [*self._watching.values(), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self.upstream.pool.replicas:
            await replica.backend.aclose()

    def _watch(self, replica: Replica) -> None:
        task = asyncio.create_task(watching(self._means.observe, self.upstream, replica))
        task.add_done_callback(tell_why)
        self._watching[replica] = task

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        task.add_done_callback(tell_why)


class UpstreamRegistry:
    """Opens what a config names. Nothing is contacted before `start`."""

    def __init__(self, means: Dependencies) -> None:
        self._means = means
        self._at_work: dict[str, RunningUpstream] = {}
        self._leaving: dict[asyncio.Task[None], list[RunningUpstream]] = {}
        self._started = False

    @property
    def upstreams(self) -> dict[str, Upstream]:
        """By name, as the config named last has them."""
        return {name: one.upstream for name, one in self._at_work.items()}

    def start(self) -> None:
        """From now on replicas are spoken to, as soon as their upstream is opened."""
        self._started = True
        for one in self._at_work.values():
            one.start()

    def follow(
        self, wanted: Mapping[str, UpstreamConfig], engines: Mapping[str, str]
    ) -> list[RunningUpstream]:
        """Be what a config names; gives back what is no part of it any more, to be retired.

        engines: upstream → where its engine has its model. Raises: OSError where a file cannot be read; then
        nothing has changed.
        """
        before = self._at_work
        now = {
            name: self._kept(name, settings, engines.get(name)) or self._opened(name, settings, engines)
            for name, settings in wanted.items()
        }
        self._at_work = now
        for name, one in now.items():
            if one is not before.get(name):
                if self._started:
                    one.start()
            elif one.upstream.settings != wanted[name]:
                one.update_replicas(wanted[name])
        left = [one for name, one in before.items() if now.get(name) is not one]
        for one in left:
            one.voice.is_left = True
        return left

    def retire(self, left: Iterable[RunningUpstream]) -> "asyncio.Task[None]":
        """Let them end what they have, and close them; the task ends when all are closed."""
        leaving = list(left)
        task = asyncio.create_task(_all_drained(leaving))
        self._leaving[task] = leaving
        task.add_done_callback(tell_why)
        task.add_done_callback(self._leaving.pop)
        return task

    async def aclose(self) -> None:
        """Close all of them, whatever they hold."""
        leaving = [one for several in self._leaving.values() for one in several]
        tasks = list(self._leaving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in [*self._at_work.values(), *leaving]:
            await one.aclose()

    def _kept(self, name: str, settings: UpstreamConfig, engine: str | None) -> RunningUpstream | None:
        one = self._at_work.get(name)
        if one is None or one.engine != engine or not _same_but_replicas(one.upstream.settings, settings):
            return None
        return one

    def _opened(self, name: str, settings: UpstreamConfig, engines: Mapping[str, str]) -> RunningUpstream:
        voice = ScopedObserver(self._means.observe)
        means = msgspec.structs.replace(self._means, observe=voice.observe)
        upstream = open_upstream(
            name, settings, engines, means.open_replica, means.observe, means.fingerprints
        )
        return RunningUpstream(upstream, engines.get(name), means, voice)


def _same_but_replicas(old: UpstreamConfig, new: UpstreamConfig) -> bool:
    """Whether nothing differs, or nothing but which replicas are listed."""
    listed = old.discover is None
    return old == (msgspec.structs.replace(new, replicas=old.replicas) if listed else new)


async def _all_drained(leaving: Iterable[RunningUpstream]) -> None:
    await asyncio.gather(*(one.drained() for one in leaving))


def tell_why(ended: "asyncio.Task[None]") -> None:
    """What goes on beside the calls ends by being cancelled, or done; anything else is a fault of ours."""
    if not ended.cancelled() and (error := ended.exception()):
        logger.error("a task that should go on has ended", exc_info=error)
