"""Quotas in Redis under many gateways: what is admitted beyond a limit, and what admission costs.

    .venv/bin/python -m loadtest.quotas

Starts a redis-server of its own (the one on the path) and as many processes as asked, each with its own
ledger; every process drives its share of the callers. Prints one table and, with --json, the figures.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter, defaultdict

import msgspec

from gateway.errors import QuotaExceeded
from gateway.quotas.ledger import Ask, Ledger, MemoryLedger
from gateway.quotas.limits import SECOND_US, Cost, parse_limit
from gateway.quotas.redis_door import RedisDoor
from gateway.quotas.redis_ledger import RedisLedger, Rules

PORT = 16399
LIMITS = (parse_limit("tokens_per_minute", 200_000), parse_limit("tokens_per_day", 400_000))


class Told(msgspec.Struct):
    """What one process saw."""

    admitted: list[tuple[str, float, int]]  # tenant, when on Redis' clock, tokens as settled
    refused: int
    refused_with_room: int
    cpu_s: float
    wall_s: float


async def drive(ledger: Ledger, calls: int, callers: int, tenants: int, seed: int) -> Told:
    """Random costs from so many callers at once; each settles half of what it reserved, at random."""
    dice = random.Random(seed)  # noqa: S311 - a seeded load
    told = Told([], 0, 0, 0.0, 0.0)
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            tenant, cost = f"tenant-{dice.randrange(tenants)}", dice.randrange(1, 400)
            ask = Ask(f"{seed}-{number}", tenant, LIMITS, Cost(tokens=cost), 60 * SECOND_US, "model")
            try:
                taken = await ledger.reserve(ask)
            except QuotaExceeded as error:
                told.refused += 1
                room = int(error.headers["x-ratelimit-remaining-tokens"])
                told.refused_with_room += room >= cost
                continue
            actual = cost if dice.random() < 0.5 else cost // 2
            await asyncio.sleep(dice.random() / 200)
            await ledger.settle(taken, Cost(tokens=actual))
            told.admitted.append((tenant, taken.at_us / SECOND_US, actual))

    cpu_s, wall_s = time.process_time(), time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    told.cpu_s, told.wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return told


def gateway(
    calls: int, callers: int, tenants: int, seed: int, results: "multiprocessing.Queue[bytes]"
) -> None:
    """One process with a ledger of its own."""

    async def run() -> Told:
        door = RedisDoor(f"redis://127.0.0.1:{PORT}/0", timeout_s=5)
        ledger = RedisLedger(door, Rules(), f"gateway-{seed}", lambda _: None)
        try:
            return await drive(ledger, calls, callers, tenants, seed)
        finally:
            await ledger.aclose()

    results.put(msgspec.msgpack.encode(asyncio.run(run())))


def beyond(admitted: list[tuple[str, float, int]]) -> Counter[str]:
    """Tokens admitted beyond what each limit promises, over all tenants and spans."""
    of_tenant: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for tenant, at_s, tokens in admitted:
        of_tenant[tenant].append((at_s, tokens))
    over: Counter[str] = Counter()
    minute, day = (limit.amount for limit in LIMITS)
    for calls in of_tenant.values():
        over["tokens_per_day"] += max(0, sum(tokens for _, tokens in calls) - day)
        # The debt of a bucket that refills evenly: past the amount, some span held too much.
        debt, last_s, worst = 0.0, 0.0, 0.0
        for at_s, tokens in sorted(calls):
            debt = max(0.0, debt - (at_s - last_s) * minute / 60) + tokens
            last_s, worst = at_s, max(worst, debt)
        over["tokens_per_minute"] += max(0, round(worst - minute))
    return over


def exactness(calls: int, processes: int, callers: int, tenants: int) -> dict[str, object]:
    """All processes at once on one Redis."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[bytes] = context.Queue()
    shares = (calls // processes, callers // processes, tenants)
    started_s = time.perf_counter()
    running = [context.Process(target=gateway, args=(*shares, n, results)) for n in range(processes)]
    for one in running:
        one.start()
    told = [msgspec.msgpack.decode(results.get(timeout=300), type=Told) for _ in running]
    for one in running:
        one.join(10)
    admitted = [call for one in told for call in one.admitted]
    refused = sum(one.refused for one in told)
    return {
        "calls": calls,
        "admitted": len(admitted),
        "refused": refused,
        "tokens_beyond": dict(beyond(admitted)),
        "refused_while_there_was_room": sum(one.refused_with_room for one in told),
        "calls_per_s": round(calls / (time.perf_counter() - started_s)),
    }


async def cost(repeats: int) -> dict[str, list[float]]:
    """CPU in this process for one reserve and settle, with 32 callers: µs, each repeat."""
    found: dict[str, list[float]] = {"memory": [], "redis": []}
    for seed in range(repeats):
        door = RedisDoor(f"redis://127.0.0.1:{PORT}/0", timeout_s=5)
        ledgers: dict[str, Ledger] = {
            "memory": MemoryLedger(),
            "redis": RedisLedger(door, Rules(), "cost", lambda _: None),
        }
        for name, ledger in ledgers.items():
            told = await drive(ledger, 4000, 32, 50, seed=1000 + seed)
            found[name].append(round(told.cpu_s / 4000 * 1e6, 1))
        await ledgers["redis"].aclose()
    return found


def main() -> None:
    """Run both and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--tenants", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    executable = shutil.which("redis-server")
    if executable is None:
        parser.error("no redis-server on the path")
    with tempfile.TemporaryDirectory() as folder:
        command = [executable, "--port", str(PORT), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            time.sleep(0.5)
            exact = exactness(options.calls, options.processes, options.callers, options.tenants)
            costs = asyncio.run(cost(5))
        finally:
            server.terminate()
            server.wait(10)
    if options.json:
        print(json.dumps({"exactness": exact, "cost_us": costs}))
        return
    for name, value in exact.items():
        print(f"{name:32} {value}")
    for name, values in costs.items():
        print(f"CPU a call, {name:20} {min(values)}-{max(values)} µs (median {sorted(values)[2]})")


if __name__ == "__main__":
    main()
