"""All instances of this host, what is kept of them, and the requests of operators about them.

Rule: the parent process runs them. A change is written to the file before it takes effect. Requests about one
instance are carried out one after the other.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from gateway.config.schema import Config
from gateway.declared.composition import with_instances
from gateway.declared.host import (
    ENGINE,
    Act,
    Create,
    CreateInstance,
    HostResult,
    InstanceCommand,
    InstanceInfo,
    InstanceRecord,
    ListInstances,
    ReadLog,
    Refused,
    invalid,
    unknown,
)
from gateway.declared.instances import (
    InstanceFile,
    Served,
    check_create,
    engine_settings,
    secret_sources,
    served_by,
)
from gateway.processes.instance import CommandLaunch, EngineLaunch, Host, Instance, Launch, is_free

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


def create_launch(record: InstanceRecord, served: Served, config: Config, host: Host) -> Launch:
    """Return the way to run an instance's process."""
    if record.kind == ENGINE:
        upstream = engine_settings(served.upstream, config.upstreams.get(record.upstream))
        return EngineLaunch(record, upstream, config.engine, host)
    assert config.manager is not None
    return CommandLaunch(record, served.model, config.manager.commands[record.kind], host)


class InstancePool:
    """Instances by name, in order of creation."""

    def __init__(
        self,
        file: InstanceFile,
        host: Host,
        view: GatewayView,
        create_launch: Callable[[InstanceRecord, Served, Config, Host], Launch] = create_launch,
    ) -> None:
        self._file = file
        self._create_launch = create_launch
        self._host = host
        self._view = view
        self._instances: dict[str, Instance] = {}
        self._joined: frozenset[str] = frozenset()
        self._publishing: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()
        self._created = self._deleted = 0
        self._is_stopping = False

    async def start(self, records: tuple[InstanceRecord, ...]) -> None:
        """Start the stored instances that ran. One whose settings are not valid any more has failed."""
        for record in records:
            instance = self._instances[record.name] = Instance(record, self._on_change)
            if record.started:
                try:
                    await self._launch(instance)
                except Refused as refused:
                    logger.warning("instance %s: %s", record.name, refused)
                    instance.fail(str(refused))

    async def stop_all(self) -> None:
        """Stop every instance, in parallel. They are started again with the gateway."""
        self._is_stopping = True
        await asyncio.gather(*(instance.stop() for instance in self._instances.values()))
        for task in self._publishing:
            task.cancel()
        await asyncio.gather(*self._publishing, return_exceptions=True)

    @property
    def records(self) -> tuple[InstanceRecord, ...]:
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

    async def run(self, command: InstanceCommand) -> HostResult:
        """Carry out a request and return its result."""
        try:
            return await self._run(command)
        except Refused as refused:
            return refused.result

    async def _run(self, command: InstanceCommand) -> HostResult:
        match command:
            case ListInstances():
                return HostResult(instances=self.infos, created=self._created, deleted=self._deleted)
            case ReadLog(name, start, end):
                return HostResult(log=self.find(name).log.slice(start, end))
            case Act(name, "get"):
                return HostResult(instances=(self.info(self.find(name)),))
            case _ if self._is_stopping:
                raise Refused("UNAVAILABLE", "the gateway is stopping")
            case Create(settings):
                return HostResult(instances=(self.info(await self._create(settings)),))
            case Act(name, action):
                instance = self.find(name)
                async with instance.lock:
                    # It may have been deleted meanwhile, and another created under its name.
                    if self.find(name) is not instance:
                        raise unknown(name)
                    await self._act(instance, action)
                    return HostResult(instances=(self.info(instance),))

    async def _create(self, settings: CreateInstance) -> Instance:
        """Create and start an instance. Raises: Refused."""
        config = self._view.config()
        kind = settings.kind or (config.manager.kind if config.manager else ENGINE)
        check_create(settings, kind, config, self.records)
        for port in filter(None, (settings.port, settings.prometheus_port)):
            if not is_free(port):
                raise invalid(f"Port {port} already in use by another process")
        await serve(config, settings, kind)
        # Others may have been created while files were read.
        check_create(settings, kind, config, self.records)
        instance = await self._add(settings, kind)
        try:
            await self._launch(instance)
        finally:
            instance.lock.release()
        self._created += 1
        return instance

    async def _act(self, instance: Instance, action: str) -> None:
        """Start, stop, restart or delete an instance. Raises: Refused."""
        if action == "start" and instance.status not in ("stopped", "failed"):
            message = f"Instance '{instance.record.name}' is already {instance.status}"
            raise Refused("ALREADY_RUNNING", message)
        await self._keep(instance, started=action in ("start", "restart"))
        if action == "start":
            # A process that has failed may still be exiting.
            await instance.stop()
        else:
            await self._end(instance)
        if action == "restart":
            instance.count_restart()
        if action == "delete":
            await self._remove(instance)
            self._deleted += 1
        elif action != "stop":
            await self._launch(instance)

    async def _end(self, instance: Instance) -> None:
        """Let calls in flight finish, and stop the process."""
        if instance.status == "stopped":
            return
        was_joined = instance.joined is not None
        instance.leave()
        if was_joined:
            await self._view.publish()
        await instance.stop()

    async def _add(self, settings: CreateInstance, kind: str) -> Instance:
        """Store a new instance, which is not started. Raises: Refused, with nothing changed.

        The caller holds its lock, and releases it once it is started: requests know it from now on.
        """
        instance = Instance(InstanceRecord(settings, kind, time.time()), self._on_change)
        await instance.lock.acquire()
        self._instances[settings.name] = instance
        try:
            await self._write()
        except Refused:
            del self._instances[settings.name]
            raise
        return instance

    async def _remove(self, instance: Instance) -> None:
        """Remove an instance that is stopped. Raises: Refused, if it returns with the next start."""
        del self._instances[instance.record.name]
        self._on_change()
        await self._write()

    async def _keep(self, instance: Instance, *, started: bool) -> None:
        """Store whether an instance is to run. Raises: Refused, with nothing changed."""
        was_started = instance.record.started
        instance.set_started(started=started)
        try:
            await self._write()
        except Refused:
            instance.set_started(started=was_started)
            raise

    async def _launch(self, instance: Instance) -> None:
        """Start the process of an instance. Raises: Refused, if its settings have become invalid."""
        record, config = instance.record, self._view.config()
        served = await serve(config, record.settings, record.kind)
        timeout_s: float | None = record.settings.startup_timeout_secs
        if timeout_s is None and config.manager is not None and record.kind != ENGINE:
            timeout_s = config.manager.commands[record.kind].startup_timeout_s
        launch = self._create_launch(record, served, config, self._host)
        instance.start(launch, served.upstream, timeout_s or ENGINE_STARTUP_TIMEOUT_S)

    async def _write(self) -> None:
        """Write the file. Raises: Refused."""
        async with self._writing:
            try:
                await asyncio.to_thread(self._file.write, self.records)
            except OSError as error:
                message = f"the instances cannot be stored in `state_dir`: {error.strerror}"
                raise Refused("UNAVAILABLE", message) from error

    def _on_change(self) -> None:
        """Send the instances to the workers, and serve those that have joined or left."""
        if self._is_stopping:
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
