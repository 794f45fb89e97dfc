"""Load on a server: callers that wait for each reply, or calls at their own times.

Open loop: a call's latency counts from the moment at which it was due, so that a slow server is not spared by
the generator's waiting for it. The memory of the figures does not grow with the number of calls: latencies
are counted in buckets of one percent.
"""

import asyncio
import math
import random
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import httpx
import msgspec

# Each bucket is this much wider than the one below it, so a percentile is right within half a percent.
GROWTH = math.log(1.01)
LEAST_S = 1e-5
SHARES = (0.5, 0.9, 0.95, 0.99, 0.999)
EXAMPLE_CHARACTERS_MAX = 200
STAGES_MAX = 32


class Latencies:
    """Histogram of durations."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.most_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._buckets[round(math.log(max(seconds, LEAST_S)) / GROWTH)] += 1
        self.count += 1
        self.most_s = max(self.most_s, seconds)

    def quantile_s(self, share: float) -> float | None:
        """Return the duration that a share of all does not exceed, None if there are none."""
        if not self.count:
            return None
        below, rank = 0, math.ceil(share * self.count)
        for bucket in sorted(self._buckets):
            below += self._buckets[bucket]
            if below >= rank:
                return min(math.exp(bucket * GROWTH), self.most_s)
        return self.most_s


class CallEnd(msgspec.Struct, frozen=True):
    """End of one call. status: of HTTP, or the name of a connection's error. problem: empty for a good reply.

    took_s: since the call was due. stages: milliseconds by stage, as the server reports them.
    """

    status: str
    took_s: float
    texts: int = 0
    tokens: int = 0
    stages: dict[str, float] = {}
    problem: str = ""


class Figures:
    """Sums over the calls of a measured period.

    latencies: of good replies. by_second: the same for each second. examples: one problem for each status.
    late: how late the generator itself sent calls.
    """

    def __init__(self) -> None:
        self.latencies = Latencies()
        self.by_second: dict[int, Latencies] = {}
        self.statuses: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.stage_ms: dict[str, float] = {}
        self.late = Latencies()
        self.texts = self.tokens = self.good = self.unanswered = 0

    def add(self, end: CallEnd, second: int) -> None:
        """Add a call that ended in a second of the period."""
        self.statuses[end.status] += 1
        if end.problem:
            self.examples.setdefault(end.status, end.problem[:EXAMPLE_CHARACTERS_MAX])
            return
        self.good += 1
        self.texts += end.texts
        self.tokens += end.tokens
        self.latencies.add(end.took_s)
        self.by_second.setdefault(second, Latencies()).add(end.took_s)
        for name, duration_ms in end.stages.items():
            # A server may name other stages in each reply.
            if name in self.stage_ms or len(self.stage_ms) < STAGES_MAX:
                self.stage_ms[name] = self.stage_ms.get(name, 0.0) + duration_ms


Arrivals: TypeAlias = Literal["poisson", "even"]
Api: TypeAlias = Literal["openai", "tei", "tei-rerank", "cohere-rerank"]
APIS: dict[Api, str] = {
    "openai": "/v1/embeddings",
    "tei": "/embed",
    "tei-rerank": "/rerank",
    "cohere-rerank": "/v2/rerank",
}
# By the end of a path that the URL brings along, the longest first.
API_OF_PATH: tuple[tuple[str, Api], ...] = (
    ("/v1/rerank", "cohere-rerank"),
    ("/v2/rerank", "cohere-rerank"),
    ("/rerank", "tei-rerank"),
    ("/embeddings", "openai"),
    ("/embed", "tei"),
)
NEEDS_MODEL: frozenset[Api] = frozenset({"openai", "cohere-rerank"})
# Common words of one token in most vocabularies.
SENTENCE = (
    "the time of a day is not always long enough for all that people want to do with their work and life "
    "some read books about water light music food money health school travel or history while others build "
    "small houses near rivers and write letters to friends who live in another city far away"
)
# Enough that a cache of recent texts does not answer, unless it is meant to.
DISTINCT_TEXTS = 10_000
SEED = 7
TOKENS_MAX = 2**53
NO_ADDRESS = "is not an address such as http://127.0.0.1:8080"


class Target(msgspec.Struct, frozen=True):
    """Destination of calls. base: scheme, host and port."""

    base: str
    path: str
    api: Api


class _OpenAIReply(msgspec.Struct):
    data: list[msgspec.Raw]
    usage: Any = None


class _RankReply(msgspec.Struct):
    results: list[msgspec.Raw]


def target_of(url: str, api: Api | None) -> Target:
    """Return the target of a URL, whose path decides the API unless one is given. Raises: ValueError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        # A port that is no number raises where it is read.
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ValueError(NO_ADDRESS) from error
    if not is_address:
        raise ValueError(NO_ADDRESS)
    base, path = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", parts.path.rstrip("/")
    found = next((named for end, named in API_OF_PATH if path.endswith(end)), None)
    if found is None:
        # A base such as /v1 of OpenAI's clients.
        chosen = api or "openai"
        return Target(base, path.removesuffix("/v1") + APIS[chosen], chosen)
    return Target(base, path, api or found)


