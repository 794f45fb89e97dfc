"""All instances of this host, and what is kept of them.

Rule: the parent process runs them. A change is written to the file before it takes effect.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from gateway.config.schema import Config
from gateway.instances.overlay import with_instances
from gateway.instances.records import (
    ENGINE,
    CreateInstance,
    InstanceInfo,
    Problem,
    Record,
    Refused,
    unknown,
)
from gateway.instances.state_file import StateFile
from gateway.instances.validation import Served, engine_settings, secret_sources, served_by
from gateway.processes.instance import Instance
from gateway.processes.instance_launch import CommandLaunch, EngineLaunch, Host, Launch

# An engine that downloads its model may take long.
ENGINE_STARTUP_TIMEOUT_S = 550.0

logger = logging.getLogger("gateway")


class GatewayView(msgspec.Struct, frozen=True):
    """The rest of the gateway, as instances need it.

    config: returns the served configuration. publish: serves the instances that have joined, and returns once
    no call uses those that have left. broadcast: sends all instances to the workers. port: of the gateway.
    """

    config: Callable[[], Config]
    publish: Callable[[], Awaitable[None]]
    broadcast: Callable[[tuple[InstanceInfo, ...]], None]
    port: Callable[[], int]


class InstancePool:
    """Instances by name, in order of creation. is_stopping: the gateway is."""

    def __init__(self, file: StateFile, host: Host, view: GatewayView) -> None:
        self._file = file
        self._host = host
        self._view = view
        self._instances: dict[str, Instance] = {}
        self._joined: frozenset[str] = frozenset()
        self._publishing: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()
        self.is_stopping = False

    async def start(self, records: tuple[Record, ...]) -> None:
        """Start the stored instances that ran. One whose settings are not valid any more has failed."""
        for record in records:
            instance = self._instances[record.name] = Instance(record, self._on_change)
            if record.started:
                try:
                    await self.launch(instance)
                except Refused as refused:
                    logger.warning("instance %s: %s", record.name, refused)
                    instance.fail(str(refused))

    async def stop_all(self) -> None:
        """Stop every instance, in parallel. They are started again with the gateway."""
        self.is_stopping = True
        await asyncio.gather(*(instance.stop() for instance in self._instances.values()))
        for task in self._publishing:
            task.cancel()
        await asyncio.gather(*self._publishing, return_exceptions=True)

    @property
    def records(self) -> tuple[Record, ...]:
        """All instances as they are stored."""
        return tuple(instance.record for instance in self._instances.values())

    @property
    def infos(self) -> tuple[InstanceInfo, ...]:
        """All instances as operators see them."""
        return tuple(map(self.info, self._instances.values()))

    def info(self, instance: Instance) -> InstanceInfo:
        """Return an instance as operators see it."""
        return instance.info(self._view.port())

    def overlay(self, config: Config) -> Config:
        """Return a configuration with the instances that have joined."""
        joined = (instance.joined for instance in self._instances.values())
        return with_instances(config, tuple(filter(None, joined)))

    def find(self, name: str) -> Instance:
        """Return an instance. Raises: Refused."""
        instance = self._instances.get(name)
        if instance is None:
            raise unknown(name)
        return instance

    async def add(self, settings: CreateInstance, kind: str) -> Instance:
        """Store a new instance, which is not started. Raises: Refused, with nothing changed.

        The caller holds its lock, and releases it once it is started: requests know it from now on.
        """
        instance = Instance(Record(settings, kind, time.time()), self._on_change)
        await instance.lock.acquire()
        self._instances[settings.name] = instance
        try:
            await self._write()
        except Refused:
            del self._instances[settings.name]
            raise
        return instance

    async def remove(self, instance: Instance) -> None:
        """Remove an instance that is stopped. Raises: Refused, if it returns with the next start."""
        del self._instances[instance.record.name]
        self._on_change()
        await self._write()

    async def keep(self, instance: Instance, *, started: bool) -> None:
        """Store whether an instance is to run. Raises: Refused, with nothing changed."""
        before = instance.record
        instance.record = msgspec.structs.replace(before, started=started)
        try:
            await self._write()
        except Refused:
            instance.record = before
            raise

    async def launch(self, instance: Instance) -> None:
        """Start the process of an instance. Raises: Refused, if its settings have become invalid."""
        record, config = instance.record, self._view.config()
        served = await serve(config, record.settings, record.kind)
        timeout_s: float | None = record.settings.startup_timeout_secs
        launch: Launch
        if record.kind == ENGINE:
            upstream = engine_settings(served.upstream, config.upstreams.get(record.upstream))
            launch = EngineLaunch(record, upstream, config.engine, self._host)
            timeout_s = timeout_s or ENGINE_STARTUP_TIMEOUT_S
        else:
            assert config.manager is not None
            template = config.manager.commands[record.kind]
            launch = CommandLaunch(record, served.model, template, self._host)
            timeout_s = timeout_s or template.startup_timeout_s
        instance.start(launch, served.upstream, timeout_s)

    async def _write(self) -> None:
        """Write the file. Raises: Refused."""
        async with self._writing:
            try:
                await asyncio.to_thread(self._file.write, self.records)
            except OSError as error:
                message = f"the instances cannot be stored in `state_dir`: {error.strerror}"
                raise Refused(Problem("UNAVAILABLE", message)) from error

    def _on_change(self) -> None:
        """Send the instances to the workers, and serve those that have joined or left."""
        if self.is_stopping:
            return
        self._view.broadcast(self.infos)
        joined = frozenset(
            instance.joined.address for instance in self._instances.values() if instance.joined is not None
        )
        if joined != self._joined:
            self._joined = joined
            task = asyncio.create_task(self._publish())
            self._publishing.add(task)
            task.add_done_callback(self._publishing.discard)

    async def _publish(self) -> None:
        joined = [instance for instance in self._instances.values() if instance.joined is not None]
        await self._view.publish()
        for instance in joined:
            instance.confirm()


async def serve(config: Config, settings: CreateInstance, kind: str) -> Served:
    """Return the model and upstream of an instance. Raises: Refused."""
    commands = config.manager.commands if config.manager else {}
    # In a thread: a file system may be slow, and the parent has children to watch.
    return await asyncio.to_thread(served_by, settings, kind, commands, secret_sources(config))
