"""Redis in every kind of trouble under constant load: what callers see, and what is logged.

    .venv/bin/python -m loadtest.outages [--json FILE] [--only frozen killed …]

Starts a stub TEI, a redis-server and one `gateway serve` with `when_unavailable: local`. Calls start at fixed
times, answered or not; a latency counts from the moment at which its call was due. Each trouble has three
seconds before it, a time of its own, and five seconds after.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from gateway.tenants.keyring import key_digest
from loadtest.serving import GatewayProcess, client, percentile, stub
from tests.quotas.redis_server import RedisServer

KEY = "outages-key"
CONFIG = """
listen: 127.0.0.1:0
logs: {{format: text, access: false}}
quotas: {{store: "{store}", when_unavailable: local}}
upstreams: {{stub: {{backend: tei, replicas: ["{stub}"]}}}}
models: {{m: {{upstream: stub}}}}
tenants:
  acme:
    keys: ["{digest}"]
    limits:
      requests_per_second: 10000
      tokens_per_minute: 100000000
      tokens_per_day: 1000000000
      requests_in_flight: 1000
"""
BEFORE_S, AFTER_S = 3.0, 5.0


class Trouble(msgspec.Struct, frozen=True):
    """begin, end: what is done to the server; lasts_s between them, 0 where there is nothing to end."""

    name: str
    begin: Callable[[RedisServer], object]
    end: Callable[[RedisServer], object] = lambda _: None
    lasts_s: float = 0.0


def _set(name: str, value: str) -> Callable[[RedisServer], object]:
    return lambda server: server.command("CONFIG", "SET", name, value)


def _restarted(server: RedisServer) -> None:
    server.kill()
    server.restart()


TROUBLES = (
    Trouble("frozen", RedisServer.freeze, RedisServer.thaw, 10),
    Trouble("killed", RedisServer.kill, RedisServer.restart, 4),
    Trouble("restarted", _restarted),
    Trouble("flushed", lambda server: server.command("FLUSHALL")),
    Trouble("scripts flushed", lambda server: server.command("SCRIPT", "FLUSH")),
    Trouble(
        "replica of nobody",
        lambda server: server.command("REPLICAOF", "127.0.0.1", "1"),
        lambda server: server.command("REPLICAOF", "NO", "ONE"),
        4,
    ),
    Trouble("too few replicas", _set("min-replicas-to-write", "1"), _set("min-replicas-to-write", "0"), 4),
    Trouble("memory full", _set("maxmemory", "1"), _set("maxmemory", "0"), 4),
)


class Call(msgspec.Struct, frozen=True):
    """One call: when it was due (seconds from the start), what it took from then, and what came back."""

    due_s: float
    took_s: float
    status: int
    mode: str


class Told(msgspec.Struct, frozen=True):
    """One trouble's calls, what was logged meanwhile, and from when to when it lasted."""

    trouble: str
    calls: list[Call]
    lines: list[str]
    from_s: float
    to_s: float


async def constant(web: httpx.AsyncClient, rate: int, seconds: float, started_s: float) -> list[Call]:
    """An open loop: a call every 1/rate seconds, however long the ones before it take."""
    loop = asyncio.get_running_loop()

    async def one(due_s: float) -> Call:
        try:
            reply = await web.post("/v1/embeddings", json={"input": "a text"})
            status, mode = reply.status_code, reply.headers.get("x-quota-mode", "")
        except httpx.HTTPError as error:
            status, mode = 0, type(error).__name__
        return Call(due_s, loop.time() - started_s - due_s, status, mode)

    running = []
    for number in range(round(rate * seconds)):
        due_s = number / rate
        await asyncio.sleep(started_s + due_s - loop.time())
        running.append(asyncio.create_task(one(due_s)))
    return await asyncio.gather(*running)


