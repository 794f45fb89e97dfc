"""One call that is split, joined and tried elsewhere, as the tree of its trace, beside its server-timing.

    .venv/bin/python -m loadtest.one_trace

A gateway has two replicas: a stub that fails half of its requests, and a second gateway with the built-in
engine. Several calls are sent at once, so that slices of different calls share requests. The tree is of the
first call to which all three happened, through all of these processes.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from loadtest import servers
from loadtest.collector import Collector, collecting
from loadtest.processes import Running, free_port, group, listens

CALLS = 6
INPUTS = 6
ROUNDS = 20
# How long spans may take from all processes.
PATIENCE_S = 20.0
SHOWN = {
    "error.type": "{}",
    "gateway.replica": "at {}",
    "gateway.batch.inputs": "{} inputs",
    "gateway.batch.calls": "{} slices together",
    "gateway.attempt.tries_before": "try after {}",
    "gen_ai.usage.input_tokens": "{} tokens",
}
BEHIND = """
tracing: {{endpoint: "{collector}", service_name: behind}}
upstreams: {{minilm: {{backend: torch, model: sentence-transformers/all-MiniLM-L6-v2}}}}
models: {{minilm: {{upstream: minilm}}}}
tenants: {{front: {key}}}
"""
FRONT = """
tracing: {{endpoint: "{collector}", service_name: front}}
upstreams:
  minilm:
    backend: tei
    replicas: ["http://127.0.0.1:{stub}", "http://127.0.0.1:{behind}"]
    api_key: {api_key}
    policy: round_robin
    batch_inputs: 4
    in_flight_batches: 1
models: {{minilm: {{upstream: minilm}}}}
tenants: {{caller: {key}}}
"""


async def ask(port: int, first: int) -> dict[str, str]:
    """Several calls at once; the server-timing of each, by its trace's id. Raises: RuntimeError."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
        replies = await asyncio.gather(*(_call(client, first + number) for number in range(CALLS)))
    if {200} != {one.status_code for one in replies}:
        raise RuntimeError(f"a call failed: {[one.text for one in replies]}")
    return {f"{first + number:032x}": one.headers["server-timing"] for number, one in enumerate(replies)}


async def _call(client: httpx.AsyncClient, number: int) -> httpx.Response:
    return await client.post(
        "/v1/embeddings",
        json={"model": "minilm", "input": [f"input {one} of call {number}" for one in range(INPUTS)]},
        headers={
            "authorization": f"Bearer {servers.KEY}",
            "traceparent": f"00-{number:032x}-00000000000000ff-01",
        },
    )


def tree(spans: Sequence[Span]) -> Iterator[str]:
    """Lines, children below their parents in the order of their beginning."""
    below: Mapping[bytes, list[Span]] = defaultdict(list)
    for one in spans:
        below[one.parent_span_id].append(one)
    known = {one.span_id for one in spans}
    roots = [one for one in spans if one.parent_span_id not in known]
    start_ns = min(one.start_time_unix_nano for one in roots)

    def lines(span: Span, depth: int) -> Iterator[str]:
        begun_ms = (span.start_time_unix_nano - start_ns) / 1e6
        took_ms = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        yield f"{begun_ms:8.1f} {took_ms:8.1f} ms  {'  ' * depth}{span.name}  {_told(span)}".rstrip()
        for one in sorted(below[span.span_id], key=lambda child: child.start_time_unix_nano):
            yield from lines(one, depth + 1)

    for root in roots:
        yield from lines(root, 0)


def _told(span: Span) -> str:
    values = {one.key: one.value.string_value or one.value.int_value for one in span.attributes}
    told = [form.format(values[name]) for name, form in SHOWN.items() if values.get(name)]
    return ", ".join([*told, *([f"{len(span.links)} links"] if span.links else [])])


def find(collector: Collector, port: int) -> tuple[list[Span], str]:
    """A call that all of it happened to: its spans and its server-timing. Raises: RuntimeError."""
    for turn in range(ROUNDS):
        timings = asyncio.run(ask(port, 1 + turn * CALLS))
        ends_s = time.monotonic() + PATIENCE_S
        traces: dict[str, list[Span]] = {}
        while time.monotonic() < ends_s and not (len(traces) == CALLS and all(map(_whole, traces.values()))):
            time.sleep(0.2)
            spans = list(collector.spans)
            traces = {one: [span for span in spans if span.trace_id.hex() == one] for one in timings}
        for trace_id, spans in traces.items():
            if _has_all(spans):
                return spans, timings[trace_id]
    raise RuntimeError(f"in {ROUNDS} rounds no call was split, joined and tried again")


def _has_all(spans: Sequence[Span]) -> bool:
    """Split in two slices, one of which shared a request, and one tried again."""
    told = [{one.key: one.value for one in span.attributes} for span in spans]
    own = [
        one for one in told if one.get("gateway.upstream") and "http" in one["gateway.replica"].string_value
    ]
    failed = [one for one in own if "error.type" in one]
    shared = [one for one in own if one["gateway.batch.calls"].int_value > 1 and "error.type" not in one]
    engine = any(span.name == "engine forward" for span in spans)
    return len(own) - len(failed) > 1 and bool(failed) and bool(shared) and engine


def _whole(spans: Sequence[Span]) -> bool:
    """Whether a trace has all its spans: every parent is there but the caller's."""
    known = {one.span_id for one in spans}
    return bool(spans) and sum(one.parent_span_id not in known for one in spans) == 1


def started_stub(folder: Path) -> tuple[Running, int]:
    """One that answers half of its requests with 500."""
    port = free_port()
    stub = Running(
        [
            sys.executable,
            "-m",
            "loadtest.stub",
            "--port",
            str(port),
            "--error-share",
            "0.5",
            "--dimensions",
            "384",
        ],
        servers.LOAD_CORE,
        folder / "stub.log",
    )
    stub.wait_until(lambda: listens(port))
    return stub, port


def main() -> None:
    """Start all, call, print."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    key = servers.tenant(servers.KEY)
    with tempfile.TemporaryDirectory() as folder, group() as started, collecting() as collector:
        stub, stub_port = started_stub(Path(folder))
        started.append(stub)
        behind = servers.start_gateway(
            Path(folder), BEHIND.format(collector=collector.url, key=key), name="behind"
        )
        ports = {"stub": stub_port, "behind": behind.target.port}
        text = FRONT.format(collector=collector.url, key=key, api_key=servers.KEY, **ports)
        front = servers.start_gateway(Path(folder), text, name="front")
        started += [one.process for one in (behind, front) if one.process is not None]
        spans, timing = find(collector, front.target.port)
    print(f"{'begun':>8} {'took':>8}")
    print("\n".join(tree(spans)))
    total_ms = sum(float(one.partition("dur=")[2]) for one in timing.split(", "))
    print(f"\nserver-timing: {timing}\nin all {total_ms:.1f} ms")


if __name__ == "__main__":
    main()
