"""Load on a server: callers that wait for each reply, or calls at their own times.

Open loop: a call's latency counts from the moment at which it was due, so that a slow server is not spared by
the generator's waiting for it.
"""

import asyncio
import random
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import httpx
import msgspec

from gateway.cli.bench_calls import NEEDS_MODEL, SEED, Target, read_reply, stages_of
from gateway.cli.bench_figures import EXAMPLE_CHARACTERS_MAX, CallEnd, Figures

# Calls that may be under way at once in an open loop; those beyond wait, and their clock runs.
IN_FLIGHT_MAX = 1024
MODELS_TIMEOUT_S = 10.0
# Replies are held in memory, and a server may send one without end.
REPLY_BYTES_MAX = 256 * 1024 * 1024
RETRY_S = 0.05


class LoadPlan(msgspec.Struct, frozen=True):
    """Load on one target.

    rate: calls per second of an open loop, None for a closed loop of `callers`. arrivals: at random or even
    times. texts: of each call. timeout_s: of one call.
    """

    target: Target
    seconds: float
    warmup_s: float
    texts: int
    timeout_s: float
    callers: int = 1
    rate: float | None = None
    arrivals: Literal["poisson", "even"] = "poisson"


class Measured(msgspec.Struct, frozen=True):
    """Outcome of a load. seconds: measured, less than planned if it was stopped. cpu_s: of the generator."""

    figures: Figures
    seconds: float
    cpu_s: float


class Answer(NamedTuple):
    """Answer of a server."""

    status: int
    headers: httpx.Headers
    content: bytes


def open_client(key: str | None, ca: Path | None, timeout_s: float) -> httpx.AsyncClient:
    """Return a client that follows no redirect, so that a key goes only to the address that was given.

    Raises: OSError or ssl.SSLError if `ca` cannot be used.
    """
    context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    limits = httpx.Limits(max_connections=IN_FLIGHT_MAX, max_keepalive_connections=IN_FLIGHT_MAX)
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    return httpx.AsyncClient(
        headers=headers, timeout=timeout_s, limits=limits, verify=context, trust_env=False
    )


async def only_model(client: httpx.AsyncClient, target: Target) -> str | None:
    """Return the first model that a server lists, None where calls need no name.

    Raises: ValueError if it lists none; httpx.HTTPError, TimeoutError.
    """
    if target.api not in NEEDS_MODEL:
        return None
    async with asyncio.timeout(MODELS_TIMEOUT_S):
        reply = await _exchange(client, "GET", f"{target.base}/v1/models")
    if reply.status != 200:
        raise ValueError(f"GET /v1/models has status {reply.status}; name a model with --model")
    try:
        listed = msgspec.json.decode(reply.content)["data"]
        return str(listed[0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError("GET /v1/models lists no model; name one with --model") from error


class Load:
    """One run of a plan. stop: ends it early, and what was measured remains."""

    def __init__(self, client: httpx.AsyncClient, plan: LoadPlan, bodies: Iterator[bytes]) -> None:
        self._client = client
        self._plan = plan
        self._bodies = bodies
        self._url = plan.target.base + plan.target.path
        self.stop = asyncio.Event()
        self._figures = Figures()
        self._begin_s = 0.0
        self._end_s = 0.0

    async def run(self) -> Measured:
        """Run the load with its warm-up."""
        plan = self._plan
        started_s = time.monotonic()
        self._begin_s = started_s + plan.warmup_s
        self._end_s = self._begin_s + plan.seconds
        cpu_s = time.process_time()
        loop = self._run_closed() if plan.rate is None else self._run_open(plan.rate)
        running = asyncio.create_task(loop)
        stopping = asyncio.create_task(self.stop.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        ended_s = min(time.monotonic(), self._end_s)
        for task in (running, stopping):
            task.cancel()
        outcomes = await asyncio.gather(running, stopping, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        share = plan.seconds / (plan.seconds + plan.warmup_s)
        seconds = max(0.0, ended_s - self._begin_s)
        return Measured(self._figures, seconds, (time.process_time() - cpu_s) * share)

    async def _run_closed(self) -> None:
        async def caller() -> None:
            while (due_s := time.monotonic()) < self._end_s:
                await self._call(due_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.callers):
                group.create_task(caller())

    async def _run_open(self, rate: float) -> None:
        chance = random.Random(SEED)  # noqa: S311 - no secret
        due_s = time.monotonic()
        room = asyncio.Semaphore(IN_FLIGHT_MAX)
        under_way: set[asyncio.Task[None]] = set()

        async def call(due_s: float) -> None:
            try:
                await self._call(due_s)
            finally:
                room.release()

        try:
            while due_s < self._end_s:
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                # Calls that are due while none may be sent have no task yet.
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._left_s()):
                        await room.acquire()
                        task = asyncio.create_task(call(due_s))
                        under_way.add(task)
                        task.add_done_callback(under_way.discard)
                        due_s += chance.expovariate(rate) if self._plan.arrivals == "poisson" else 1 / rate
                        continue
                break
            # Calls that were due in the period count, even if they end after it.
            if under_way:
                await asyncio.wait(under_way, timeout=self._plan.timeout_s)
        finally:
            self._figures.unanswered += len(under_way)
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    def _left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    async def _call(self, due_s: float) -> None:
        body, sent_s = next(self._bodies), time.monotonic()
        plan = self._plan
        try:
            async with asyncio.timeout(plan.timeout_s):
                reply = await _exchange(self._client, "POST", self._url, body)
        except TimeoutError:
            end = CallEnd("timeout", time.monotonic() - due_s, problem=f"no reply in {plan.timeout_s:g} s")
        except httpx.HTTPError as error:
            name = type(error).__name__
            end = CallEnd(name, time.monotonic() - due_s, problem=str(error) or name)
        else:
            took_s = time.monotonic() - due_s
            end = _end_of(plan, reply, took_s)
        # Of a closed loop, calls of the period are those that end in it; of an open loop, those due in it.
        moment_s = due_s if plan.rate is not None else time.monotonic()
        if self._begin_s <= moment_s < self._end_s:
            self._figures.add(end, int(moment_s - self._begin_s))
            self._figures.late.add(sent_s - due_s)
        if end.problem and not end.status.isdecimal():
            # A server that cannot be reached must not be asked in a busy loop.
            await asyncio.sleep(RETRY_S)


async def _exchange(client: httpx.AsyncClient, method: str, url: str, body: bytes | None = None) -> Answer:
    """Return the answer to a request. Raises: httpx.HTTPError."""
    async with client.stream(method, url, content=body) as reply:
        content = bytearray()
        async for part in reply.aiter_raw():
            content += part
            if len(content) > REPLY_BYTES_MAX:
                raise httpx.DecodingError(f"the reply has more than {REPLY_BYTES_MAX} bytes")
    return Answer(reply.status_code, reply.headers, bytes(content))


def _end_of(plan: LoadPlan, reply: Answer, took_s: float) -> CallEnd:
    status = str(reply.status)
    if reply.status != 200:
        # An empty problem would count as a good reply.
        problem = reply.content[:EXAMPLE_CHARACTERS_MAX].decode(errors="replace")
        return CallEnd(status, took_s, problem=problem or "an empty body")
    tokens, problem = read_reply(plan.target.api, reply.content, plan.texts)
    stages = stages_of(reply.headers.get("server-timing", ""))
    return CallEnd(status, took_s, plan.texts, tokens, stages, problem)
