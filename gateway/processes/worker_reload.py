"""How a running application comes to serve another config: in one step, between two calls.

Rule: nothing here waits. What is new is opened first, so that whatever fails has changed nothing; then the
one reference to what is served is replaced. Calls that began before end with what they began with.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from backends.contract import Operation
from backends.torch.client import TorchBackend
from gateway.api.operators.admin import Admin
from gateway.api.server.responses import Api
from gateway.config.schema import Config
from gateway.in_flight import InFlight
from gateway.routing.routes import Routes
from gateway.serve import Serving
from gateway.telemetry.change_history import Recent
from gateway.telemetry.metrics import Metrics, ReplicaLoad, Sources
from gateway.upstreams.registry import UpstreamRegistry
from gateway.upstreams.upstream import Upstream


@dataclass(frozen=True, slots=True)
class WorkerReload:
    """Whatever has to know which config is served."""

    fleet: UpstreamRegistry
    api: Api
    admin: Admin
    exporter: Metrics
    recent: Recent
    in_flight: InFlight

    def follow(self, config: Config, engines: Mapping[str, str]) -> "asyncio.Task[None]":
        """Serve this from now on; the task ends when all that it left out is drained and closed.

        engines: upstream → where its engine has its model. Raises: OSError; then nothing has changed.
        """
        left = self.fleet.apply(config.upstreams, engines)
        upstreams = self.fleet.upstreams
        self.api.gateway.serving = serving_of(config, upstreams)
        self.api.gateway.keyring.replace_configured(config.tenants, config.admin.keys)
        self.api.inputs_max = config.limits.inputs
        self.admin.apply(config)
        for one in left:
            self.recent.forget(one.upstream.name)
        self.exporter.watch(sources_of(upstreams, self.in_flight))
        return self.fleet.retire(left)


def serving_of(config: Config, upstreams: Mapping[str, Upstream]) -> Serving:
    """The set that calls are served by. upstreams: those that the config names."""

    def offered(name: str) -> frozenset[Operation] | None:
        told = upstreams[name].capabilities
        return None if told is None else told.operations

    return Serving(config, Routes(config.models, config.defaults, offered), upstreams)


def sources_of(upstreams: Mapping[str, Upstream], in_flight: InFlight) -> Sources:
    """What metrics read when somebody asks."""

    def replicas() -> Iterator[ReplicaLoad]:
        for name, one in upstreams.items():
            for replica in one.pool.replicas:
                yield ReplicaLoad(name, replica.name, replica.batches, replica.slots)

    backends = {name: replica.backend for name, one in upstreams.items() for replica in one.pool.replicas}
    return Sources(
        {name: one.lane.waiting for name, one in upstreams.items()},
        replicas,
        lambda: (in_flight.calls, in_flight.bytes),
        {name: one.stats for name, one in backends.items() if isinstance(one, TorchBackend)},
    )
