"""What scenarios play on: fresh servers, loads of all shapes, and what a figure is told as."""

from collections.abc import Awaitable, Callable, Iterator
from itertools import repeat
from pathlib import Path

import msgspec

from loadtest import corpora, schedules, servers
from loadtest.corpora import Calls, EncodingFormat
from loadtest.generator import Load, Recorder, Sample, Target, closed_loop, open_loop
from loadtest.processes import Running
from loadtest.schedules import Arrivals
from loadtest.servers import KEY, Server

OTHER_KEY = "sk-loadtest-other"


class Finding(msgspec.Struct, frozen=True):
    """One line: a figure and its baseline. ratio: the figure in baselines."""

    scenario: str
    measure: str
    baseline: float
    gateway: float
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """None where there is nothing to divide by."""
        return round(self.gateway / self.baseline, 3) if self.baseline else None


class Stage:
    """Servers of one scenario; they end with it."""

    def __init__(self, folder: Path, started: list[Running], seconds: float) -> None:
        self.seconds = seconds
        self._folder = folder
        self._started = started
        self._seed = 0

    def stub(self, *flags: str) -> Server:
        """An upstream with these flags."""
        stub = servers.start_stub(self._folder, *flags)
        assert stub.process is not None
        self._started.append(stub.process)
        return stub

    def gateway(self, *stubs: Server, settings: str = "") -> Server:
        """In front of equal replicas; two tenants without limits. settings: more of the upstream."""
        replicas = ", ".join(f"'http://127.0.0.1:{one.target.port}'" for one in stubs)
        server = servers.start_gateway(
            self._folder,
            f"upstreams: {{stub: {{backend: tei, replicas: [{replicas}]{settings}}}}}\n"
            "models: {stub: {upstream: stub}}\n"
            f"tenants: {{one: {servers.tenant(KEY)}, other: {servers.tenant(OTHER_KEY)}}}\n",
        )
        assert server.process is not None
        self._started.append(server.process)
        return server

    def _load(self, server: Server, shape: "Shape", target: Target | None) -> Load:
        self._seed += 1
        watch = {server.name: server.process.usage} if server.process else {}
        # Replies of many inputs are all held against their texts, in their order.
        every = 1 if shape.inputs > 32 else 7
        calls = Calls(_texts(shape, self._seed), inputs=shape.inputs, form=shape.form)
        return Load(target or server.target, calls, Recorder(watch), every)

    async def closed(
        self, server: Server, callers: int, shape: "Shape | None" = None, target: Target | None = None
    ) -> Sample:
        """So many callers."""
        load = self._load(server, shape or SINGLE, target)
        return await closed_loop(load, callers, self.seconds, WARM_UP_S)

    async def open(
        self, server: Server, rate: float, shape: "Shape | None" = None, target: Target | None = None
    ) -> Sample:
        """So many calls a second."""
        shape = shape or SINGLE
        load = self._load(server, shape, target)
        moments_s = schedules.schedule(shape.arrivals, rate, self.seconds + WARM_UP_S, self._seed)
        return await open_loop(load, moments_s, WARM_UP_S)


class Shape(msgspec.Struct, frozen=True):
    """Of calls. word: in front of each text. alike: so many calls in a row send the same.

    arrivals: of an open loop.
    """

    inputs: int = 1
    form: EncodingFormat = "base64"
    word: str = ""
    alike: int = 1
    arrivals: Arrivals = "poisson"


SINGLE, BATCH = Shape(), Shape(32)
WARM_UP_S = 0.5
Scenario = Callable[[Stage], Awaitable[list[Finding]]]


def _texts(shape: Shape, seed: int) -> Iterator[str]:
    for text in corpora.texts("queries" if shape.inputs == 1 else "mixed", seed):
        yield from repeat(f"{shape.word} {text}" if shape.word else text, shape.alike)


def failed(name: str, before: Sample, sample: Sample) -> Finding:
    """Calls without a good answer, and what they got."""
    return Finding(name, "failed calls", before.failed, sample.failed, statuses(sample))


def cpu(server: Server, sample: Sample) -> str:
    """What a call cost the server."""
    return f"{sample.cpu[server.name] / max(sample.per_s, 0.01) * 1000:.2f} ms of CPU a call"


def statuses(sample: Sample) -> str:
    """Of the calls that failed."""
    bad = {status: count for status, count in sample.statuses.items() if status != "200"}
    return f"{bad or ''} {f'{sample.unanswered} unanswered' if sample.unanswered else ''}".strip()
