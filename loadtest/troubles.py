"""Scenarios with trouble: replicas that die, hang or slow down, a neighbour's poison, a killed gateway."""

import asyncio
import contextlib
import http.client
import time
from collections.abc import Callable

import msgspec

from backends.checkpoints.locations import DEFAULT_MODEL, locate_checkpoint
from loadtest import servers
from loadtest.corpora import CallShape
from loadtest.recorder import Sample
from loadtest.servers import RunningServer
from loadtest.testbed import OTHER_KEY, Finding, Testbed, failed

_ATTEMPTS = "gateway_attempts_total"
_POISON = "poison"
# An attempt gets at most half of it while another replica could be tried.
_SHORT_TIMEOUT = {"x-timeout-s": "4"}
# A batch costs little more than one text, therefore calls of both tenants travel together.
_BUSY = ("--base-ms", "20", "--input-ms", "0.25", "--parallel", "2")


async def dead_replica(testbed: Testbed) -> list[Finding]:
    """Kill one of three replicas under 200 calls per second; baseline: before it died."""
    return await _one_of_three(testbed, {"die": True})


async def hung_replica(testbed: Testbed) -> list[Finding]:
    """Let one of three replicas accept calls and reply to none; baseline: before it hung."""
    return await _one_of_three(testbed, {"hang": True})


async def slow_replica(testbed: Testbed) -> list[Finding]:
    """Slow one of three replicas down twenty times; baseline: before it slowed down."""
    return await _one_of_three(testbed, {"slowdown": 20.0})


async def _one_of_three(testbed: Testbed, fault: dict[str, object]) -> list[Finding]:
    stubs, gateway = _three_replicas(testbed)
    before = await testbed.open(gateway, 200)
    for stub in stubs:
        servers.control(stub, reset=True)

    async def inject() -> int:
        await asyncio.sleep(testbed.seconds / 3)
        requests = servers.stats(stubs[0]).requests
        _inject(stubs[0], fault)
        return requests

    sample, requests = await asyncio.gather(testbed.open(gateway, 200), inject())
    if "die" not in fault:
        requests = servers.stats(stubs[0]).requests
    attempts = requests + sum(servers.stats(stub).requests for stub in stubs[1:])
    return [
        failed(sample, before),
        Finding("p50 ms", sample.p50_ms, before.p50_ms),
        Finding("p99 ms", sample.p99_ms, before.p99_ms),
        Finding("attempts per call", attempts / sample.sent, 1.0),
    ]


async def all_dead(testbed: Testbed) -> list[Finding]:
    """Kill all three replicas under 200 calls per second: every call must be refused quickly."""
    return await _all_three(testbed, {"die": True})


async def all_hung(testbed: Testbed) -> list[Finding]:
    """Let all three replicas hang; callers have four seconds."""
    return await _all_three(testbed, {"hang": True})


async def _all_three(testbed: Testbed, fault: dict[str, object]) -> list[Finding]:
    stubs, gateway = _three_replicas(testbed)
    target = msgspec.structs.replace(gateway.target, headers=gateway.target.headers | _SHORT_TIMEOUT)
    before = await testbed.open(gateway, 200, target=target)
    for stub in stubs:
        _inject(stub, fault)
    attempts = servers.metric(gateway, _ATTEMPTS)
    sample = await testbed.open(gateway, 200, target=target)
    attempts = servers.metric(gateway, _ATTEMPTS) - attempts
    note = f"{sample.failures}, {sample.without_retry_after} without retry-after"
    return [
        failed(sample, before),
        Finding("p99 ms of refusals", sample.refused_ms, before.p99_ms, note),
        Finding("attempts per call", attempts / sample.sent, 1.0),
    ]


def _three_replicas(testbed: Testbed) -> tuple[list[RunningServer], RunningServer]:
    stubs = [testbed.stub("--base-ms", "5", "--parallel", "8") for _ in range(3)]
    return stubs, testbed.gateway(*stubs, upstream=", attempt_timeout_s: 2")