def made_texts(words: int) -> Sequence[str]:
    """Return texts of this many words on average, from half to one and a half times as many."""
    chance = random.Random(SEED)  # noqa: S311 - no secret
    known = SENTENCE.split()
    return [
        " ".join(chance.choices(known, k=max(1, round(words * chance.uniform(0.5, 1.5)))))
        for _ in range(DISTINCT_TEXTS)
    ]


def bodies(target: Target, model: str | None, texts: Sequence[str], per_call: int) -> Iterator[bytes]:
    """Yield the bodies of one call after the other, without end."""
    named: dict[str, Any] = {} if model is None else {"model": model}
    position = 0
    while True:
        chosen = [texts[(position + index) % len(texts)] for index in range(per_call)]
        position += per_call
        match target.api:
            case "openai":
                content = {**named, "input": chosen, "encoding_format": "base64"}
            case "tei":
                content = {**named, "inputs": chosen, "truncate": True}
            case "tei-rerank":
                content = {**named, "query": texts[0], "texts": chosen, "truncate": True}
            case _:
                content = {**named, "query": texts[0], "documents": chosen}
        yield msgspec.json.encode(content)


def read_reply(api: Api, body: bytes, sent: int) -> tuple[int, str]:
    """Return the tokens that a reply reports and its problem, empty if it has a result for each text."""
    tokens = 0
    try:
        match api:
            case "openai":
                reply = msgspec.json.decode(body, type=_OpenAIReply)
                found, tokens = len(reply.data), _tokens_in(reply.usage)
            case "cohere-rerank":
                found = len(msgspec.json.decode(body, type=_RankReply).results)
            case _:
                found = len(msgspec.json.decode(body, type=list[msgspec.Raw]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return 0, f"not a reply of this API: {error}"
    return tokens, "" if found == sent else f"{found} results for {sent} texts"


def _tokens_in(usage: object) -> int:
    """Return the tokens of a reply's usage, 0 where it has no usable number."""
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return tokens if type(tokens) is int and 0 <= tokens <= TOKENS_MAX else 0


def stages_of(header: str) -> dict[str, float]:
    """Return the milliseconds of each stage in a `server-timing` header; of many stages, the first."""
    stages: dict[str, float] = {}
    for entry in header.split(",")[:STAGES_MAX]:
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "dur":
                try:
                    duration = float(value)
                except ValueError:
                    continue
                if 0 <= duration < math.inf:
                    stages[name] = duration
    return stages


# Calls that may be under way at once in an open loop; those beyond wait, and their clock runs.
IN_FLIGHT_MAX = 1024
MODELS_TIMEOUT_S = 10.0
# Replies are held in memory, and a server may send one without end.
REPLY_BYTES_MAX = 256 * 1024 * 1024
RETRY_S = 0.05


def arrival_times(arrivals: Arrivals, rate: float, seed: int) -> Iterator[float]:
    """Yield the times of the calls of an open loop, without end, in seconds from its start.

    poisson: of independent callers, with exponential gaps.
    """
    if arrivals == "even":
        yield from (number / rate for number in count())
    chance, at_s = random.Random(seed), 0.0  # noqa: S311 - no secret
    while True:
        at_s += chance.expovariate(rate)
        yield at_s


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
    arrivals: Arrivals = "poisson"


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
        start_s = time.monotonic()
        room = asyncio.Semaphore(IN_FLIGHT_MAX)
        under_way: set[asyncio.Task[None]] = set()

        async def call(due_s: float) -> None:
            try:
                await self._call(due_s)
            finally:
                room.release()

        try:
            for at_s in arrival_times(self._plan.arrivals, rate, SEED):
                due_s = start_s + at_s
                if due_s >= self._end_s:
                    break
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                try:
                    # Calls that are due while none may be sent have no task yet.
                    async with asyncio.timeout(max(0.0, self._end_s - time.monotonic())):
                        await room.acquire()
                except TimeoutError:
                    break
                task = asyncio.create_task(call(due_s))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            # Calls that were due in the period count, even if they end after it.
            if under_way:
                await asyncio.wait(under_way, timeout=self._plan.timeout_s)
        finally:
            self._figures.unanswered += len(under_way)
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

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
