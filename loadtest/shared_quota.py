"""Exactness of a quota that HTTP and gRPC callers of one tenant share, over several gateways and one Redis.

    .venv/bin/python -m loadtest.shared_quota --calls 100000 --gateways 4      # about three minutes

Half of the calls are HTTP, half gRPC, spread over all gateways. The limit is 60 % of the calls: so many
succeed, not one more or fewer, and every other call is refused for its quota.
"""

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec

from backends.tei_protos import tei_pb2
from loadtest import servers
from loadtest.client_connection import ClientConnection, Reply, connect
from loadtest.processes import free_port, process_group
from loadtest.servers import KEY, RunningServer

ALLOWED_SHARE = 0.6
CALLERS = 16
HOST = "127.0.0.1"
TIMEOUT_S = 30.0
SERVED, REFUSED = "served", "refused"
HTTP_OUTCOMES = {200: SERVED, 429: REFUSED}
GRPC_OUTCOMES = {grpc.StatusCode.OK: SERVED, grpc.StatusCode.RESOURCE_EXHAUSTED: REFUSED}

# Answers one call, and returns its outcome.
Call = Callable[[int], Awaitable[str]]


class Gateway(msgspec.Struct, frozen=True):
    """A gateway with both listeners."""

    server: RunningServer
    grpc_port: int


def start_gateways(
    folder: Path, stub: RunningServer, redis_url: str, limit: int, count: int
) -> list[Gateway]:
    """Start gateways that share one Redis, and one tenant with a limit of requests per day."""
    gateways = []
    for number in range(count):
        grpc_port = free_port()
        config = (
            f"grpc: {{listen: 127.0.0.1:{grpc_port}}}\n"
            f"quotas: {{store: '{redis_url}'}}\n"
            f"upstreams: {{stub: {{backend: tei, replicas: ['http://127.0.0.1:{stub.target.port}']}}}}\n"
            "models: {stub: {upstream: stub}}\n"
            f"tenants: {{main: {servers.tenant(KEY, f', limits: {{requests_per_day: {limit}}}')}}}\n"
        )
        gateways.append(Gateway(servers.start_gateway(folder, config, name=f"gateway-{number}"), grpc_port))
    return gateways


async def http_caller(gateway: Gateway) -> Call:
    """Return a caller on a connection of its own."""
    arrived: asyncio.Queue[Reply] = asyncio.Queue()

    def on_reply(_: ClientConnection, reply: Reply) -> None:
        arrived.put_nowait(reply)

    connection = await connect(HOST, gateway.server.target.port, on_reply)

    async def call(number: int) -> str:
        body = msgspec.json.encode({"inputs": f"text {number}"})
        head = (
            f"POST /embed HTTP/1.1\r\nhost: {HOST}\r\nauthorization: Bearer {KEY}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        connection.send(head.encode() + body)
        async with asyncio.timeout(TIMEOUT_S):
            reply = await arrived.get()
        return HTTP_OUTCOMES.get(reply.status, f"HTTP {reply.status}")

    return call


def grpc_caller(channel: grpc.aio.Channel) -> Call:
    """Return a caller of unary RPCs."""
    embed: Any = channel.unary_unary("/tei.v1.Embed/Embed")
    metadata = (("authorization", f"Bearer {KEY}"),)

    async def call(number: int) -> str:
        request = tei_pb2.EmbedRequest(inputs=f"text {number}").SerializeToString()
        rpc = embed(request, metadata=metadata, timeout=TIMEOUT_S)
        code = await rpc.code()
        return GRPC_OUTCOMES.get(code, f"gRPC {code.name}")

    return call


async def send_all(callers: Sequence[Call], calls: int) -> Counter[str]:
    """Send calls, each caller one after another; return the number of each outcome."""
    outcomes: Counter[str] = Counter()
    numbers = iter(range(calls))

    async def work(call: Call) -> None:
        for number in numbers:
            outcomes[await call(number)] += 1

    await asyncio.gather(*(work(call) for call in callers))
    return outcomes


async def run(folder: Path, calls: int, count: int) -> tuple[int, dict[str, Counter[str]]]:
    """Return the limit, and the outcomes of each kind of call."""
    limit = int(calls * ALLOWED_SHARE)
    with process_group() as processes:
        stub = servers.start_stub(folder)
        processes.append(stub.process)
        redis, url = servers.start_redis(folder)
        processes.append(redis)
        gateways = start_gateways(folder, stub, url, limit, count)
        processes.extend(gateway.server.process for gateway in gateways)
        channels = [grpc.aio.insecure_channel(f"{HOST}:{gateway.grpc_port}") for gateway in gateways]
        try:
            over_http = [await http_caller(gateways[number % count]) for number in range(CALLERS)]
            over_grpc = [grpc_caller(channels[number % count]) for number in range(CALLERS)]
            found = await asyncio.gather(
                send_all(over_http, calls // 2), send_all(over_grpc, calls - calls // 2)
            )
        finally:
            for channel in channels:
                await channel.close()
    return limit, dict(zip(("HTTP", "gRPC"), found, strict=True))


def main() -> None:
    """Run, print the outcomes, and exit with 1 if the quota was not exact."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--gateways", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        limit, outcomes = asyncio.run(run(Path(folder), arguments.calls, arguments.gateways))
    together = sum(outcomes.values(), Counter())
    for kind, counts in outcomes.items():
        print(kind, dict(counts))
    is_exact = together == {SERVED: limit, REFUSED: arguments.calls - limit}
    print(f"limit {limit}, served {together[SERVED]}: {'exact' if is_exact else 'NOT EXACT'}")
    raise SystemExit(not is_exact)


if __name__ == "__main__":
    main()
