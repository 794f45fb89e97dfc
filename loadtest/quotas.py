"""Quotas in Redis under many gateways: what is admitted beyond a limit, and what admission costs.

    .venv/bin/python -m loadtest.quotas [--kill]

Starts a redis-server of its own (the one on the path) and as many processes as asked, each with its own
ledger; every process drives its share of the callers. With --kill one of them gets SIGKILL when half of its
calls are done, and what it held is followed until it is back. Prints one table and, with --json, the figures.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import msgspec

from gateway.errors import QuotaExceeded
from gateway.quotas.ledger import LEASE_US, NOTHING, Ledger, MemoryLedger, QuotaRequest, Reservation
from gateway.quotas.limits import SECOND_US, WINDOWS_US, Cost, Limit, parse_limit
from gateway.quotas.redis_ledger import OutagePolicy, RedisLedger
from gateway.store.redis_client import RedisClient

PORT = 16399


class Load(msgspec.Struct, frozen=True):
    """What each call meets. deadline_s: of its reservation, before the lease. holds_s: at most, in flight."""

    limits: tuple[Limit, ...]
    deadline_s: float
    holds_s: float


PLAIN = Load((parse_limit("tokens_per_minute", 200_000), parse_limit("tokens_per_day", 400_000)), 45, 0.005)
# Calls that last and limits that bind from end to end: whoever is killed has much in its hands.
KILLED = Load(
    (
        parse_limit("tokens_per_second", 3_000),
        parse_limit("tokens_per_day", 40_000),
        parse_limit("requests_in_flight", 4),
    ),
    5,
    0.2,
)


class Told(msgspec.Struct):
    """What one process saw."""

    refused: int
    refused_with_room: int
    cpu_s: float


class ConnectionHandle(msgspec.Struct, frozen=True):
    """One line of a process' book. at_us: on Redis' clock. tokens: as reserved, or as settled."""

    kind: Literal["done", "admitted", "settling"]
    id: str
    at_s: float
    tenant: str = ""
    at_us: int = 0
    tokens: int = 0


class Book:
    """What a process writes down as it goes; what is in it survives SIGKILL."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def write(self, line: ConnectionHandle) -> None:
        """At once, unbuffered."""
        os.write(self._fd, msgspec.json.encode(line) + b"\n")


class Made(msgspec.Struct, frozen=True):
    """An admitted call. used: what it is known to have used, at most. to_s: None if it never ended."""

    id: str
    tenant: str
    at_us: int
    reserved: int
    used: int
    from_s: float
    to_s: float | None


async def drive(
    ledger: Ledger, load: Load, calls: int, callers: int, tenants: int, seed: int, book: Book | None = None
) -> Told:
    """Random costs from so many callers at once; each settles half of what it reserved, at random."""
    dice = random.Random(seed)  # noqa: S311 - a seeded load
    told = Told(0, 0, 0.0)
    numbers = iter(range(calls))
    expires_us = round(load.deadline_s * SECOND_US) + LEASE_US

    def note(
        kind: Literal["done", "admitted", "settling"], ask: QuotaRequest, at_us: int, tokens: int
    ) -> None:
        if book is not None:
            book.write(ConnectionHandle(kind, ask.id, time.time(), ask.tenant, at_us, tokens))

    async def caller() -> None:
        for number in numbers:
            tenant, cost = f"tenant-{dice.randrange(tenants)}", dice.randrange(1, 400)
            ask = QuotaRequest(
                f"{seed}-{number}", tenant, load.limits, Cost(tokens=cost), expires_us, "model"
            )
            if number % 100 == 0:
                note("done", ask, 0, number)
            try:
                taken = await ledger.reserve(ask)
            except QuotaExceeded as error:
                told.refused += 1
                told.refused_with_room += _had_room(error, cost)
                continue
            note("admitted", ask, taken.at_us, cost)
            actual = cost if dice.random() < 0.5 else cost // 2
            await asyncio.sleep(dice.random() * load.holds_s)
            note("settling", ask, 0, actual)
            ledger.settle(taken, Cost(tokens=actual))

    cpu_s = time.process_time()
    await asyncio.gather(*(caller() for _ in range(callers)))
    await ledger.flush()
    told.cpu_s = time.process_time() - cpu_s
    return told


