"""Parent process of instances whose processes are fakes, which a test makes ready or ends."""

import asyncio
from pathlib import Path
from typing import Any

from gateway.config.load import parse_config
from gateway.declared.host import HostCommand, HostResult, InstanceRecord, ModelCommand
from gateway.declared.instances import InstanceFile
from gateway.processes.instance import Host, Instance, free_port
from gateway.processes.instance_pool import GatewayView, InstancePool
from tests.waiting import PATIENCE_S

CONFIG = """
manager:
  listen: 127.0.0.1:0
  kind: fake
  commands:
    fake:
      backend: tei
      argv: [serve, "{model_id}", --port, "{port}", --metrics, "{prometheus_port}", "{extra_args}"]
upstreams:
  old: {backend: tei, replicas: ["http://old"]}
  own: {backend: torch, model: org/own}
models:
  old-model: {upstream: old}
"""


class FakeChild:
    """Process of an instance. instance: receives what happens to it."""

    def __init__(self, instance: Instance) -> None:
        self.name = "fake"
        self.instance = instance
        self.pid: int | None = 4711
        self.is_stopped = False

    def capture(self, _: Any) -> None:
        """Write nothing."""

    async def keep_running(self) -> None:
        """Run until cancelled."""
        await asyncio.Event().wait()

    async def stop(self, *_: Any) -> None:
        """Note that the process was stopped."""
        self.is_stopped, self.pid = True, None

    def kill_hung(self) -> None:
        """Do nothing: the process answers every check."""


class FakeLaunch:
    """Start of a `FakeChild`. children: of all instances, by name."""

    patience_s = 1.0
    polls = False

    def __init__(self, children: dict[str, FakeChild], record: InstanceRecord) -> None:
        self._children = children
        self._name = record.name
        self.port: int | None = record.settings.port or free_port()
        self.address = f"http://127.0.0.1:{self.port}"

    def create(self, instance: Instance) -> Any:
        """Return the process."""
        child = self._children[self._name] = FakeChild(instance)
        return child

    async def is_healthy(self) -> bool:
        """Return True."""
        return True


class InstanceParent:
    """Parent of one gateway.

    sent: models of each configuration that the workers have been sent. may_publish: they learn of it now.
    """

    def __init__(self, folder: Path) -> None:
        self.children: dict[str, FakeChild] = {}
        self.file = InstanceFile(folder)
        self.records = self.file.open()
        self.base = parse_config(CONFIG, {}, folder)
        self.config = self.base
        self.sent: list[tuple[str, ...]] = []
        view = GatewayView(lambda: self.config, self._publish, lambda _: None, lambda: 8080)
        self.pool = InstancePool(
            self.file,
            Host({}, lambda: str(folder)),
            view,
            lambda record, *_: FakeLaunch(self.children, record),
        )
        self.may_publish = asyncio.Event()
        self.may_publish.set()

    async def _publish(self) -> None:
        await self.may_publish.wait()
        self.config = self.pool.overlay(self.base)
        self.sent.append(tuple(self.config.models))

    async def run(self, command: HostCommand) -> HostResult:
        """Carry out a request; there are no models on this host."""
        return HostResult() if isinstance(command, ModelCommand) else await self.pool.run(command)

    async def ready(self, name: str) -> None:
        """Report that an instance's process is ready, and wait until the workers know."""
        self.children[name].instance.on_ready()
        async with asyncio.timeout(PATIENCE_S):
            while self.pool.find(name).status == "starting":  # noqa: ASYNC110 - a task publishes it
                await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop all instances and release the file."""
        await self.pool.stop_all()
        self.file.close()
