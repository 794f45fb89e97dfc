"""The engine processes of one gateway: those that run, and those that a config needs.

Upstreams that name the same `process` share one; those that list devices share one for each device. If its
models or bounds change, a second process starts next to the running one, so that requests continue until it
has loaded. Only the parent decides when one stops.
"""

import asyncio
import signal
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from typing import TypeAlias

import msgspec

from backends.torch import wire
from backends.torch.kind import ENGINE
from gateway.config.schema import Config, EngineSettings, UpstreamSettings
from gateway.processes.child import Child, Restarts, watch_liveness
from gateway.processes.engine_process import (
    CHECK_EVERY_S,
    KILL_AFTER_S,
    EngineGroup,
    model_boots,
    responds,
)

# The default of `process`, which logs leave out.
DEFAULT_PROCESS = UpstreamSettings(backend=ENGINE.name).process

# The `process` that upstreams name, and which of their `devices`.
ProcessKey: TypeAlias = tuple[str, str]


class EngineProcess:
    """One engine process. load_results: for each model, why it cannot be used, or None once it can."""

    def __init__(self, group: EngineGroup, bounds: EngineSettings) -> None:
        self.group = group
        self._bounds = bounds
        loop = asyncio.get_running_loop()
        self.load_results: dict[str, asyncio.Future[str | None]] = {
            name: loop.create_future() for name in group.upstreams
        }
        self._child: Child | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def run(self, child: Child) -> None:
        """Start the child, and restart it when it exits or stops responding."""
        self._child = child
        is_alive = partial(responds, self.group.socket_path)
        loops = (child.keep_running(), watch_liveness(child, is_alive, CHECK_EVERY_S))
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    def serves(self, upstreams: Mapping[str, UpstreamSettings], bounds: EngineSettings) -> bool:
        """Return True if this process has these models and bounds; the order of models does not matter."""
        return bounds == self._bounds and model_boots(upstreams) == model_boots(self.group.upstreams)

    def record_state(self, state: wire.State) -> None:
        """Record a model's state. A model that is not preloaded reports once its files have been read."""
        result = self.load_results[state.model]
        if state.state != "loading" and not result.done():
            result.set_result(state.detail if state.state == "failed" else None)

    async def stop(self) -> None:
        """Stop the process."""
        assert self._child is not None
        await self._child.stop(signal.SIGTERM, KILL_AFTER_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class EnginePool:
    """All engine processes of one gateway.

    new_folder: creates the private folder for their sockets. on_state: called with each report on a model.
    restarts: counts the processes that exit without having been stopped.
    """

    def __init__(
        self,
        new_folder: Callable[[], str],
        environment: Mapping[str, str],
        on_state: Callable[[wire.State], None],
        restarts: Restarts,
    ) -> None:
        self._new_folder = new_folder
        self._folder: str | None = None
        self._environment = environment
        self._on_state = on_state
        self._restarts = restarts
        self._numbers = count()
        self._running: dict[ProcessKey, EngineProcess] = {}
        # Includes engines that are about to run, and those that still finish requests.
        self._alive: set[EngineProcess] = set()

    @property
    def addresses(self) -> dict[str, dict[str, str]]:
        """Upstream name → addresses of its model, by `UpstreamSettings.devices`."""
        found: dict[str, dict[str, str]] = {}
        for (_, place), engine in self._running.items():
            for name, address in engine.group.addresses.items():
                found.setdefault(name, {})[place] = address
        return found

    def engines_for(self, config: Config) -> dict[ProcessKey, EngineProcess]:
        """Return the engines that a config needs, and start those that are not running."""
        needed: dict[ProcessKey, EngineProcess] = {}
        for key, members in _by_process(config.upstreams).items():
            engine = self._running.get(key)
            if engine is None or not engine.serves(members, config.engine):
                engine = self._start(key, members, config.engine)
            needed[key] = engine
        return needed

    def started_among(self, needed: Mapping[ProcessKey, EngineProcess]) -> list[EngineProcess]:
        """Return the needed engines that `engines_for` has started."""
        return [engine for key, engine in needed.items() if self._running.get(key) is not engine]

    def replace_running(self, needed: dict[ProcessKey, EngineProcess]) -> list[EngineProcess]:
        """Make these the running engines, and return the previous ones that are no longer needed."""
        before, self._running = self._running, needed
        return [engine for key, engine in before.items() if needed.get(key) is not engine]

    async def stop(self, engines: Iterable[EngineProcess]) -> None:
        """Stop some engines in parallel, so that each has the full time to exit."""
        stopping = self._alive.intersection(engines)
        self._alive -= stopping
        await asyncio.gather(*(engine.stop() for engine in stopping))

    async def stop_all(self) -> None:
        """Stop every engine."""
        await self.stop(list(self._alive))

    def _start(
        self, key: ProcessKey, members: Mapping[str, UpstreamSettings], bounds: EngineSettings
    ) -> EngineProcess:
        self._folder = self._folder or self._new_folder()
        name = " ".join(("engine", *(word for word in key if word not in {DEFAULT_PROCESS, ""})))
        group = EngineGroup(name, f"{self._folder}/{next(self._numbers)}.sock", members)
        engine = EngineProcess(group, bounds)
        self._alive.add(engine)
        self._restarts.register(name)

        def on_state(state: wire.State) -> None:
            engine.record_state(state)
            self._on_state(state)

        on_exit = partial(self._restarts.record, name)
        engine.run(group.child(bounds, self._environment, on_state, on_exit))
        return engine


def _by_process(upstreams: Mapping[str, UpstreamSettings]) -> dict[ProcessKey, dict[str, UpstreamSettings]]:
    """Return the upstreams of each process, each with the one device that it has there."""
    groups: dict[ProcessKey, dict[str, UpstreamSettings]] = {}
    for name, upstream in upstreams.items():
        if not upstream.is_local:
            continue
        for place, device in upstream.devices.items():
            own = msgspec.structs.replace(upstream, device=device)
            groups.setdefault((upstream.process, place), {})[name] = own
    return groups


async def load_problems(engines: Iterable[EngineProcess], timeout_s: float) -> dict[str, str]:
    """Wait for the report on every model, and return why some cannot be used, by upstream."""
    results = [(name, result) for engine in engines for name, result in engine.load_results.items()]
    if results:
        await asyncio.wait([result for _, result in results], timeout=timeout_s)
    reasons = [
        (name, result.result() if result.done() else f"its model has not loaded within {timeout_s:g} s")
        for name, result in results
    ]
    return {name: reason for name, reason in reasons if reason is not None}
