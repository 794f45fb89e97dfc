"""Scenarios of attacks, without a key or by a tenant whose quota is spent; the figures are another tenant's.

The victim sends 25 calls per second of 4 texts, which the gateway counts exactly. Bodies are as large as
`limits.body_bytes` allows. Attackers connect again as soon as the gateway closes their connection.
"""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

from backends.checkpoints.locations import DEFAULT_MODEL, locate_checkpoint
from loadtest import servers
from loadtest.corpora import CallShape
from loadtest.processes import usage, workers_of
from loadtest.recorder import Sample
from loadtest.servers import KEY, RunningServer
from loadtest.testbed import OTHER_KEY, Finding, Testbed, failed

_VICTIM_RATE = 25
_BODY_BYTES = 32 * 1024 * 1024
_SPENT = ", limits: {requests_per_minute: 1, tokens_per_minute: 1000}"
_CHUNKED = (
    b"POST /embed HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
)
# Runs in a thread until the event is set. Called with the gateway's port.
Attacker = Callable[[int, threading.Event], None]


async def many_trailers(testbed: Testbed) -> list[Finding]:
    """Send header lines after the body, without a key, on 8 connections."""
    return await _attack(testbed, [_flood(_CHUNKED + b"0\r\n", b"a:b\r\n" * 10_000)] * 8)


async def endless_trailer(testbed: Testbed) -> list[Finding]:
    """Send one header line without an end after the body, without a key, on 8 connections."""
    return await _attack(testbed, [_flood(_CHUNKED + b"0\r\na:", b"b" * 60_000)] * 8)


async def chunk_extensions(testbed: Testbed) -> list[Finding]:
    """Send chunks of one byte with long extensions, with a key, on 8 connections."""
    head = _CHUNKED.replace(b"host: h", b"host: h\r\nauthorization: Bearer " + KEY.encode())
    return await _attack(testbed, [_flood(head, (b"1;" + b"x" * 1000 + b"\r\n \r\n") * 50)] * 8)


async def slow_heads(testbed: Testbed) -> list[Finding]:
    """Hold 400 connections with half a head each."""
    return await _attack(testbed, [_hold(b"POST /embed HTTP/1.1\r\nhost: h\r\n", 50)] * 8)


async def unwanted_bodies(testbed: Testbed) -> list[Finding]:
    """Upload the largest bodies with a wrong key on 4 connections."""
    return await _attack(testbed, [_post("/v1/embeddings", [b"x" * _BODY_BYTES], key="wrong")] * 4)


async def wide_bodies_of_a_spent_tenant(testbed: Testbed) -> list[Finding]:
    """Upload arrays of millions of elements on 2 connections; the tenant may send one call per minute."""
    return await _attack(testbed, [_post("/v1/embeddings", _wide_bodies())] * 2, limits=_SPENT)


async def wide_bodies(testbed: Testbed) -> list[Finding]:
    """Upload arrays of millions of elements on 2 connections; the tenant has no limits."""
    return await _attack(testbed, [_post("/v1/embeddings", _wide_bodies())] * 2)


async def wide_reranks(testbed: Testbed) -> list[Finding]:
    """Upload millions of documents on 2 connections; the tenant has no limits."""
    body = _filled(b'{"query":"q","documents":[', b"{},", b"{}]}")
    return await _attack(testbed, [_post("/v1/rerank", [body])] * 2)


async def counting_for_a_spent_tenant(testbed: Testbed) -> list[Finding]:
    """Upload 2,048 texts of 15 KB on 4 connections; the tenant may send one call per minute."""
    return await _attack(testbed, [_post("/v1/embeddings", [_long_texts()])] * 4, limits=_SPENT)


async def counting_before_a_refusal(testbed: Testbed) -> list[Finding]:
    """Upload 2,048 texts of 15 KB on 4 connections; the tenant may send 1,000 tokens per minute."""
    return await _attack(
        testbed, [_post("/v1/embeddings", [_long_texts()])] * 4, limits=", limits: {tokens_per_minute: 1000}"
    )


async def tokenizing(testbed: Testbed) -> list[Finding]:
    """Have the built-in engine tokenize texts of a megabyte, on 8 connections."""
    body = json.dumps({"inputs": "a." * 500_000, "model": "own"}).encode()
    return await _attack(testbed, [_post("/tokenize", [body])] * 8, engine=True)


async def slow_readers(testbed: Testbed) -> list[Finding]:
    """Request large replies on 20 connections and read hardly any of them."""
    body = json.dumps({"inputs": ["a." * 250] * 60, "model": "own"}).encode()
    return await _attack(testbed, [_read_slowly("/tokenize", body)] * 20, engine=True)


async def wrong_keys(testbed: Testbed) -> list[Finding]:
    """Guess keys on 8 connections."""
    return await _attack(testbed, [_post("/v1/embeddings", [b"{}"], key="wrong")] * 8)