async def endure(trouble: Trouble, server: RedisServer, gateway: GatewayProcess, rate: int) -> Told:
    """Run the load through one trouble."""
    seen = len(gateway.lines)
    loop = asyncio.get_running_loop()
    async with client(gateway.url, KEY) as web:
        await asyncio.gather(*(web.post("/v1/embeddings", json={"input": "warm"}) for _ in range(8)))
        started_s = loop.time()
        total_s = BEFORE_S + trouble.lasts_s + AFTER_S
        load = asyncio.create_task(constant(web, rate, total_s, started_s))
        await asyncio.sleep(BEFORE_S)
        from_s = loop.time() - started_s
        await asyncio.to_thread(trouble.begin, server)
        await asyncio.sleep(trouble.lasts_s)
        to_s = loop.time() - started_s
        await asyncio.to_thread(trouble.end, server)
        calls = await load
    return Told(trouble.name, calls, gateway.lines[seen:], from_s, to_s)


def phases(told: Told) -> dict[str, list[Call]]:
    """The second before, the first second, until it was over, and after."""
    spans = {
        "before": (told.from_s - 1, told.from_s),
        "first second": (told.from_s, told.from_s + 1),
        "until over": (told.from_s + 1, told.to_s),
        "after": (max(told.to_s, told.from_s + 1), float("inf")),
    }
    return {name: [one for one in told.calls if a <= one.due_s < b] for name, (a, b) in spans.items()}


def summary(told: Told) -> dict[str, Any]:
    """The figures of one trouble. degraded_for_s: from its start to the first, from its end to the last."""
    degraded = [one.due_s for one in told.calls if one.mode == "degraded"]
    timing = {
        name: {
            "calls": len(calls),
            "p50_ms": round(percentile([one.took_s * 1000 for one in calls], 50), 1),
            "p99_ms": round(percentile([one.took_s * 1000 for one in calls], 99), 1),
            "most_ms": round(max((one.took_s * 1000 for one in calls), default=0), 1),
            "degraded": sum(one.mode == "degraded" for one in calls),
        }
        for name, calls in phases(told).items()
    }
    return {
        "trouble": told.trouble,
        "calls": len(told.calls),
        "statuses": dict(Counter(str(one.status) for one in told.calls)),
        "server_errors": sum(one.status >= 500 or one.status == 0 for one in told.calls),
        "phases": timing,
        "degraded_for_s": [round(d, 2) for d in (min(degraded) - told.from_s, max(degraded) - told.to_s)]
        if degraded
        else None,
        "lines": told.lines,
    }


def show(found: Sequence[dict[str, Any]]) -> None:
    """One row a trouble, then what was logged."""
    names = ("before", "first second", "until over", "after")
    print(f"{'':18} {'calls':>6} {'5xx':>4} " + " ".join(f"{name:>14}" for name in names) + "   degraded")
    for one in found:
        cells = [
            f"{one['phases'][name]['p50_ms']:.1f}/{one['phases'][name]['p99_ms']:.1f}"
            if one["phases"][name]["calls"]
            else "-"
            for name in names
        ]
        degraded = sum(phase["degraded"] for phase in one["phases"].values())
        print(
            f"{one['trouble']:18} {one['calls']:6} {one['server_errors']:4} "
            + " ".join(f"{cell:>14}" for cell in cells)
            + f"   {degraded} {one['degraded_for_s'] or ''}"
        )
    print("p50/p99 in ms. degraded: calls, and [first after it began, last after it ended] in s. Logged:")
    for one in found:
        print(f"  {one['trouble']}: {len(one['lines'])} lines, statuses {one['statuses']}")
        for line in one["lines"]:
            print(f"    {line}")


def main() -> None:
    """Start everything, go through the troubles, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=int, default=200)
    parser.add_argument("--only", nargs="*", choices=[one.name for one in TROUBLES])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, stub(Path(folder)) as url:
        server = RedisServer(Path(folder))
        config = Path(folder) / "router.yaml"
        config.write_text(CONFIG.format(store=server.url, stub=url, digest=key_digest(KEY)))
        try:
            with GatewayProcess(config) as gateway:
                time.sleep(2)  # its first heartbeat and probes are over
                chosen = [one for one in TROUBLES if not options.only or one.name in options.only]
                told = [asyncio.run(endure(one, server, gateway, options.rate)) for one in chosen]
        finally:
            server.stop()
    found = [summary(one) for one in told]
    show(found)
    if options.json:
        options.json.write_text(json.dumps({"found": found, "told": msgspec.to_builtins(told)}))


if __name__ == "__main__":
    main()
