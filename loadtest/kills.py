"""`kill -9` of each part in turn under constant load: what callers, status, metrics and the log tell of it.

    .venv/bin/python -m loadtest.kills [--json FILE] [--only "one replica" redis …]

Starts two stub TEIs, a redis-server and one `gateway serve` with two HTTP workers and the built-in engine (a
tiny model with random weights); callers of both models send one text each, at fixed times. The parent is the
last to go: like a container it is started again when nothing of it is left.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from backends.checkpoints import DEFAULT_MODEL, locate_checkpoint
from gateway.telemetry.snapshot import Change, Snapshot
from gateway.tenants.keyring import key_digest
from loadtest.models import engine_of
from loadtest.processes import Running, free_port, group, workers_of
from loadtest.servers import Server, start_stub
from loadtest.serving import GatewayProcess, client
from tests.quotas.redis_server import RedisServer

KEY, ADMIN = "kills-key", "kills-operator"
CONFIG = """
listen: 127.0.0.1:{port}
workers: 2
logs: {{format: text, access: false}}
admin: {{keys: ["{admin}"]}}
quotas: {{store: "{store}", when_unavailable: local}}
upstreams:
  stub: {{backend: tei, replicas: {replicas}}}
  engine: {{backend: torch, model: {model}, pooling: mean, dtype: float32}}
models: {{remote: {{upstream: stub}}, local: {{upstream: engine}}}}
tenants: {{acme: {{keys: ["{key}"], limits: {{tokens_per_minute: 100000000}}}}}}
"""
# Calls a second of each model.
RATES = {"remote": 50, "local": 10}
BEFORE_S, SOON_S, PATIENCE_S = 3.0, 1.0, 30.0
# A call that takes longer is not a normal one.
SLOW_S = 0.25
# What moves by itself, by as much as it likes, or because this run asks.
RESTLESS = re.compile(
    r"process_|te_|gateway_(event_loop_lag|lane_|hedges|batch_|calls_in_flight|in_flight)"
    r"|.*(_bucket|_sum|_duration_seconds|_in_flight|_window_|_memory_bytes|outcome=cancelled|/admin/|outcome=ok)"
)


class Site:
    """All that is started, and how each part of it is killed."""

    def __init__(self, folder: Path, held: ExitStack) -> None:
        self._folder, self._started = folder, held.enter_context(group())
        self._stubs = [self._stub(), self._stub()]
        self.redis = RedisServer(folder)
        held.callback(self.redis.stop)
        self._config = folder / "router.yaml"
        self._config.write_text(
            CONFIG.format(
                port=free_port(),
                store=self.redis.url,
                replicas=[f"http://127.0.0.1:{one.target.port}" for one in self._stubs],
                model=tiny_checkpoint(folder),
                key=key_digest(KEY),
                admin=key_digest(ADMIN),
            )
        )
        self._held = held
        self.gateway = held.enter_context(GatewayProcess(self._config))
        self.notes: list[str] = []

    def _stub(self, port: int | None = None) -> Server:
        stub = start_stub(self._folder, port=port)
        _process(stub).spread()
        self._started.append(_process(stub))
        return stub

    def kill_worker(self) -> None:
        """One of two."""
        os.kill(workers_of(self.gateway.processes[0])[0], signal.SIGKILL)

    def kill_engine(self) -> None:
        """The only one."""
        os.kill(engine_of(self.gateway), signal.SIGKILL)

    def kill_replica(self) -> None:
        """The first of two."""
        process = _process(self._stubs[0]).process
        process.kill()
        process.wait(5)

    def start_replica(self) -> None:
        """Where it was."""
        self._stubs[0] = self._stub(self._stubs[0].target.port)

    def restart_parent(self) -> None:
        """Kill it alone, wait until all that it started has gone, and start another."""
        pids = self.gateway.processes
        started_s = time.monotonic()
        os.kill(pids[0], signal.SIGKILL)
        # Processes of a dead one's: nobody tells of their end.
        while any(_runs(pid) for pid in pids[1:]) and time.monotonic() < started_s + PATIENCE_S:
            time.sleep(0.02)
        left = sum(_runs(pid) for pid in pids)
        self.notes.append(f"{left} of its processes left after {time.monotonic() - started_s:.2f} s")
        self.gateway = self._held.enter_context(GatewayProcess(self._config))
        self.notes.append(f"another was up after {time.monotonic() - started_s:.2f} s")


def _process(server: Server) -> Running:
    assert server.process is not None
    return server.process


def _runs(pid: int) -> bool:
    """A process that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def tiny_checkpoint(folder: Path) -> Path:
    """Two small layers with random weights, and the default model's words."""
    import torch
    import transformers

    source, place = locate_checkpoint(DEFAULT_MODEL), folder / "tiny"
    left_out = shutil.ignore_patterns("*.safetensors", "*.bin", "onnx", "modules.json", "?_*", "sentence_*")
    shutil.copytree(source, place, ignore=left_out)
    transformers.utils.logging.disable_progress_bar()
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    config = transformers.AutoConfig.from_pretrained(source, **sizes)
    torch.manual_seed(1)
    transformers.AutoModel.from_config(config, dtype=torch.float32).save_pretrained(place)
    return place


