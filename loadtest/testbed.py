"""Servers and loads of one scenario, and what a scenario returns."""

from collections.abc import Awaitable, Callable, Iterator
from itertools import repeat
from pathlib import Path

import msgspec

from loadtest import corpora, servers
from loadtest.corpora import SINGLE, CallFactory, CallShape
from loadtest.generator import CallSender, LoadTarget, closed_loop, open_loop, schedule
from loadtest.processes import PinnedProcess
from loadtest.recorder import Sample, SampleRecorder
from loadtest.servers import KEY, RunningServer

OTHER_KEY = "sk-loadtest-other"
WARM_UP_S = 0.5


class Finding(msgspec.Struct, frozen=True):
    """A figure of one repeat. baseline: the same figure without the scenario's subject, if there is one."""

    measure: str
    value: float
    baseline: float | None = None
    note: str = ""


class Testbed:
    """Servers of one scenario; they stop at its end."""

    # pytest collects classes whose name starts with Test.
    __test__ = False

    def __init__(self, folder: Path, processes: list[PinnedProcess], seconds: float) -> None:
        self.seconds = seconds
        self.folder = folder
        self._processes = processes
        self._seed = 0

    def stub(self, *flags: str) -> RunningServer:
        """Start an upstream with these flags."""
        return self._registered(servers.start_stub(self.folder, *flags))

    def redis(self) -> tuple[PinnedProcess, str]:
        """Start a Redis; return it and its URL."""
        redis, url = servers.start_redis(self.folder)
        self._processes.append(redis)
        return redis, url

    def gateway(
        self,
        *stubs: RunningServer,
        upstream: str = "",
        limits: str = "",
        settings: str = "",
        name: str = "gateway",
    ) -> RunningServer:
        """Start a gateway in front of equal replicas, with two tenants.

        upstream: more of the upstream's entry. limits: more of the first tenant's. settings: further lines.
        """
        replicas = ", ".join(f"'http://127.0.0.1:{stub.target.port}'" for stub in stubs)
        config = (
            f"{settings}upstreams: {{stub: {{backend: tei, replicas: [{replicas}]{upstream}}}}}\n"
            "models: {stub: {upstream: stub}}\n"
            f"tenants: {{main: {servers.tenant(KEY, limits)}, other: {servers.tenant(OTHER_KEY)}}}\n"
        )
        return self.gateway_with(config, name)

    def gateway_with(self, config: str, name: str = "gateway") -> RunningServer:
        """Start a gateway with a configuration of its own."""
        return self._registered(servers.start_gateway(self.folder, config, name=name))

    def _registered(self, server: RunningServer) -> RunningServer:
        self._processes.append(server.process)
        return server

    def sender(
        self,
        server: RunningServer,
        shape: CallShape = SINGLE,
        target: LoadTarget | None = None,
        watch: dict[str, PinnedProcess] | None = None,
    ) -> CallSender:
        """Return a sender of texts that no call had before."""
        self._seed += 1
        usages = server.watch | {name: process.usage for name, process in (watch or {}).items()}
        # All replies with many inputs are checked against their texts and their order.
        check_every = 1 if shape.inputs > 32 else 7
        calls = CallFactory(_texts(shape, self._seed), shape)
        return CallSender(target or server.target, calls, SampleRecorder(usages), check_every)

    async def closed(
        self,
        server: RunningServer,
        callers: int,
        shape: CallShape = SINGLE,
        target: LoadTarget | None = None,
        watch: dict[str, PinnedProcess] | None = None,
    ) -> Sample:
        """Run a closed loop with this number of callers."""
        sender = self.sender(server, shape, target, watch)
        return await closed_loop(sender, callers, self.seconds, WARM_UP_S)

    async def open(
        self,
        server: RunningServer,
        rate: float,
        shape: CallShape = SINGLE,
        target: LoadTarget | None = None,
    ) -> Sample:
        """Run an open loop with this number of calls per second."""
        sender = self.sender(server, shape, target)
        arrivals_s = schedule(shape.arrivals, rate, self.seconds + WARM_UP_S, self._seed)
        return await open_loop(sender, arrivals_s, WARM_UP_S)


Scenario = Callable[[Testbed], Awaitable[list[Finding]]]


def _texts(shape: CallShape, seed: int) -> Iterator[str]:
    for text in corpora.texts("queries" if shape.inputs == 1 else "mixed", seed):
        yield from repeat(f"{shape.word} {text}" if shape.word else text, shape.identical)


def failed(sample: Sample, before: Sample) -> Finding:
    """Return the number of failed calls, with their statuses."""
    return Finding("failed calls", sample.failed, before.failed, sample.failures)


def cpu(server: RunningServer, sample: Sample) -> str:
    """Return the server's CPU per call, in words."""
    return f"{sample.cpu_us_per_call(server.name) / 1000:.2f} ms of CPU per call"
