"""The engine processes of one gateway: which there are, which a config needs, which may go.

Torch upstreams that name the same `process` share one. One whose models or bounds change is another process
beside the old one, so that calls go on until it has loaded; nothing is stopped here but what the parent says.
"""

import asyncio
import signal
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count

from backends.torch import wire
from gateway.config.schema import Config, EngineSettings, UpstreamSettings
from gateway.processes.child import Child
from gateway.processes.engine_process import KILL_AFTER_S, Group, engine_child, model_boots
from gateway.processes.liveness import watch
from gateway.processes.restarts import Restarts

# Beside threads that compute and load, an engine's event loop may take its time.
WATCH_EVERY_S = 5.0
# What `process` is where nobody sets it: it needs no name in logs.
DEFAULT_PROCESS = UpstreamSettings(backend="torch").process


class Engine:
    """One process, running. told: why a model cannot be used, or None, as soon as that is known of each."""

    def __init__(self, group: Group, bounds: EngineSettings) -> None:
        self.group = group
        self._bounds = bounds
        loop = asyncio.get_running_loop()
        self.told: dict[str, asyncio.Future[str | None]] = {
            name: loop.create_future() for name in group.upstreams
        }
        self._child: Child | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def run(self, child: Child) -> None:
        """Start it, again when it dies, and when it answers nothing."""
        self._child = child
        watching = watch(child, partial(_answers, self.group.socket_path), WATCH_EVERY_S)
        keeping = (child.keep_running(), watching)
        self._tasks = [asyncio.create_task(one) for one in keeping]

    def serves(self, upstreams: Mapping[str, UpstreamSettings], bounds: EngineSettings) -> bool:
        """Whether these need no other process: their order says only who was loaded first."""
        return bounds == self._bounds and model_boots(upstreams) == model_boots(self.group.upstreams)

    def heard(self, said: wire.State) -> None:
        """What it tells of a model; one that is not in memory is told of once its files have been read."""
        told = self.told[said.model]
        if said.state != "loading" and not told.done():
            told.set_result(said.detail if said.state == "failed" else None)

    async def stop(self) -> None:
        """End it."""
        assert self._child is not None
        await self._child.stop(signal.SIGTERM, KILL_AFTER_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class EngineSet:
    """folder: makes the private one that sockets are in. said: told what each engine says.

    restarts: told of those that end unasked.
    """

    def __init__(
        self,
        folder: Callable[[], str],
        environment: Mapping[str, str],
        said: Callable[[wire.State], None],
        restarts: Restarts,
    ) -> None:
        self._new_folder = folder
        self._folder: str | None = None
        self._environment = environment
        self._said = said
        self._restarts = restarts
        self._numbers = count()
        # By what upstreams name as their process.
        self._running: dict[str, Engine] = {}
        # With those that are about to run, and those that still end what they have.
        self._alive: set[Engine] = set()

    @property
    def addresses(self) -> dict[str, str]:
        """Upstream → where its engine has its model."""
        return {name: at for one in self._running.values() for name, at in one.group.addresses.items()}

    def needed(self, config: Config) -> dict[str, Engine]:
        """The engines that a config needs: those that run and serve it, and others, started now."""
        return {
            process: self._serving(process, members, config.engine)
            or self._started(process, members, config.engine)
            for process, members in _members(config.upstreams).items()
        }

    def new_among(self, needed: Mapping[str, Engine]) -> list[Engine]:
        """Those that were started for it."""
        return [one for process, one in needed.items() if self._running.get(process) is not one]

    def replace(self, needed: dict[str, Engine]) -> list[Engine]:
        """From now on these are it; gives back those that run and are no part of it."""
        before, self._running = self._running, needed
        return [one for process, one in before.items() if needed.get(process) is not one]

    async def stop(self, engines: Iterable[Engine]) -> None:
        """End some at once: each has the whole of the patience."""
        going = self._alive.intersection(engines)
        self._alive -= going
        await asyncio.gather(*(one.stop() for one in going))

    async def stop_all(self) -> None:
        """End whatever runs."""
        await self.stop(list(self._alive))

    def _serving(
        self, process: str, members: Mapping[str, UpstreamSettings], bounds: EngineSettings
    ) -> Engine | None:
        one = self._running.get(process)
        return one if one is not None and one.serves(members, bounds) else None

    def _started(
        self, process: str, members: Mapping[str, UpstreamSettings], bounds: EngineSettings
    ) -> Engine:
        self._folder = self._folder or self._new_folder()
        name = "engine" if process == DEFAULT_PROCESS else f"engine {process}"
        engine = Engine(Group(name, f"{self._folder}/{next(self._numbers)}.sock", members), bounds)
        self._alive.add(engine)
        self._restarts.expect(name)
        heard, ended = partial(self._heard, engine), partial(self._restarts.ended, name)
        engine.run(engine_child(engine.group, bounds, self._environment, heard, ended))
        return engine

    def _heard(self, engine: Engine, said: wire.State) -> None:
        engine.heard(said)
        self._said(said)


def _members(upstreams: Mapping[str, UpstreamSettings]) -> dict[str, dict[str, UpstreamSettings]]:
    """Torch upstreams by the process that they name."""
    found: dict[str, dict[str, UpstreamSettings]] = {}
    for name, one in upstreams.items():
        if one.is_hosted:
            found.setdefault(one.process, {})[name] = one
    return found


async def loading_problems(engines: Iterable[Engine], timeout_s: float) -> dict[str, str]:
    """Wait until all have told of all their models; why those that cannot be used cannot, by upstream."""
    told = {name: wait for one in engines for name, wait in one.told.items()}
    if told:
        await asyncio.wait(told.values(), timeout=timeout_s)
    why = {name: wait.result() if wait.done() else _too_long(timeout_s) for name, wait in told.items()}
    return {name: one for name, one in why.items() if one is not None}


def _too_long(timeout_s: float) -> str:
    return f"its model has not loaded within {timeout_s:g} s"


async def _answers(socket_path: str) -> bool:
    """Whether an engine's event loop still takes a request."""
    try:
        async with asyncio.timeout(WATCH_EVERY_S):
            reader, writer = await asyncio.open_unix_connection(socket_path)
            writer.write(b"GET /info HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n\r\n")
            answered = bool(await reader.read(1))
            writer.close()
            return answered
    except (OSError, TimeoutError):
        return False