class Kill(msgspec.Struct, frozen=True):
    """begin: kills. end: brings it back where nobody else does, lasts_s later; after_s: watched from then."""

    name: str
    begin: Callable[[Site], object]
    end: Callable[[Site], object] = lambda _: None
    lasts_s: float = 0.0
    after_s: float = 5.0


KILLS = (
    Kill("one worker", Site.kill_worker),
    Kill("the engine", Site.kill_engine, after_s=10),
    Kill("one replica", Site.kill_replica, Site.start_replica, 4),
    Kill("redis", lambda site: site.redis.kill(), lambda site: site.redis.restart(), 4),
    Kill("the parent", Site.restart_parent, after_s=9),
)


class Call(msgspec.Struct, frozen=True):
    """One call. due_s: from the kill; took_s: from when it was due. answer: a status, or "no answer"."""

    model: str
    due_s: float
    took_s: float
    answer: str
    degraded: bool

    @property
    def is_normal(self) -> bool:
        """Answered well, and in time."""
        return self.answer == "200" and self.took_s <= SLOW_S


class Look(msgspec.Struct, frozen=True):
    """What `gateway status --json` and /metrics told at one moment; problem: why status told nothing."""

    snapshot: Snapshot | None
    problem: str
    series: dict[str, float]


class Told(msgspec.Struct, frozen=True):
    """One kill: its calls, and the looks before, soon after it and at the end. at_s: since 1970."""

    name: str
    at_s: float
    calls: list[Call]
    ordinary: set[str]
    looks: tuple[Look, Look, Look]
    lines: list[str]
    notes: list[str]


class Load:
    """An open loop: each call at its moment, however long the ones before it take."""

    def __init__(self, url: str, seconds: float, killed_s: float) -> None:
        self._url, self._seconds, self._killed_s = url, seconds, killed_s

    async def run(self) -> list[Call]:
        """Both models beside each other, each with connections of its own."""
        told = await asyncio.gather(*(self._model(model, rate) for model, rate in RATES.items()))
        return [call for calls in told for call in calls]

    async def _model(self, model: str, rate: int) -> list[Call]:
        loop = asyncio.get_running_loop()
        running = []
        async with client(self._url, KEY) as web:
            for number in range(round(rate * self._seconds)):
                due_s = self._killed_s - BEFORE_S + number / rate
                await asyncio.sleep(due_s - loop.time())
                running.append(asyncio.create_task(self._call(web, model, due_s)))
            return await asyncio.gather(*running)

    async def _call(self, web: httpx.AsyncClient, model: str, due_s: float) -> Call:
        # A text of its own: those of one tenant that are alike are computed once.
        sent = {"model": model, "input": f"a text of its own, due at {due_s}"}
        degraded = False
        try:
            reply = await web.post("/v1/embeddings", json=sent)
            answer, degraded = str(reply.status_code), reply.headers.get("x-quota-mode") == "degraded"
        except httpx.HTTPError:
            answer = "no answer"
        took_s = asyncio.get_running_loop().time() - due_s
        return Call(model, due_s - self._killed_s, took_s, answer, degraded)


async def endure(kill: Kill, site: Site) -> Told:
    """Run the load through one kill."""
    loop, url, seen = asyncio.get_running_loop(), site.gateway.url, len(site.gateway.lines)
    site.notes.clear()
    killed_s = loop.time() + BEFORE_S + 0.5
    load = asyncio.create_task(Load(url, BEFORE_S + kill.lasts_s + kill.after_s, killed_s).run())
    await asyncio.sleep(killed_s - BEFORE_S + 0.5 - loop.time())
    early = await series(url)
    before = await look(url)
    await asyncio.sleep(killed_s - loop.time())
    at_s, gateway = time.time(), site.gateway
    killing = asyncio.create_task(asyncio.to_thread(kill.begin, site))
    await asyncio.sleep(SOON_S)
    soon = await look(url)
    await asyncio.sleep(killed_s + kill.lasts_s - loop.time())
    await killing
    await asyncio.to_thread(kill.end, site)
    calls = await load
    after = await look(url)
    lines = gateway.lines[seen:] + (site.gateway.lines if site.gateway is not gateway else [])
    ordinary = {name for name, value in before.series.items() if early.get(name) != value}
    return Told(kill.name, at_s, calls, ordinary, (before, soon, after), lines, list(site.notes))


async def look(url: str) -> Look:
    """Both at once."""
    (snapshot, problem), numbers = await asyncio.gather(status(url), series(url))
    return Look(snapshot, problem, numbers)


async def status(url: str) -> tuple[Snapshot | None, str]:
    """What the command tells, or why it does not."""
    words = [sys.executable, "-m", "gateway", "status", "--json", "--url", url]
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "GATEWAY_API_KEY": ADMIN}
    process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe, env=environment)
    out, problem = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    if process.returncode:
        return None, problem.decode().strip()
    return msgspec.json.decode(out, type=Snapshot), ""


