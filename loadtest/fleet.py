"""What many gateways ask of Redis while nobody calls them: CPU of Redis for each look, and for all of them.

    .venv/bin/python -m loadtest.fleet

A redis-server of its own, the one on the path. Each look is asked for as gateways do, once for every gateway
of the fleet, one after the other over a connection that is kept: no trip is shared, as between machines.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

import msgspec

from gateway.quotas.heartbeat import ALIVE_S, BEAT, GATEWAYS_KEY, GATEWAYS_TTL_S
from gateway.quotas.redis_ledger import HEARTBEAT_S
from gateway.store.redis_client import RedisClient
from gateway.tenants.store import LOOK_EVERY_S, TenantStore
from gateway.vector_spaces.space import FOLLOW_EVERY_S
from gateway.vector_spaces.store import SPACES
from loadtest.processes import group
from loadtest.servers import start_redis

TIMEOUT_S = 5.0
# Six canaries of 1,024 numbers in float32.
FINGERPRINT_BYTES = 6 * 1024 * 4


class Look(msgspec.Struct, frozen=True):
    """Something that each gateway asks every so often."""

    name: str
    every_s: float
    ask: Callable[[int], Awaitable[object]]


def looks(door: RedisClient) -> list[Look]:
    """All that an idle gateway asks, given its number."""
    tenants = TenantStore(door)

    def beat(number: int) -> Awaitable[bytes]:
        alive_us = round(ALIVE_S * 1_000_000)
        argument = {"now": 0, "id": f"gateway-{number}", "alive": alive_us, "ttl": GATEWAYS_TTL_S}
        return door.run_script(BEAT, [GATEWAYS_KEY], msgspec.msgpack.encode(argument))

    return [
        Look("heartbeat", HEARTBEAT_S, beat),
        Look("keys' version", LOOK_EVERY_S, lambda _: tenants.version()),
        Look(
            "fingerprint of an upstream", FOLLOW_EVERY_S, lambda _: door.execute("HGET", SPACES, "upstream")
        ),
    ]


async def redis_cpu_s(door: RedisClient) -> float:
    """What Redis has used until now."""
    told = await door.execute("INFO", "cpu")
    return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])


async def cost_us(door: RedisClient, look: Look, gateways: int) -> float:
    """CPU of Redis for one look, in µs, while all of the fleet are known."""
    for number in range(gateways):
        await look.ask(number)
    before_s = await redis_cpu_s(door)
    for number in range(gateways):
        await look.ask(number)
    return (await redis_cpu_s(door) - before_s) / gateways * 1e6


async def measure(url: str, gateways: int, repeats: int) -> None:
    """Print a line for each look, and one for all."""
    door = RedisClient(url, TIMEOUT_S)
    total = 0.0
    await door.execute("HSET", SPACES, "upstream", bytes(FINGERPRINT_BYTES))
    print(f"{gateways} gateways of one worker and one upstream that embeds")
    for look in looks(door):
        costs = sorted([await cost_us(door, look, gateways) for _ in range(repeats)])
        a_second = gateways / look.every_s
        share = a_second * median(costs) / 1e6
        total += share
        spread = f"{costs[0]:.0f}-{costs[-1]:.0f}"
        print(f"{look.name:28} {a_second:7.0f}/s  {median(costs):4.0f} µs ({spread})  {share:.1%} of a core")
    print(f"{'all of it':28} {total:.1%} of a core")
    await door.aclose()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="what idle gateways ask of Redis")
    parser.add_argument("--gateways", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, group() as running:
        redis, url = start_redis(Path(folder))
        running.append(redis)
        asyncio.run(measure(url, arguments.gateways, arguments.repeats))


if __name__ == "__main__":
    main()
