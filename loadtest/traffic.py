"""Scenarios of ordinary traffic: single calls, bulk, both, neighbours, and calls of unusual size."""

import asyncio

from loadtest import servers
from loadtest.corpora import BATCH, CallShape
from loadtest.generator import LoadTarget
from loadtest.testbed import OTHER_KEY, Finding, Testbed, cpu, failed

_BULK = {"x-priority": "bulk"}
# An upstream for which a batch costs little more than one text.
_BATCHING = ("--base-ms", "4", "--input-ms", "0.25", "--parallel")


async def trickle(testbed: Testbed) -> list[Finding]:
    """Send 50 single texts per second to an upstream that takes 5 ms; baseline: directly."""
    stub = testbed.stub("--base-ms", "5", "--parallel", "8")
    gateway = testbed.gateway(stub)
    direct, through = await testbed.open(stub, 50), await testbed.open(gateway, 50)
    return [
        Finding("p50 ms", through.p50_ms, direct.p50_ms),
        Finding("p99 ms", through.p99_ms, direct.p99_ms),
    ]


async def callers(testbed: Testbed) -> list[Finding]:
    """Raise the number of callers of single texts, one request at a time upstream; baseline: directly."""
    stub = testbed.stub(*_BATCHING, "1")
    gateway = testbed.gateway(stub)
    findings = []
    for count in (1, 8, 32, 128):
        direct, through = await testbed.closed(stub, count), await testbed.closed(gateway, count)
        findings.append(Finding(f"calls/s, {count} callers", through.per_s, direct.per_s))
    return findings


async def identical(testbed: Testbed) -> list[Finding]:
    """Let 32 callers of one tenant send the same text at once; baseline: each sends its own."""
    stub = testbed.stub(*_BATCHING, "1")
    gateway = testbed.gateway(stub)
    found = []
    for shape in (CallShape(), CallShape(identical=32)):
        servers.control(stub, reset=True)
        sample = await testbed.closed(gateway, 32, shape)
        stats = servers.stats(stub)
        found.append((sample, stats.requests / sample.sent, stats.inputs / sample.sent))
    (apart, *apart_upstream), (same, *same_upstream) = found
    return [
        Finding("calls/s", same.per_s, apart.per_s, cpu(gateway, same)),
        Finding("upstream requests per call", same_upstream[0], apart_upstream[0]),
        Finding("inputs computed per call", same_upstream[1], apart_upstream[1]),
        failed(same, apart),
    ]


async def bulk(testbed: Testbed) -> list[Finding]:
    """Run eight callers with 32 texts per call; baseline: directly."""
    stub = testbed.stub(*_BATCHING, "2")
    gateway = testbed.gateway(stub)
    direct, through = await testbed.closed(stub, 8, BATCH), await testbed.closed(gateway, 8, BATCH)
    return [
        Finding("inputs/s", through.per_s * 32, direct.per_s * 32, cpu(gateway, through)),
        Finding("p50 ms", through.p50_ms, direct.p50_ms),
    ]


async def both(testbed: Testbed) -> list[Finding]:
    """Run a trickle of single texts next to sixteen bulk callers; baseline: the same two, directly."""
    stub = testbed.stub("--base-ms", "4", "--input-ms", "0.5", "--parallel", "2")
    gateway = testbed.gateway(stub, upstream=", in_flight_batches: 2")
    alone = await testbed.open(gateway, 20)
    direct, direct_bulk = await asyncio.gather(testbed.open(stub, 20), testbed.closed(stub, 16, BATCH))
    other = servers.with_key(gateway.target.port, OTHER_KEY)
    target = LoadTarget(other.port, other.headers | _BULK)
    through, through_bulk = await asyncio.gather(
        testbed.open(gateway, 20), testbed.closed(gateway, 16, BATCH, target)
    )
    return [
        Finding("trickle's p95 ms", through.p95_ms, direct.p95_ms, f"without bulk {alone.p95_ms} ms"),
        Finding("bulk inputs/s", through_bulk.per_s * 32, direct_bulk.per_s * 32),
    ]


async def noisy_neighbour(testbed: Testbed) -> list[Finding]:
    """Run a victim with one call at a time next to 200 callers of another tenant; baseline: the victim alone.

    The gateway keeps the last slot of a window for tenants without any, and writes at most one reply of a
    joined batch per turn of the event loop while another tenant is active.
    """
    stub = testbed.stub("--base-ms", "50", "--parallel", "8")
    gateway = testbed.gateway(stub, upstream=", in_flight_batches: 8")
    flood = servers.with_key(gateway.target.port, OTHER_KEY)
    alone = await testbed.closed(gateway, 1)
    victim, flooding = await asyncio.gather(
        testbed.closed(gateway, 1), testbed.closed(gateway, 200, target=flood)
    )
    direct, _ = await asyncio.gather(testbed.closed(stub, 1), testbed.closed(stub, 200))
    note = f"directly, without the gateway: {direct.p95_ms:.0f} ms; flood {flooding.per_s:.0f} calls/s"
    return [Finding("victim's p95 ms", victim.p95_ms, alone.p95_ms, note)]


async def batch_replies(testbed: Testbed) -> list[Finding]:
    """Send 32 texts per call, 1,024 dimensions, to an upstream that takes no time; baseline: directly."""
    stub = testbed.stub()
    gateway = testbed.gateway(stub)
    findings = []
    for name, shape in (("base64", BATCH), ("floats", CallShape(32, "float"))):
        direct, through = await testbed.closed(stub, 4, shape), await testbed.closed(gateway, 4, shape)
        findings.append(Finding(f"calls/s, {name}", through.per_s, direct.per_s, cpu(gateway, through)))
    return findings


async def huge_replies(testbed: Testbed) -> list[Finding]:
    """Send 1,000 texts per call for vectors of 4,096 dimensions, 22 MB of base64; baseline: directly."""
    stub = testbed.stub("--dimensions", "4096", "--items", "1000", "--permits", "4000")
    gateway = testbed.gateway(stub)
    shape = CallShape(1000)
    direct, through = await testbed.closed(stub, 1, shape), await testbed.closed(gateway, 1, shape)
    return [
        Finding("p50 ms", through.p50_ms, direct.p50_ms, cpu(gateway, through)),
        failed(through, direct),
        Finding("RSS MB", through.rss_mb[gateway.name]),
    ]


async def many_inputs(testbed: Testbed) -> list[Finding]:
    """Send 2,048 inputs in one call to a TEI with default limits; baseline: eight callers with 32 each."""
    stub = testbed.stub(*_BATCHING, "2")
    gateway = testbed.gateway(stub)
    direct = await testbed.closed(stub, 8, BATCH)
    servers.control(stub, reset=True)
    through = await testbed.closed(gateway, 1, CallShape(2048))
    stats = servers.stats(stub)
    note = (
        f"largest request {stats.most_inputs} inputs, refused {stats.refused or 0}, "
        f"wrong order {through.wrong}"
    )
    return [
        # Few calls end within the period: their duration is more precise than their number.
        Finding("inputs/s", 2048 / through.p50_ms * 1000, direct.per_s * 32, note),
        failed(through, direct),
    ]