def _had_room(error: QuotaExceeded, cost: int) -> bool:
    tokens = int(error.headers["x-ratelimit-remaining-tokens"])
    slots = int(error.headers.get("x-ratelimit-remaining-requests", "1"))
    return tokens >= cost and slots >= 1


def gateway(
    load: Load,
    shares: tuple[int, int, int],
    seed: int,
    book: Path,
    results: "multiprocessing.Queue[bytes]",
) -> None:
    """One process with a ledger of its own. shares: calls, callers, tenants."""

    async def run() -> Told:
        ledger = RedisLedger(door(), OutagePolicy(), f"gateway-{seed}", lambda _: None)
        keeping = asyncio.create_task(ledger.maintain())
        try:
            return await drive(ledger, load, *shares, seed, Book(book))
        finally:
            keeping.cancel()
            await ledger.aclose()

    results.put(msgspec.msgpack.encode(asyncio.run(run())))


def door() -> RedisClient:
    """To the run's own server; with all the time that a crowded machine may need."""
    return RedisClient(f"redis://127.0.0.1:{PORT}/0", timeout_s=5)


def read(book: Path) -> list[Made]:
    """What one process admitted; what it was not seen to settle counts in full."""
    admitted: dict[str, ConnectionHandle] = {}
    settling: dict[str, ConnectionHandle] = {}
    for text in book.read_bytes().splitlines():
        line = msgspec.json.decode(text, type=ConnectionHandle)
        {"admitted": admitted, "settling": settling, "done": {}}[line.kind][line.id] = line
    return [
        Made(
            id_,
            one.tenant,
            one.at_us,
            one.tokens,
            settling[id_].tokens if id_ in settling else one.tokens,
            one.at_s,
            settling[id_].at_s if id_ in settling else None,
        )
        for id_, one in admitted.items()
    ]


def beyond(calls: Sequence[Made], limits: Sequence[Limit], end_s: float) -> Counter[str]:
    """What was admitted beyond each limit's promise, over all tenants and spans; end_s: of the last call."""
    of_tenant: dict[str, list[Made]] = defaultdict(list)
    for one in calls:
        of_tenant[one.tenant].append(one)
    over: Counter[str] = Counter()
    for limit in limits:
        for theirs in of_tenant.values():
            worst: float
            if limit.period == "in_flight":
                worst = _most_at_once([(one.from_s, one.to_s or end_s) for one in theirs])
            elif limit.period in WINDOWS_US:
                worst = _worst_debt(theirs, limit.amount * SECOND_US / WINDOWS_US[limit.period])
            else:
                worst = sum(one.used for one in theirs)
            over[limit.name] += max(0, round(worst - limit.amount))
    return over


def _worst_debt(calls: Sequence[Made], refill_per_s: float) -> float:
    """Of a bucket that refills evenly: past the amount, some span held too much."""
    debt, last_us, worst = 0.0, 0, 0.0
    for at_us, used in sorted((one.at_us, one.used) for one in calls):
        debt = max(0.0, debt - (at_us - last_us) / SECOND_US * refill_per_s) + used
        last_us, worst = at_us, max(worst, debt)
    return worst


