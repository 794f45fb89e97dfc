"""What admission costs: CPU of the gateway and of Redis for one call, and how long that waits.

    .venv/bin/python -m loadtest.admission

One process on one core, a redis-server of its own (the one on the path) on another. A call reserves, waits
up to five milliseconds as if it were served, and settles. The row "driver" is what the measure itself costs.
"""

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import msgspec
from redis import Redis

from gateway.quotas.ledger import Ledger, MemoryLedger, QuotaRequest, Reservation
from gateway.quotas.limits import SECOND_US, Cost, LimitStatus, parse_limit
from gateway.quotas.redis_ledger import OutagePolicy, RedisLedger
from gateway.store.redis_client import RedisClient

PORT = 16398
LIMITS = (parse_limit("tokens_per_minute", 2_000_000_000), parse_limit("tokens_per_day", 2_000_000_000))
SERVED_S = 0.005


class Measured(msgspec.Struct):
    """Of one run, for each call: CPU here and in Redis, and how long the caller waited, all in µs."""

    cpu_us: float
    redis_us: float
    waited_p50_us: float
    waited_p99_us: float


class Driver(MemoryLedger):
    """Counts nothing: what is left is the cost of asking."""

    async def reserve(self, ask: QuotaRequest) -> Reservation:
        """Always."""
        return Reservation(ask, ())

    def settle(self, reservation: Reservation, actual: Cost) -> tuple[LimitStatus, ...]:
        """Nothing."""
        del reservation, actual
        return ()


async def drive(ledger: Ledger, calls: int, callers: int, tenants: int) -> list[float]:
    """How long each call waited for the ledger, in seconds, shortest first."""
    dice = random.Random(calls)  # noqa: S311 - a seeded load
    numbers = iter(range(calls))
    waited: list[float] = []

    async def caller() -> None:
        for number in numbers:
            tenant, tokens = f"tenant-{dice.randrange(tenants)}", dice.randrange(1, 400)
            asked_s = time.perf_counter()
            ask = QuotaRequest(
                f"{id(waited)}-{number}", tenant, LIMITS, Cost(1, tokens, 1), 60 * SECOND_US, "model"
            )
            taken = await ledger.reserve(ask)
            reserved_s = time.perf_counter()
            await asyncio.sleep(dice.random() * SERVED_S)
            used_s = time.perf_counter()
            ledger.settle(taken, Cost(1, tokens // 2, 1))
            waited.append(reserved_s - asked_s + time.perf_counter() - used_s)

    await asyncio.gather(*(caller() for _ in range(callers)))
    await ledger.flush()
    return sorted(waited)


async def measure(ledger: Ledger, redis: Redis, calls: int, callers: int, tenants: int) -> Measured:
    """One run, after a short one that warms everything up."""
    await drive(ledger, 200, callers, tenants)
    redis_s, cpu_s = used_by(redis), time.process_time()
    waited = await drive(ledger, calls, callers, tenants)
    cpu_s, redis_s = time.process_time() - cpu_s, used_by(redis) - redis_s
    p50, p99 = waited[len(waited) // 2], waited[len(waited) * 99 // 100]
    return Measured(cpu_s / calls * 1e6, redis_s / calls * 1e6, p50 * 1e6, p99 * 1e6)


def used_by(redis: Redis) -> float:
    """Seconds of CPU that the server has used."""
    told = redis.info("cpu")
    return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])


async def compare(repeats: int, callers: int, tenants: int) -> dict[str, list[Measured]]:
    """Every ledger in turn, so many times."""
    found: dict[str, list[Measured]] = {"driver": [], "memory": [], "redis": []}
    calls = 500 if callers == 1 else 6000
    redis = Redis(port=PORT)
    for _ in range(repeats):
        door = RedisClient(f"redis://127.0.0.1:{PORT}/0", timeout_s=5)
        shared = RedisLedger(door, OutagePolicy(), "cost", lambda _: None)
        ledgers: dict[str, Ledger] = {"driver": Driver(), "memory": MemoryLedger(), "redis": shared}
        for name, ledger in ledgers.items():
            found[name].append(await measure(ledger, redis, calls, callers, tenants))
        await shared.aclose()
    redis.close()
    return found


@contextmanager
def server(cores: Sequence[int]) -> Iterator[None]:
    """A redis-server on the last of these cores, and this process on the first."""
    executable = shutil.which("redis-server")
    if executable is None:
        raise SystemExit("no redis-server on the path")
    with tempfile.TemporaryDirectory() as folder:
        command = [executable, "--port", str(PORT), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            os.sched_setaffinity(running.pid, cores[-1:])
            os.sched_setaffinity(0, cores[:1])
            time.sleep(0.5)
            yield
        finally:
            running.terminate()
            running.wait(10)


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("callers tenants ledger   CPU µs (least-most)  Redis µs  waited p50  p99 µs")
    with server(sorted(os.sched_getaffinity(0))):
        for callers, tenants in ((1, 50), (32, 1), (32, 50)):
            for name, runs in asyncio.run(compare(options.repeats, callers, tenants)).items():
                print(f"{callers:7} {tenants:7} {name:8} {row(runs)}")


def row(runs: Sequence[Measured]) -> str:
    """Medians of the runs, and how far the CPU spreads."""
    cpu = sorted(run.cpu_us for run in runs)
    middle = [
        median(getattr(run, name) for run in runs) for name in ("redis_us", "waited_p50_us", "waited_p99_us")
    ]
    spread = f"{median(cpu):.1f} ({cpu[0]:.1f}-{cpu[-1]:.1f})"
    return f"{spread:>19} {middle[0]:9.1f} {middle[1]:11.0f} {middle[2]:7.0f}"


if __name__ == "__main__":
    main()
