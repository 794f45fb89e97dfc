"""Scenarios with trouble: replicas that die, hang or crawl, one or all of them; and a tenant's poison."""

import asyncio
import contextlib
import http.client

import msgspec

from backends.checkpoints import DEFAULT_MODEL, locate_checkpoint
from loadtest import servers
from loadtest.generator import Sample
from loadtest.servers import Server
from loadtest.stage import OTHER_KEY, Finding, Scenario, Shape, Stage, failed, statuses

_ATTEMPTS = "gateway_attempts_total"
_POISON = "poison"
# An attempt has at most half of it while another replica could be tried.
_PATIENT = {"x-timeout-s": "4"}


async def dead_replica(stage: Stage) -> list[Finding]:
    """One of three replicas dies under 200 calls a second; baseline: before it did."""
    return await _disturbed(stage, "dead_replica", {"die": True})


async def hung_replica(stage: Stage) -> list[Finding]:
    """One of three replicas takes calls and answers none."""
    return await _disturbed(stage, "hung_replica", {"hang": True})


async def slow_upstream(stage: Stage) -> list[Finding]:
    """One of three replicas becomes twenty times slower."""
    return await _disturbed(stage, "slow_upstream", {"slow": 20.0})


async def _disturbed(stage: Stage, name: str, wish: dict[str, object]) -> list[Finding]:
    stubs = [stage.stub("--base-ms", "5", "--parallel", "8") for _ in range(3)]
    gateway = stage.gateway(*stubs, settings=", attempt_timeout_s: 2")
    before = await stage.open(gateway, 200)
    for stub in stubs:
        servers.control(stub, reset=True)

    async def disturb() -> int:
        await asyncio.sleep(stage.seconds / 3)
        got = servers.stats(stubs[0]).requests
        _disturb(stubs[0], wish)
        return got

    sample, got = await asyncio.gather(stage.open(gateway, 200), disturb())
    if "die" not in wish:
        got = servers.stats(stubs[0]).requests
    attempts = got + sum(servers.stats(stub).requests for stub in stubs[1:])
    return [
        failed(name, before, sample),
        Finding(name, "p50 ms", before.p50_ms, sample.p50_ms),
        Finding(name, "p99 ms", before.p99_ms, sample.p99_ms),
        Finding(name, "attempts a call", 1.0, round(attempts / sample.sent, 3)),
    ]


async def all_dead(stage: Stage) -> list[Finding]:
    """All of three replicas die under 200 calls a second; from then on there is nothing but refusals."""
    return await _without_any(stage, "all_dead", {"die": True})


async def all_hung(stage: Stage) -> list[Finding]:
    """All of three replicas take calls and answer none; callers have four seconds."""
    return await _without_any(stage, "all_hung", {"hang": True})


async def _without_any(stage: Stage, name: str, wish: dict[str, object]) -> list[Finding]:
    stubs = [stage.stub("--base-ms", "5", "--parallel", "8") for _ in range(3)]
    gateway = stage.gateway(*stubs, settings=", attempt_timeout_s: 2")
    patient = msgspec.structs.replace(gateway.target, headers=gateway.target.headers | _PATIENT)
    before = await stage.open(gateway, 200, target=patient)
    for stub in stubs:
        _disturb(stub, wish)
    attempts = servers.counted(gateway, _ATTEMPTS)
    sample = await stage.open(gateway, 200, target=patient)
    attempts = servers.counted(gateway, _ATTEMPTS) - attempts
    told = f"{statuses(sample)}, {sample.unadvised} without retry-after"
    return [
        failed(name, before, sample),
        Finding(name, "p99 ms of what was answered or refused", before.p99_ms, sample.refused_ms, told),
        Finding(name, "attempts a call", 1.0, round(attempts / sample.sent, 3)),
    ]


def _disturb(stub: Server, wish: dict[str, object]) -> None:
    # One that dies does not say so.
    with contextlib.suppress(OSError, http.client.HTTPException):
        servers.control(stub, **wish)


async def poison(stage: Stage) -> list[Finding]:
    """A neighbour's 20 calls a second spoil every batch that they are in; baseline: they are good ones."""
    stubs = [stage.stub(*_BUSY, "--refuses", _POISON)]
    return await _beside(stage, "poison", stubs, rate=20)


async def deadly(stage: Stage) -> list[Finding]:
    """A neighbour's call each two seconds takes down whatever replica reads it, for half a second."""
    stubs = [stage.stub(*_BUSY, "--dies-of", _POISON, "--down-ms", "500") for _ in range(3)]
    return await _beside(stage, "deadly", stubs, rate=0.5)


# Where a batch costs little more than one text, so that calls of both tenants travel together.
_BUSY = ("--base-ms", "20", "--input-ms", "0.25", "--parallel", "2")


async def _beside(stage: Stage, name: str, stubs: list[Server], rate: float) -> list[Finding]:
    """A victim with 200 calls a second beside a neighbour with good texts, and then with poison."""
    tokenizer = f", tokenizer: '{locate_checkpoint(DEFAULT_MODEL)}', in_flight_batches: 2"
    gateway = stage.gateway(*stubs, settings=tokenizer)
    neighbour = servers.bearer(gateway.target.port, OTHER_KEY)

    async def run(shape: Shape) -> tuple[Sample, Sample, float]:
        attempts = servers.counted(gateway, _ATTEMPTS)
        victim, other = await asyncio.gather(
            stage.open(gateway, 200), stage.open(gateway, rate, shape, neighbour)
        )
        made = servers.counted(gateway, _ATTEMPTS) - attempts
        return victim, other, round(made / (victim.sent + other.sent), 3)

    # The first texts that a tokenizer counts take it a while.
    await run(Shape(arrivals="constant"))
    good, _, good_attempts = await run(Shape(arrivals="constant"))
    bad, other, bad_attempts = await run(Shape(word=_POISON, arrivals="constant"))
    return [
        failed(name, good, bad),
        Finding(name, "victim's p50 ms", good.p50_ms, bad.p50_ms),
        Finding(name, "victim's p99 ms", good.p99_ms, bad.p99_ms, f"the neighbour got {statuses(other)}"),
        Finding(name, "attempts a call of both", good_attempts, bad_attempts),
    ]


TROUBLES: dict[str, Scenario] = {
    one.__name__: one
    for one in (dead_replica, hung_replica, slow_upstream, all_dead, all_hung, poison, deadly)
}
