"""Reloads under load, every fifth of a bad file: how many calls are lost, and what it costs the others.

    .venv/bin/python -m loadtest.reloads [--reloads 200] [--json FILE]

Starts two stub TEIs, a redis-server and one `gateway serve` with two workers. Callers of two tenants call
without a pause, each reload waits for the one before it; all are asked for by `POST /admin/reload`, every
fourth by SIGHUP before that. A call is lost that is answered by anything but 200 with its two vectors.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from gateway.tenants.keyring import key_digest
from loadtest.processes import memory, open_files, workers_of
from loadtest.serving import GatewayProcess, client, percentile, stub
from tests.quotas.redis_server import RedisServer

ADMIN, CALLERS = "operator-key", ("acme-key", "globex-key")
CALLERS_EACH = 6
# Long enough for some dozens of calls between two reloads.
PAUSE_S = 0.1
CONFIG = """
listen: 127.0.0.1:0
workers: 2
admin: {{keys: ["{admin}"]}}
quotas: {{store: "{store}"}}
upstreams:
  {upstream}: {{backend: tei, replicas: {replicas}, queue_tokens: {queue_tokens}}}
  {beside}: {{backend: tei, replicas: {replicas}}}
models:
  m: {{upstream: {upstream}, deadline_s: {deadline_s}}}
  {alias}: {{upstream: {beside}}}
tenants:
  acme: {{keys: ["{acme}"], limits: {{tokens_per_minute: {tokens}}}}}
  globex: {{keys: ["{globex}", "{other}"], weight: {weight}}}
