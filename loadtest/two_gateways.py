"""Two real gateways: what Redis costs a call, how soon a revoked key and a dead gateway's slot are gone.

    .venv/bin/python -m loadtest.two_gateways [--only cost revoked slot] [--json FILE]

Starts a stub TEI, a redis-server and `gateway serve` as often as each part needs.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from gateway.tenants.keyring import key_digest
from loadtest.processes import usage
from loadtest.serving import GatewayProcess, client, percentile, stub
from tests.quotas.redis_server import RedisServer

ADMIN, CALLER = "operator-key", "caller-key"
CONFIG = """
listen: 127.0.0.1:0
quotas: {{store: "{store}"}}
upstreams: {{stub: {{backend: tei, replicas: ["{stub}"], attempt_timeout_s: 60}}}}
models: {{m: {{upstream: stub}}}}
tenants:
  operators: {{keys: ["{admin}"]}}
  caller:
    keys: ["{caller}"]
    limits: {{requests_per_minute: 10000000, tokens_per_minute: 100000000, tokens_per_day: 1000000000}}
  single: {{keys: ["{single}"], limits: {{requests_in_flight: 1}}}}
"""
TEXT = {"input": "a text"}
# The stub answers no such text.
SLOW = "slow"
PARTS = ("cost", "revoked", "slot")


def _config(folder: Path, store: str, url: str) -> Path:
    path = folder / f"{re.sub('[^a-z]', '', store)}.yaml"
    digests = {"admin": key_digest(ADMIN), "caller": key_digest(CALLER), "single": key_digest("single")}
    path.write_text(CONFIG.format(store=store, stub=url, **digests))
    return path


async def _timed(url: str, calls: int, callers: int) -> tuple[list[float], dict[str, float]]:
    """Latencies in ms, and the mean of each stage that server-timing tells, in ms."""
    took_ms: list[float] = []
    stages: dict[str, list[float]] = defaultdict(list)
    numbers = iter(range(calls))

    async def caller(web: httpx.AsyncClient) -> None:
        for _ in numbers:
            started_s = time.perf_counter()
            reply = await web.post("/v1/embeddings", json=TEXT)
            took_ms.append((time.perf_counter() - started_s) * 1000)
            reply.raise_for_status()
            for name, value in re.findall(r"(\w+);dur=([\d.]+)", reply.headers["server-timing"]):
                stages[name].append(float(value))

    async with client(url, CALLER) as web:
        await asyncio.gather(*(caller(web) for _ in range(callers)))
    return took_ms, {name: statistics.fmean(values) for name, values in stages.items()}


def cost(folder: Path, url: str, server: RedisServer, repeats: int) -> dict[str, Any]:
    """Memory and Redis in turn, one caller and then sixteen."""
    found: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    stores = {"memory": "memory", "redis": server.url}
    with (
        GatewayProcess(_config(folder, stores["memory"], url)) as memory,
        GatewayProcess(_config(folder, stores["redis"], url)) as redis,
    ):
        gateways = {"memory": memory, "redis": redis}
        for one in gateways.values():
            asyncio.run(_timed(one.url, 300, 8))
        for _ in range(repeats):
            for callers in (1, 16):
                for name, one in gateways.items():
                    calls = 600 if callers == 1 else 1500
                    used_s, redis_s = one.cpu_s(), usage([server.process.pid]).cpu_s
                    took_ms, stages = asyncio.run(_timed(one.url, calls, callers))
                    row = found[f"{name}, {callers} at once"]
                    row["p50_ms"].append(percentile(took_ms, 50))
                    row["gateway_cpu_us"].append((one.cpu_s() - used_s) / calls * 1e6)
                    row["redis_cpu_us"].append((usage([server.process.pid]).cpu_s - redis_s) / calls * 1e6)
                    for stage, mean_ms in stages.items():
                        row[f"stage_{stage}_ms"].append(mean_ms)
    return {name: dict(row) for name, row in found.items()}


def _show_cost(found: Mapping[str, Mapping[str, list[float]]]) -> None:
    for name, row in found.items():
        for what, values in row.items():
            digits = 3 if what.endswith("_ms") else 0
            low, high, middle = min(values), max(values), statistics.median(values)
            print(f"{name:20} {what:20} {middle:9.{digits}f}   ({low:.{digits}f}-{high:.{digits}f})")


async def _until(web: httpx.AsyncClient, status: int, timeout_s: float) -> None:
    """Call until this is the answer."""
    async with asyncio.timeout(timeout_s):
        while (await web.post("/v1/embeddings", json=TEXT)).status_code != status:  # noqa: ASYNC110 - far away
            await asyncio.sleep(0.05)


async def _revoke_once(first: str, second: str) -> tuple[float, float]:
    """Milliseconds from the request to revoke, sent to the first, to the last call taken; of both."""
    async with client(first, ADMIN) as admin:
        made = (await admin.post("/admin/keys", json={"tenant": "caller"})).json()
        last_s = dict.fromkeys((first, second), 0.0)
        revoked = asyncio.Event()

        async def call(web: httpx.AsyncClient, url: str) -> None:
            status = 200
            # Past some wrong keys from one address the answer is 429 in place of 401.
            while status == 200 or not revoked.is_set():
                status = (await web.post("/v1/embeddings", json=TEXT)).status_code
                if status == 200:
                    last_s[url] = time.perf_counter()

        async with client(first, made["key"]) as one, client(second, made["key"]) as other:
            for web in (one, other):
                await _until(web, 200, 10)
            calling = [asyncio.create_task(call(one, first)), asyncio.create_task(call(other, second))]
            await asyncio.sleep(0.2 + random.random() * 0.5)  # noqa: S311 - any moment between two looks
            asked_s = time.perf_counter()
            (await admin.delete(f"/admin/keys/{made['shown']['id']}")).raise_for_status()
            revoked.set()
            async with asyncio.timeout(30):
                await asyncio.gather(*calling)
    return (last_s[first] - asked_s) * 1000, (last_s[second] - asked_s) * 1000


def revoked(folder: Path, url: str, server: RedisServer, repeats: int) -> dict[str, list[float]]:
    """Milliseconds to the last call taken, on the gateway that was told and on the other."""
    config = _config(folder, server.url, url)
    with GatewayProcess(config) as one, GatewayProcess(config) as other:
        pairs = [asyncio.run(_revoke_once(one.url, other.url)) for _ in range(repeats)]
    return {"on the one that was told": [a for a, _ in pairs], "on the other": [b for _, b in pairs]}


async def _slot_once(first: GatewayProcess, second: str) -> float:
    async with client(first.url, "single") as one, client(second, "single") as other:
        flying = asyncio.create_task(one.post("/v1/embeddings", json={"input": SLOW}, timeout=90))
        await asyncio.sleep(0.5)  # else a call of the other's could be in its way
        await _until(other, 429, 10)
        await asyncio.sleep(6 + 2 * random.random())  # noqa: S311 - past a renewal
        first.kill()
        killed_s = time.perf_counter()
        await _until(other, 200, 60)
        free_s = time.perf_counter() - killed_s
        await asyncio.gather(flying, return_exceptions=True)
    return free_s


def slot(folder: Path, url: str, server: RedisServer, repeats: int) -> list[float]:
    """Seconds from a gateway's SIGKILL until the one slot that it held is another gateway's."""
    config = _config(folder, server.url, url)
    found = []
    with GatewayProcess(config) as other:
        for _ in range(repeats):
            with GatewayProcess(config) as one:
                found.append(asyncio.run(_slot_once(one, other.url)))
    return found


def main() -> None:
    """Run the parts that were asked for, or all, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts = options.only
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, stub(Path(name), "--hangs-on", SLOW) as url:
        folder = Path(name)
        server = RedisServer(folder)
        try:
            if "cost" in parts:
                found["cost"] = cost(folder, url, server, 5)
                _show_cost(found["cost"])
            if "revoked" in parts:
                found["revoked_ms"] = revoked(folder, url, server, 20)
                for where, values in found["revoked_ms"].items():
                    low, middle, high = min(values), statistics.median(values), max(values)
                    print(
                        f"last call taken {where}: {low:.0f} / {middle:.0f} / {high:.0f} ms (min/median/max)"
                    )
            if "slot" in parts:
                found["slot_s"] = slot(folder, url, server, 3)
                print(
                    "a dead gateway's slot was free after " + ", ".join(f"{s:.1f} s" for s in found["slot_s"])
                )
        finally:
            server.stop()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