async def _attack(
    testbed: Testbed, attackers: list[Attacker], *, limits: str = "", engine: bool = False
) -> list[Finding]:
    """Measure the victim before and under an attack."""
    gateway = _gateway(testbed, limits, engine=engine)
    victim = servers.with_key(gateway.target.port, OTHER_KEY)
    # The attacker spends its own quota.
    servers.answers(gateway.target.port, "/v1/embeddings", b'{"input":"a","model":"stub"}')

    async def run() -> Sample:
        return await testbed.open(gateway, _VICTIM_RATE, CallShape(4), victim)

    await run()
    before = await run()
    workers = workers_of(gateway.process.process.pid)
    rss_bytes = usage(workers).rss_bytes
    stop = threading.Event()
    peak = asyncio.create_task(_peak_bytes(workers))
    loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(len(attackers))
    attacks = [loop.run_in_executor(threads, attacker, gateway.target.port, stop) for attacker in attackers]
    under = await run()
    stop.set()
    await asyncio.gather(*attacks)
    peak.cancel()
    ended = set(workers) - set(workers_of(gateway.process.process.pid))
    return [
        Finding("victim's worst ms", under.max_ms, before.max_ms),
        Finding("victim's p50 ms", under.p50_ms, before.p50_ms),
        failed(under, before),
        Finding("memory MB", (await peak - rss_bytes) / 1e6),
        Finding("workers ended", len(ended)),
    ]


def _gateway(testbed: Testbed, limits: str, *, engine: bool) -> RunningServer:
    stub = testbed.stub("--base-ms", "2", "--parallel", "8")
    checkpoint = locate_checkpoint(DEFAULT_MODEL)
    own = f", own: {{backend: torch, model: '{checkpoint}'}}" if engine else ""
    return testbed.gateway_with(
        f"upstreams: {{stub: {{backend: tei, replicas: ['http://127.0.0.1:{stub.target.port}'], "
        f"tokenizer: '{checkpoint}'}}{own}}}\n"
        f"models: {{stub: {{upstream: stub}}{', own: {upstream: own}' if engine else ''}}}\n"
        f"tenants: {{main: {servers.tenant(KEY, limits)}, "
        f"other: {servers.tenant(OTHER_KEY, ', limits: {tokens_per_minute: 100000000}')}}}\n"
    )


async def _peak_bytes(pids: list[int]) -> int:
    """Return the highest resident memory seen, once cancelled."""
    peak = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            peak = max(peak, usage(pids).rss_bytes)
            await asyncio.sleep(0.05)
    return peak


def _filled(start: bytes, item: bytes, end: bytes) -> bytes:
    """Return a body of the largest size that repeats an item."""
    return start + item * ((_BODY_BYTES - len(start) - len(end)) // len(item)) + end


def _wide_bodies() -> list[bytes]:
    items = (b"[],", b"9,", b'"",', b"{},")
    return [_filled(b'{"model":"stub","input":[', item, item[:-1] + b"]}") for item in items]


def _long_texts() -> bytes:
    text = " ".join(f"{number * 2654435761 % 2**32:08x}" for number in range(1600))
    return json.dumps({"model": "stub", "input": [text] * 2048}).encode()


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def _flood(head: bytes, piece: bytes) -> Attacker:
    """Return an attacker that sends a head and then a piece again and again."""

    def attack(port: int, stop: threading.Event) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), _connect(port) as connection:
                connection.sendall(head)
                while not stop.is_set():
                    connection.sendall(piece)

    return attack


def _hold(data: bytes, count: int) -> Attacker:
    """Return an attacker that opens connections, sends some data on each and waits."""

    def attack(port: int, stop: threading.Event) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    stack.enter_context(_connect(port)).sendall(data)
            stop.wait()

    return attack


def _post(path: str, bodies: list[bytes], key: str = KEY) -> Attacker:
    """Return an attacker that posts the bodies in turn and reads the replies."""

    def attack(port: int, stop: threading.Event) -> None:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        for body in cycle(bodies):
            if stop.is_set():
                return
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=70)
            # An early reply ends the connection while the body is still being sent.
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                connection.request("POST", path, body, headers)
                connection.getresponse().read()

    return attack


def _read_slowly(path: str, body: bytes) -> Attacker:
    """Return an attacker that pipelines requests and reads a byte of the replies now and then."""
    lines = (
        f"POST {path} HTTP/1.1",
        "host: h",
        f"authorization: Bearer {KEY}",
        f"content-length: {len(body)}",
    )
    request = "\r\n".join((*lines, "", "")).encode() + body

    def attack(port: int, stop: threading.Event) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), _connect(port) as connection:
                connection.sendall(request * 20)
                while not stop.wait(0.5) and connection.recv(1):
                    pass

    return attack
