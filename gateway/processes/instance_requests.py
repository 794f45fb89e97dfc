"""Requests of operators about the instances of this host, as the parent process carries them out."""

from collections.abc import Awaitable, Callable

from gateway.config.schema import Config
from gateway.instances.records import (
    ENGINE,
    Act,
    Command,
    Create,
    ListInstances,
    Problem,
    ReadLog,
    Refused,
    Result,
    invalid,
    unknown,
)
from gateway.instances.validation import check_create
from gateway.processes.instance import Instance
from gateway.processes.instance_launch import is_free
from gateway.processes.instance_pool import InstancePool, serve


class InstanceRequests:
    """Requests about instances. Those about one instance are carried out one after the other.

    config: returns the served configuration. publish: as of `GatewayView`.
    """

    def __init__(
        self, pool: InstancePool, config: Callable[[], Config], publish: Callable[[], Awaitable[None]]
    ) -> None:
        self._pool = pool
        self._config = config
        self._publish = publish
        self._actions = {
            "start": self._start,
            "stop": self._stop,
            "restart": self._restart,
            "delete": self._delete,
        }
        self._created = self._deleted = 0

    async def run(self, command: Command) -> Result:
        """Carry out a request and return its result."""
        try:
            return await self._run(command)
        except Refused as refused:
            return Result(refused.problem)

    async def _run(self, command: Command) -> Result:
        match command:
            case ListInstances():
                return Result(instances=self._pool.infos, created=self._created, deleted=self._deleted)
            case ReadLog(name, start, end):
                return Result(log=self._pool.find(name).log.slice(start, end))
            case Act(name, "get"):
                return self._result(self._pool.find(name))
            case Create():
                self._require_running_gateway()
                return self._result(await self._create(command))
            case Act(name, action):
                self._require_running_gateway()
                instance = self._pool.find(name)
                async with instance.lock:
                    # It may have been deleted meanwhile, and another created under its name.
                    if self._pool.find(name) is not instance:
                        raise unknown(name)
                    await self._actions[action](instance)
                    return self._result(instance)

    def _result(self, instance: Instance) -> Result:
        return Result(instances=(self._pool.info(instance),))

    async def _create(self, command: Create) -> Instance:
        """Create and start an instance. Raises: Refused."""
        config, settings = self._config(), command.settings
        kind = settings.kind or (config.manager.kind if config.manager else ENGINE)
        check_create(settings, kind, config, self._pool.records)
        for port in filter(None, (settings.port, settings.prometheus_port)):
            if not is_free(port):
                raise invalid(f"Port {port} already in use by another process")
        await serve(config, settings, kind)
        # Others may have been created while files were read.
        check_create(settings, kind, config, self._pool.records)
        instance = await self._pool.add(settings, kind)
        try:
            await self._pool.launch(instance)
        finally:
            instance.lock.release()
        self._created += 1
        return instance

    async def _start(self, instance: Instance) -> None:
        if instance.status not in ("stopped", "failed"):
            message = f"Instance '{instance.record.name}' is already {instance.status}"
            raise Refused(Problem("ALREADY_RUNNING", message))
        await self._pool.keep(instance, started=True)
        # A process that has failed may still be exiting.
        await instance.stop()
        await self._pool.launch(instance)

    async def _stop(self, instance: Instance) -> None:
        await self._pool.keep(instance, started=False)
        await self._end(instance)

    async def _restart(self, instance: Instance) -> None:
        await self._pool.keep(instance, started=True)
        await self._end(instance)
        instance.restarts += 1
        await self._pool.launch(instance)

    async def _delete(self, instance: Instance) -> None:
        await self._pool.keep(instance, started=False)
        await self._end(instance)
        await self._pool.remove(instance)
        self._deleted += 1

    async def _end(self, instance: Instance) -> None:
        """Let calls in flight finish, and stop the process."""
        if instance.status == "stopped":
            return
        was_joined = instance.joined is not None
        instance.leave()
        if was_joined:
            await self._publish()
        await instance.stop()

    def _require_running_gateway(self) -> None:
        if self._pool.is_stopping:
            raise Refused(Problem("UNAVAILABLE", "the gateway is stopping"))