async def series(url: str) -> dict[str, float]:
    """Every series of /metrics that stands still while nothing happens; none where it does not answer."""
    text = ""
    async with client(url, KEY) as web:
        with suppress(httpx.HTTPError):
            text = (await web.get("/metrics")).text
    samples = (one for family in text_string_to_metric_families(text) for one in family.samples)
    told = {_series(one.name, one.labels): one.value for one in samples}
    return {name: value for name, value in told.items() if not RESTLESS.match(name)}


def _series(name: str, labels: Mapping[str, str]) -> str:
    told = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return f"{name}{{{told}}}" if told else name


def summary(told: Told) -> dict[str, Any]:
    """One kill in figures and words. normal_after_s: from it to the end of the last call that was not."""
    calls = [one for one in told.calls if one.due_s + one.took_s >= 0]
    return {
        "killed": told.name,
        "calls": len(calls),
        "answers": {model: _answers(calls, model) for model in RATES},
        "failed": sum(one.answer != "200" for one in calls),
        "longest_ms": round(max(one.took_s for one in calls) * 1000),
        "normal_after_s": round(max((c.due_s + c.took_s for c in calls if not c.is_normal), default=0.0), 1),
        "degraded": sum(one.degraded for one in calls),
        "status": list(_status(told)),
        "metrics": list(_metrics(told)),
        "log": list(_lines(told)),
        "notes": told.notes,
    }


def _answers(calls: Sequence[Call], model: str) -> dict[str, int]:
    return dict(Counter(one.answer for one in calls if one.model == model))


def _status(told: Told) -> Iterator[str]:
    """What differed between the looks, and which changes it listed."""
    facts = [_facts(one) for one in told.looks]
    for name in dict.fromkeys(name for one in facts for name in one):
        values = [one.get(name, "-") for one in facts]
        if len(set(values)) > 1:
            yield f"{name}: {' → '.join(values)}"
    listed: dict[Change, int] = {}
    for one in told.looks[1:]:
        changes = one.snapshot.changes if one.snapshot else ()
        listed.update((change, 0) for change in changes if change.at_s >= told.at_s)
    for change in sorted(listed, key=lambda one: one.at_s):
        after_s = change.at_s - told.at_s
        yield f"change after {after_s:.1f} s: {change.subject} {change.what} ({change.reason})"


def _facts(one: Look) -> dict[str, str]:
    if one.snapshot is None:
        return {"status": one.problem}
    told = {"status": "told", "quota store": "away" if one.snapshot.store.away else "there"}
    told |= {f"replica {each.upstream} {each.name}": each.state for each in one.snapshot.replicas}
    return told | {f"model {each.name}": each.state for each in one.snapshot.models}


def _metrics(told: Told) -> Iterator[str]:
    """What moved that does not move while nothing happens: before → soon → after."""
    looks = [one.series for one in told.looks]
    if not all(looks):
        yield f"/metrics: {' → '.join('told' if one else 'no answer' for one in looks)}; counters began anew"
        return
    for name in sorted({name for one in looks for name in one} - told.ordinary):
        values = [one.get(name, 0.0) for one in looks]
        if len(set(values)) > 1:
            yield f"{name}: {' → '.join(f'{value:g}' for value in values)}"


def _lines(told: Told) -> Iterator[str]:
    """Without their times; what both workers logged only once."""
    counts = Counter(line.partition(" ")[2] for line in told.lines)
    for line, count in counts.items():
        yield line if count == 1 else f"{line} (×{count})"


def show(found: Sequence[dict[str, Any]]) -> None:
    """One row a kill, then what was told of it."""
    print(f"{'killed':12} {'calls':>6} {'failed':>6} {'longest':>9} {'normal after':>12} {'degraded':>8}")
    for one in found:
        print(
            f"{one['killed']:12} {one['calls']:6} {one['failed']:6} {one['longest_ms']:6} ms"
            f" {one['normal_after_s']:10} s {one['degraded']:8}   {one['answers']}"
        )
    print(
        f"Calls that ended after the kill. Normal: 200 within {SLOW_S * 1000:.0f} ms. Before → soon → after:"
    )
    for one in found:
        print(f"  {one['killed']}")
        for part in ("status", "metrics", "log", "notes"):
            for line in one[part] or ["-"]:
                print(f"    {part:8} {line}")


def main() -> None:
    """Start everything, kill one part after the other, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=[one.name for one in KILLS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with ExitStack() as held:
        site = Site(Path(held.enter_context(tempfile.TemporaryDirectory(prefix="kills-"))), held)
        time.sleep(2)  # its first heartbeat and probes are over
        chosen = [one for one in KILLS if not options.only or one.name in options.only]
        told = [asyncio.run(endure(one, site)) for one in chosen]
    found = [summary(one) for one in told]
    show(found)
    if options.json:
        options.json.write_text(json.dumps({"found": found, "told": msgspec.to_builtins(told)}, indent=1))


if __name__ == "__main__":
    main()