def _inject(stub: RunningServer, fault: dict[str, object]) -> None:
    # A stub that dies does not confirm it.
    with contextlib.suppress(OSError, http.client.HTTPException):
        servers.control(stub, **fault)


async def poison(testbed: Testbed) -> list[Finding]:
    """Let a neighbour's 20 calls per second spoil every batch that contains them; baseline: good texts."""
    return await _neighbour(testbed, [testbed.stub(*_BUSY, "--refused-word", _POISON)], rate=20)


async def deadly(testbed: Testbed) -> list[Finding]:
    """Let a neighbour's call every two seconds crash the replica that reads it; baseline: good texts."""
    flags = (*_BUSY, "--crash-word", _POISON, "--down-ms", "500")
    return await _neighbour(testbed, [testbed.stub(*flags) for _ in range(3)], rate=0.5)


async def _neighbour(testbed: Testbed, stubs: list[RunningServer], rate: float) -> list[Finding]:
    """Run a victim with 200 calls per second next to a neighbour with good texts, then with poison.

    The gateway counts tokens itself (`tokenizer`), therefore both tenants' texts share batches.
    """
    tokenizer = f", tokenizer: '{locate_checkpoint(DEFAULT_MODEL)}', in_flight_batches: 2"
    gateway = testbed.gateway(*stubs, upstream=tokenizer)
    neighbour = servers.with_key(gateway.target.port, OTHER_KEY)

    async def run(shape: CallShape) -> tuple[Sample, Sample, float]:
        attempts = servers.metric(gateway, _ATTEMPTS)
        victim, other = await asyncio.gather(
            testbed.open(gateway, 200), testbed.open(gateway, rate, shape, neighbour)
        )
        attempts = servers.metric(gateway, _ATTEMPTS) - attempts
        return victim, other, attempts / (victim.sent + other.sent)

    # A tokenizer takes longer for its first texts.
    await run(CallShape(arrivals="even"))
    good, _, good_attempts = await run(CallShape(arrivals="even"))
    bad, other, bad_attempts = await run(CallShape(word=_POISON, arrivals="even"))
    return [
        failed(bad, good),
        Finding("victim's p50 ms", bad.p50_ms, good.p50_ms),
        Finding("victim's p99 ms", bad.p99_ms, good.p99_ms, f"the neighbour got {other.failures}"),
        Finding("attempts per call of both", bad_attempts, good_attempts),
    ]


async def dead_gateway(testbed: Testbed) -> list[Finding]:
    """Kill the gateway that holds a tenant's only slot: the lease of 15 s must free it for another one."""
    stub = testbed.stub("--hang-word", "hang")
    _, store = testbed.redis()
    config = {"limits": ", limits: {requests_in_flight: 1}", "settings": f"quotas: {{store: '{store}'}}\n"}
    first, second = testbed.gateway(stub, **config), testbed.gateway(stub, **config)
    holding = asyncio.create_task(asyncio.to_thread(_status, first, "hang"))
    try:
        await _poll(lambda: servers.stats(stub).in_flight > 0)
        # The slot's lease has been renewed once by then.
        await asyncio.sleep(6)
        occupied = await asyncio.to_thread(_status, second, "before")
        first.process.kill()
        killed_s = time.monotonic()
        await _poll(lambda: _status(second, "after") == 200)
        free_s = time.monotonic() - killed_s
    finally:
        first.process.kill()
        await holding
    return [Finding("seconds until its slot is free", free_s, None, f"status before the kill: {occupied}")]


async def _poll(condition: Callable[[], bool]) -> None:
    """Wait for another process's state, which sends no event.

    Raises: TimeoutError.
    """
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.05)


def _status(server: RunningServer, text: str) -> int:
    """Return the status of one call; 0 where the connection broke."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        body = msgspec.json.encode({"model": "stub", "input": text})
        return servers.request(server.target.port, "/v1/embeddings", body)[0]
    return 0