def _most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """From the answer to the reserve until the settle is sent: a little less than the slot was held."""
    changes = sorted([(a, 1) for a, _ in spans] + [(b, -1) for _, b in spans])
    now, most = 0, 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def exactness(
    load: Load, calls: int, processes: int, callers: int, tenants: int, folder: Path, *, kill: bool
) -> dict[str, object]:
    """All processes at once on one Redis."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[bytes] = context.Queue()
    shares = (calls // processes, callers // processes, tenants)
    books = [folder / f"book-{n}" for n in range(processes)]
    started_s = time.perf_counter()
    running = [
        context.Process(target=gateway, args=(load, shares, n, book, results)) for n, book in enumerate(books)
    ]
    for one in running:
        one.start()
    killed_s = _kill_halfway(running[0], books[0], shares[0]) if kill else None
    alive = running[1:] if kill else running
    told = [msgspec.msgpack.decode(results.get(timeout=300), type=Told) for _ in alive]
    took_s = time.perf_counter() - started_s
    for one in running:
        one.join(10)
    made = [call for book in books for call in read(book)]
    done = sum(one.refused for one in told) + len(made)
    found: dict[str, object] = {
        "calls": done,
        "admitted": len(made),
        "refused": sum(one.refused for one in told),
        "beyond": dict(beyond(made, load.limits, killed_s or time.time())),
        "refused_while_there_was_room": sum(one.refused_with_room for one in told),
        "calls_per_s": round(done / took_s),
    }
    return found if killed_s is None else found | asyncio.run(returned(load, made, read(books[0]), killed_s))


def _kill_halfway(process: BaseProcess, book: Path, calls: int) -> float:
    """SIGKILL when half of its calls are done; when that was."""
    end_s = time.monotonic() + 300
    while time.monotonic() < end_s:
        if book.exists():
            lines = book.read_bytes().splitlines()[:-1]
            done = [msgspec.json.decode(line, type=ConnectionHandle) for line in lines if b'"done"' in line]
            if done and done[-1].tokens >= calls // 2:
                process.kill()
                return time.time()
        time.sleep(0.02)
    raise SystemExit("the run did not get to its middle")


async def returned(load: Load, made: list[Made], dead: list[Made], killed_s: float) -> dict[str, object]:
    """How what a killed process held comes back: slots by their lease, reservations as spent at their end."""
    left = [one for one in dead if one.to_s is None]
    way = door()
    ledger = RedisLedger(way, OutagePolicy(), "follower", lambda _: None)
    tenants = sorted({one.tenant for one in made})
    slots = [one for one in load.limits if one.period == "in_flight"]
    day = [one for one in load.limits if one.period == "day"]

    async def used(tenant: str, limit: Limit) -> int:
        """Of a limit, as a call of no cost sees it."""
        ask = QuotaRequest(os.urandom(8).hex(), tenant, (limit,), Cost(requests=1), LEASE_US, shadow=True)
        taken = await ledger.reserve(ask)
        ledger.settle(taken, NOTHING)
        await ledger.flush()
        mine = 1 if limit.period == "in_flight" else 0
        return limit.amount - taken.limit_statuses[0].remaining - mine

    async def total(limits: list[Limit]) -> int:
        return sum([await used(tenant, limit) for tenant in tenants for limit in limits])

    async def until(moment_s: float) -> None:
        await asyncio.sleep(max(0.0, moment_s - time.time()))

    held = await total(slots)
    while await total(slots) and time.time() < killed_s + 60:  # noqa: ASYNC110 - a lease's end tells nobody
        await asyncio.sleep(0.02)
    slots_s = time.time() - killed_s
    spent_before = await total(day)
    await until(killed_s + load.deadline_s + LEASE_US / SECOND_US + 0.5)
    spent = await total(day)
    for one in left:
        # A settlement that comes after the end must change nothing.
        ask = QuotaRequest(one.id, one.tenant, load.limits, Cost(tokens=one.reserved), LEASE_US)
        ledger.settle(Reservation(ask, ()), NOTHING)
        await ledger.flush()
    still_open = [int(await way.execute("HLEN", f"gw:{{{tenant}}}:open")) for tenant in tenants]
    after = await total(day)
    await ledger.aclose()
    return {
        "the_dead_one_held": f"{len(left)} calls, {sum(one.reserved for one in left)} tokens; slots {held}",
        "its_slots_were_free_after_s": round(slots_s, 2),
        "day_used_before_their_end": spent_before,
        "day_used_after_their_end": spent,
        "day_used_by_the_books": sum(one.used for one in made),
        "day_used_after_late_settlements": after,
        "reservations_still_open": sum(still_open),
    }


async def cost(repeats: int) -> dict[str, list[float]]:
    """CPU in this process for one reserve and settle, with 32 callers: µs, each repeat."""
    found: dict[str, list[float]] = {"memory": [], "redis": []}
    for seed in range(repeats):
        ledgers: dict[str, Ledger] = {
            "memory": MemoryLedger(),
            "redis": RedisLedger(door(), OutagePolicy(), "cost", lambda _: None),
        }
        for name, ledger in ledgers.items():
            told = await drive(ledger, PLAIN, 4000, 32, 50, seed=1000 + seed)
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
    parser.add_argument("--kill", action="store_true")
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
            exact = exactness(
                KILLED if options.kill else PLAIN,
                options.calls,
                options.processes,
                options.callers,
                options.tenants,
                Path(folder),
                kill=options.kill,
            )
            costs = {} if options.kill else asyncio.run(cost(5))
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
