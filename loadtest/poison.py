"""Texts that a server refuses, fails or never answers, among the calls of two tenants.

    .venv/bin/python -m loadtest.poison [--tree CHECKOUT] [--kind 500]...

12 callers of two tenants send 300 calls of one text to two replicas. One text in 20, of the first tenant, is
bad: always another one, or always the same. It prints the fine calls that failed, of either tenant, replicas
that went down, the statuses of the bad calls, and the latency of the fine ones, next to a run without bad
texts.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import msgspec
import numpy as np

from backends.checkpoints.locations import DEFAULT_MODEL, locate_checkpoint
from loadtest import servers
from loadtest.servers import KEY, RunningServer

OTHER_KEY = "sk-loadtest-other"
WORD = "poison"
KINDS = ("400", "413", "422", "500", "null", "nan", "width", "lost", "hang")
CALLERS, CALLS, ONE_IN = 12, 300, 20
ATTEMPT_TIMEOUT_S = 1.0
# A batch costs little more than one text, therefore calls of both tenants travel together.
STUB = ("--base-ms", "20", "--input-ms", "0.25", "--parallel", "2", "--dimensions", "384")


class PoisonRun(msgspec.Struct):
    """Outcome of one run. own, other: fine calls that failed, of the tenant with bad texts and the other."""

    own: int = 0
    other: int = 0
    downs: int = 0
    bad: Counter[int] = msgspec.field(default_factory=Counter)
    fine_ms: list[float] = msgspec.field(default_factory=list)

    @property
    def p95_ms(self) -> float:
        """Latency of the fine calls."""
        return float(np.percentile(self.fine_ms, 95))


async def send_calls(gateway: RunningServer, run: str, *, is_bad: bool, is_repeated: bool) -> PoisonRun:
    """Send all calls of one run. run: a word that makes its texts new."""
    outcome, numbers = PoisonRun(), iter(range(CALLS))
    url = f"http://127.0.0.1:{gateway.target.port}/v1/embeddings"

    async def one(client: httpx.AsyncClient, number: int) -> None:
        bad = is_bad and number % ONE_IN == 7
        is_own = bad or number % 2 == 0
        text = f"fine {run} {number}"
        if bad:
            text = f"{WORD} {run}" if is_repeated else f"{WORD} {run} {number}"
        headers = {"authorization": f"Bearer {KEY if is_own else OTHER_KEY}"}
        began_s = time.perf_counter()
        reply = await client.post(url, json={"model": "m", "input": text}, headers=headers)
        if bad:
            outcome.bad[reply.status_code] += 1
            return
        outcome.fine_ms.append((time.perf_counter() - began_s) * 1000)
        if reply.status_code != 200:
            outcome.own += is_own
            outcome.other += not is_own

    async def caller() -> None:
        async with httpx.AsyncClient(timeout=90) as client:
            for number in numbers:
                await one(client, number)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return outcome


def downs_of(gateway: RunningServer) -> int:
    """Return how often replicas have left the state in which they get work."""
    _, page = servers.request(gateway.target.port, "/metrics")
    lines = [line for line in page.decode().splitlines() if "gateway_replica_changes_total{" in line]
    return sum(int(float(line.split()[-1])) for line in lines if 'state="down"' in line)


def measure(kind: str, folder: Path, tree: Path) -> dict[str, PoisonRun]:
    """Return the runs of one kind of bad text, by name."""
    stubs = [servers.start_stub(folder, *STUB, "--bad-word", WORD, "--bad-effect", kind) for _ in range(2)]
    replicas = ", ".join(f"http://127.0.0.1:{stub.target.port}" for stub in stubs)
    config = f"""
upstreams:
  u: {{backend: tei, replicas: [{replicas}], tokenizer: '{locate_checkpoint(DEFAULT_MODEL)}',
      in_flight_batches: 2, attempt_timeout_s: {ATTEMPT_TIMEOUT_S}}}
models: {{m: {{upstream: u}}}}
tenants: {{a: {servers.tenant(KEY)}, b: {servers.tenant(OTHER_KEY)}}}
"""
    gateway = servers.start_gateway(folder, config, tree=tree)
    runs: dict[str, PoisonRun] = {}
    try:
        asyncio.run(send_calls(gateway, "warm", is_bad=False, is_repeated=False))
        for name, is_bad, is_repeated in (("none", False, False), ("new", True, False), ("same", True, True)):
            before = downs_of(gateway)
            runs[name] = asyncio.run(send_calls(gateway, name, is_bad=is_bad, is_repeated=is_repeated))
            runs[name].downs = downs_of(gateway) - before
    finally:
        for server in (gateway, *stubs):
            server.process.stop()
    return runs


def main() -> None:
    """Measure the kinds of the command line, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=servers.ROOT, help="checkout whose gateway runs")
    parser.add_argument("--kind", action="append", choices=KINDS, help="kind of bad text; all, if absent")
    options = parser.parse_args()
    print("| kind | texts | lost own | lost other | down | bad calls | p95 ms | of the run without |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in options.kind or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            runs = measure(kind, Path(folder), options.tree)
        base_ms = runs["none"].p95_ms
        for name, run in runs.items():
            bad = ", ".join(f"{count} x {status}" for status, count in sorted(run.bad.items())) or "-"
            print(
                f"| {kind} | {name} | {run.own} | {run.other} | {run.downs} | {bad} | {run.p95_ms:.0f} | "
                f"{run.p95_ms / base_ms:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
