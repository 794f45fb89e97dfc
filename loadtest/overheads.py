"""Scenarios that price a feature: quotas in Redis, traces, workers, idle connections and gateways."""

import asyncio
import resource
from collections.abc import Awaitable, Callable
from itertools import cycle, islice

import msgspec

from gateway.quotas.redis_ledger import ALIVE_S, BEAT, GATEWAYS_KEY, GATEWAYS_TTL_S, HEARTBEAT_S
from gateway.store.redis_client import RedisClient
from gateway.tenants.follower import LOOK_EVERY_S
from gateway.tenants.store import TenantStore
from gateway.vector_spaces.space import FOLLOW_EVERY_S
from gateway.vector_spaces.store import SPACES
from loadtest import corpora
from loadtest.corpora import CallFactory
from loadtest.generator import CallSender, closed_loop
from loadtest.processes import memory, open_files, workers_of
from loadtest.recorder import Sample, SampleRecorder
from loadtest.servers import KEY, RunningServer, tenant
from loadtest.testbed import WARM_UP_S, Finding, Testbed

# Fewer than are sent during the warm-up.
_KNOWN_TEXTS = 200
_LIMITS = ", limits: {requests_per_minute: 100000000, tokens_per_minute: 1000000000}"


async def quota_store(testbed: Testbed) -> list[Finding]:
    """Count quotas in Redis; baseline: in memory."""
    stub = testbed.stub()
    redis, store = testbed.redis()
    in_memory = testbed.gateway(stub, limits=_LIMITS)
    in_redis = testbed.gateway(stub, limits=_LIMITS, settings=f"quotas: {{store: '{store}'}}\n")
    findings = []
    for callers in (1, 32):
        before = await testbed.closed(in_memory, callers)
        sample = await testbed.closed(in_redis, callers, watch={"redis": redis})
        kind = f"{callers} caller{'s' if callers > 1 else ''}"
        findings += [
            Finding(f"p50 ms, {kind}", sample.p50_ms, before.p50_ms),
            _cpu_finding(kind, in_redis, sample, in_memory, before),
            Finding(f"CPU of Redis per call, µs, {kind}", sample.cpu_us_per_call("redis")),
        ]
    return findings


def _cpu_finding(
    kind: str, server: RunningServer, sample: Sample, other: RunningServer, before: Sample
) -> Finding:
    cost, base = sample.cpu_us_per_call(server.name), before.cpu_us_per_call(other.name)
    return Finding(f"CPU per call, µs, {kind}", cost, base)


async def cached_texts(testbed: Testbed) -> list[Finding]:
    """Find all texts in a cache in memory, then none; baseline: no cache."""
    stub = testbed.stub()
    plain = testbed.gateway(stub, limits=_LIMITS)
    config = (
        f"upstreams: {{stub: {{backend: tei, replicas: ['http://127.0.0.1:{stub.target.port}']}}}}\n"
        "models: {stub: {upstream: stub, cache: true}}\ncache: {bytes: 1000000000}\n"
        f"tenants: {{main: {tenant(KEY, _LIMITS)}}}\n"
    )
    cached = testbed.gateway_with(config, "cached")
    known = list(islice(corpora.texts("queries", 0), _KNOWN_TEXTS))
    findings = []
    for callers in (1, 32):
        kind = f"{callers} caller{'s' if callers > 1 else ''}"
        before = await testbed.closed(plain, callers)
        missed = await testbed.closed(cached, callers)
        calls = CallFactory(cycle(known))
        sender = CallSender(cached.target, calls, SampleRecorder(cached.watch), 7)
        found = await closed_loop(sender, callers, testbed.seconds, WARM_UP_S)
        for name, sample in (("hits", found), ("misses", missed)):
            findings += [
                Finding(f"p50 ms, {name}, {kind}", sample.p50_ms, before.p50_ms),
                Finding(f"requests/s, {name}, {kind}", sample.per_s, before.per_s),
                _cpu_finding(f"{name}, {kind}", cached, sample, plain, before),
            ]
    return findings


async def traces(testbed: Testbed) -> list[Finding]:
    """Record 1 % and all of the calls as traces, 32 callers; baseline: no tracing."""
    stub = testbed.stub()
    off, findings = testbed.gateway(stub, limits=_LIMITS), []
    for name, share in (("1 %", 0.01), ("all", 1.0)):
        endpoint = f"http://127.0.0.1:{stub.target.port}/v1/traces"
        settings = f"tracing: {{endpoint: '{endpoint}', sample: {share}}}\n"
        server = testbed.gateway(stub, limits=_LIMITS, settings=settings)
        before, sample = await testbed.closed(off, 32), await testbed.closed(server, 32)
        findings += [
            Finding(f"calls/s, {name} recorded", sample.per_s, before.per_s),
            _cpu_finding(f"{name} recorded", server, sample, off, before),
        ]
    return findings