"""
KINDS = (
    "replicas exchanged",
    "an upstream's settings",
    "an upstream renamed",
    "bad: not YAML",
    "a model and its upstream exchanged",
    "limits and weights",
    "a key exchanged",
    "a model's deadline",
    "bad: no such upstream",
    "all at once",
)


class File:
    """router.yaml, each of its versions a valid one but for those that are meant to be bad."""

    def __init__(self, path: Path, store: str, urls: Sequence[str]) -> None:
        self.path = path
        self._urls = urls
        # How often each part has been changed.
        self._turns: Counter[str] = Counter()
        self._fixed = {
            "store": store,
            "admin": key_digest(ADMIN),
            "acme": key_digest(CALLERS[0]),
            "globex": key_digest(CALLERS[1]),
        }

    def write(self, kind: str) -> None:
        """Change what the kind says, or break the file."""
        changed = KINDS if kind == "all at once" else (kind,)
        self._turns.update(changed)
        text = self._text()
        if kind == "bad: not YAML":
            text += "\nmodels: [}\n"
        if kind == "bad: no such upstream":
            text = text.replace("m: {upstream: ", "m: {upstream: no-")
        beside = self.path.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self.path)

    def _text(self) -> str:
        turn = self._turns
        chosen = (self._urls, self._urls[:1], self._urls[1:])[turn["replicas exchanged"] % 3]
        exchanged = turn["a model and its upstream exchanged"]
        return CONFIG.format(
            upstream=f"up{turn['an upstream renamed'] % 2}",
            beside=f"beside{exchanged % 2}",
            alias=f"alias-{exchanged}",
            replicas=json.dumps(list(chosen)),
            queue_tokens=1_000_000 + turn["an upstream's settings"],
            deadline_s=30 + turn["a model's deadline"],
            tokens=10**9 + turn["limits and weights"],
            weight=1 + turn["limits and weights"] % 3,
            other=key_digest(f"another-key-{turn['a key exchanged']}"),
            **self._fixed,
        )


class Calls:
    """What callers got."""

    def __init__(self) -> None:
        self.took_ms: list[float] = []
        self.lost: Counter[str] = Counter()
        self.over = False

    async def call(self, url: str, key: str) -> None:
        """Without a pause, until it is over."""
        async with client(url, key) as web:
            while not self.over:
                started_s = time.perf_counter()
                if (problem := await _problem(web)) is not None:
                    self.lost[problem] += 1
                self.took_ms.append((time.perf_counter() - started_s) * 1000)


async def _problem(web: httpx.AsyncClient) -> str | None:
    """How a call was lost, if it was. Each has inputs of its own, so that none is done for another."""
    inputs = [f"text {time.perf_counter_ns()} {i}" for i in range(2)]
    try:
        reply = await web.post("/v1/embeddings", json={"model": "m", "input": inputs})
    except httpx.TransportError as error:
        return type(error).__name__
    if reply.status_code != 200:
        return f"{reply.status_code}: {reply.text[:160]}"
    return None if len(reply.json()["data"]) == 2 else "not two vectors"


async def reloaded(gateway: GatewayProcess, file: File, reloads: int, calls: Calls) -> dict[str, Any]:
    """Reload so often; how long each took, and how many were taken and refused."""
    took_ms: list[float] = []
    answers: Counter[str] = Counter()
    async with client(gateway.url, ADMIN) as operator:
        for number in range(reloads):
            kind = KINDS[number % len(KINDS)]
            file.write(kind)
            if number % 4 == 3:
                # What is asked for next is answered after it.
                gateway.hang_up()
                answers["by SIGHUP"] += 1
            started_s = time.perf_counter()
            reply = await operator.post("/admin/reload")
            took_ms.append((time.perf_counter() - started_s) * 1000)
            answers[str(reply.status_code)] += 1
            if reply.status_code != (422 if kind.startswith("bad") else 200):
                raise SystemExit(f"{kind}: {reply.status_code} {reply.text}")
            await asyncio.sleep(PAUSE_S)
    calls.over = True
    return {"reload_ms": took_ms, "answers": dict(answers)}


async def run(gateway: GatewayProcess, file: File, reloads: int) -> dict[str, Any]:
    """All of it; what is told of the run."""
    calls, pids = Calls(), [one for one in gateway.processes if one in workers_of(gateway.processes[0])]
    callers = [
        asyncio.create_task(calls.call(gateway.url, key)) for key in CALLERS for _ in range(CALLERS_EACH)
    ]
    await asyncio.sleep(2)
    before = _held(pids)
    calls.took_ms.clear()
    found = await reloaded(gateway, file, reloads, calls)
    await asyncio.gather(*callers)
    await asyncio.sleep(1)
    return {
        **found,
        "calls": len(calls.took_ms),
        "lost": dict(calls.lost),
        "call_ms": {name: percentile(calls.took_ms, name) for name in (50, 99)} | {"max": max(calls.took_ms)},
        "held_before": before,
        "held_after": _held(pids),
        "workers_that_stayed": pids == [one for one in pids if one in workers_of(gateway.processes[0])],
    }


def _held(pids: Sequence[int]) -> list[dict[str, float]]:
    """Of each worker."""
    return [{"rss_mb": memory(pid).rss_mb, "open_files": open_files(pid)} for pid in pids]


def _show(found: dict[str, Any]) -> None:
    took = found["reload_ms"]
    print(f"calls {found['calls']}, lost {sum(found['lost'].values())} {found['lost'] or ''}")
    print(f"reloads by answer: {found['answers']}")
    quarter = max(1, len(took) // 4)
    first, last = took[:quarter], took[-quarter:]
    print(f"a reload by the API, ms: p50 {percentile(took, 50):.0f}, p99 {percentile(took, 99):.0f}")
    print(f"  of the first quarter p50 {percentile(first, 50):.0f}, of the last {percentile(last, 50):.0f}")
    print("a call, ms: " + ", ".join(f"{name} {value:.1f}" for name, value in found["call_ms"].items()))
    print(f"each worker before: {found['held_before']}")
    print(f"each worker after:  {found['held_after']}; the same processes: {found['workers_that_stayed']}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reloads", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, stub(Path(folder)) as one, stub(Path(folder)) as other:
        redis = RedisServer(Path(folder))
        try:
            file = File(Path(folder) / "router.yaml", redis.url, (one, other))
            file.write("all at once")
            with GatewayProcess(file.path) as gateway:
                found = asyncio.run(run(gateway, file, arguments.reloads))
        finally:
            redis.stop()
    _show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    raise SystemExit(1 if found["lost"] else 0)


if __name__ == "__main__":
    main()