async def two_workers(testbed: Testbed) -> list[Finding]:
    """Run two HTTP workers that share all cores with the load; baseline: one worker."""
    stub = testbed.stub()
    redis, store = testbed.redis()
    settings = f"logs: {{access: false}}\nquotas: {{store: '{store}'}}\n"
    single = testbed.gateway(stub, limits=_LIMITS, settings=settings)
    double = testbed.gateway(stub, limits=_LIMITS, settings=f"workers: 2\n{settings}")
    for process in (stub.process, redis, single.process, double.process):
        process.unpin()
    before, sample = await testbed.closed(single, 64), await testbed.closed(double, 64)
    workers = workers_of(double.process.process.pid)
    return [
        Finding("calls/s, 64 callers", sample.per_s, before.per_s),
        _cpu_finding("64 callers", double, sample, single, before),
        Finding("RSS MB of a worker", max(memory(pid).rss_mb for pid in workers)),
    ]


async def idle_connections(testbed: Testbed) -> list[Finding]:
    """Hold 10,000 idle connections that have had one call each; baseline: none."""
    count = _raise_open_files(10_000)
    stub = testbed.stub()
    gateway = testbed.gateway(stub, limits=", limits: {requests_in_flight: 20000}")
    (worker,) = workers_of(gateway.process.process.pid)
    alone, memory_before, files = await testbed.open(gateway, 50), memory(worker), open_files(worker)
    connections = await _open_connections(gateway, count)
    crowd, memory_after, held = await testbed.open(gateway, 50), memory(worker), open_files(worker) - files
    for connection in connections:
        connection.close()
    return [
        Finding("connections held", held, None, f"failed calls {alone.failed + crowd.failed}"),
        Finding("KB per connection", (memory_after.private_mb - memory_before.private_mb) * 1000 / held),
        Finding("RSS MB of the worker", memory_after.rss_mb, memory_before.rss_mb),
        Finding("p50 ms at 50/s", crowd.p50_ms, alone.p50_ms),
        _cpu_finding("50/s", gateway, crowd, gateway, alone),
    ]


def _raise_open_files(wanted: int) -> int:
    """Raise the limit of open files; return how many connections it allows, at most `wanted`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(wanted, hard - 1000)


async def _open_connections(gateway: RunningServer, count: int) -> list[asyncio.StreamWriter]:
    calls, head, gate = (
        CallFactory(corpora.texts("queries", 10**5)),
        gateway.target.head(),
        asyncio.Semaphore(200),
    )

    async def open_one() -> asyncio.StreamWriter:
        async with gate, asyncio.timeout(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.target.port)
            writer.write(calls.next(head).request)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            return writer

    return await asyncio.gather(*(open_one() for _ in range(count)))


async def idle_gateways(testbed: Testbed) -> list[Finding]:
    """Measure the CPU of Redis for the periodic requests of 1,000 gateways without calls."""
    _, store = testbed.redis()
    client, gateways, findings = RedisClient(store, timeout_s=5.0), 1000, []
    tenants = TenantStore(client)
    # Six reference texts of 1,024 numbers in float32.
    await client.execute("HSET", SPACES, "upstream", bytes(6 * 1024 * 4))

    def heartbeat(number: int) -> Awaitable[object]:
        alive_us = round(ALIVE_S * 1_000_000)
        argument = {"now": 0, "id": f"gateway-{number}", "alive": alive_us, "ttl": GATEWAYS_TTL_S}
        return client.run_script(BEAT, [GATEWAYS_KEY], msgspec.msgpack.encode(argument))

    periodic: tuple[tuple[str, float, Callable[[int], Awaitable[object]]], ...] = (
        ("heartbeat", HEARTBEAT_S, heartbeat),
        ("version of keys and tenants", LOOK_EVERY_S, lambda _: tenants.look()),
        ("fingerprint of an upstream", FOLLOW_EVERY_S, lambda _: client.execute("HGET", SPACES, "upstream")),
    )
    for name, every_s, send in periodic:
        # A first pass registers all gateways.
        for number in range(gateways):
            await send(number)
        before_s = await _redis_cpu_s(client)
        for number in range(gateways):
            await send(number)
        cost_us = (await _redis_cpu_s(client) - before_s) / gateways * 1e6
        note = f"every {every_s:g} s; 1,000 gateways: {cost_us * gateways / every_s / 1e4:.1f} % of a core"
        findings.append(Finding(f"CPU of Redis per {name}, µs", cost_us, None, note))
    await client.aclose()
    return findings


async def _redis_cpu_s(client: RedisClient) -> float:
    info = await client.execute("INFO", "cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])
