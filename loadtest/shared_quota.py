"""Exactness of a quota that HTTP and gRPC callers of one tenant share, over several gateways and one Redis.

    .venv/bin/python -m loadtest.shared_quota --calls 100000 --gateways 4      # about three minutes
    .venv/bin/python -m loadtest.shared_quota --calls 20000 --gateways 4 --money

Half of the calls are HTTP, half gRPC, spread over all gateways. The limit is 60 % of the calls: so many
succeed, not one more or fewer, and every other call is refused for its quota.

With `--money` the limit is a budget for 60 % of the calls. The settled cost must not exceed it, what is left
must be less than one call may cost, and the usage must be the cost of the calls that were served.
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
# For a million tokens. A call has three or four, and its reservation is an upper bound by its length.
PRICE = 1000
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
    folder: Path, stub: RunningServer, redis_url: str, limit: str, count: int
) -> list[Gateway]:
    """Start gateways that share one Redis, and one tenant with a limit."""
    gateways = []
    for number in range(count):
        grpc_port = free_port()
        config = (
            f"grpc: {{listen: 127.0.0.1:{grpc_port}}}\n"
            f"quotas: {{store: '{redis_url}'}}\n"
            f"upstreams: {{stub: {{backend: tei, replicas: ['http://127.0.0.1:{stub.target.port}']}}}}\n"
            f"currency: EUR\nmodels: {{stub: {{upstream: stub, price_per_million_tokens: {PRICE}}}}}\n"
            f"tenants: {{main: {servers.tenant(KEY, f', limits: {{{limit}}}')}}}\n"
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


class Outcomes(msgspec.Struct):
    """Number of each outcome, and the tokens of the calls that were served."""

    counts: Counter[str] = msgspec.field(default_factory=Counter)
    tokens: int = 0


async def send_all(callers: Sequence[Call], calls: int) -> Outcomes:
    """Send calls, each caller one after another."""
    outcomes = Outcomes()
    numbers = iter(range(calls))

    async def work(call: Call) -> None:
        for number in numbers:
            outcome = await call(number)
            outcomes.counts[outcome] += 1
            if outcome == SERVED:
                outcomes.tokens += tokens_of(number)

    await asyncio.gather(*(work(call) for call in callers))
    return outcomes


def tokens_of(number: int) -> int:
    """Return the tokens that the stub counts in a call's text."""
    return len(f"text {number}") // 4 + 2


async def settled_cost(gateway: Gateway) -> float:
    """Return the cost in the usage of all tenants."""
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection(HOST, gateway.server.target.port)
        writer.write(f"GET /admin/usage HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n\r\n".encode())
        reply = await reader.read()
        writer.close()
    usage = msgspec.json.decode(reply.partition(b"\r\n\r\n")[2])
    return float(sum(row["cost"] for row in usage["data"]))


class Run(msgspec.Struct):
    """Result of a run. cost: settled by all gateways, in the currency."""

    outcomes: dict[str, Outcomes]
    cost: float

    @property
    def counts(self) -> Counter[str]:
        """Number of each outcome, of all kinds of call."""
        return sum((kind.counts for kind in self.outcomes.values()), Counter[str]())

    @property
    def tokens(self) -> int:
        """Tokens of all calls that were served."""
        return sum(kind.tokens for kind in self.outcomes.values())


async def run(folder: Path, calls: int, count: int, limit: str) -> Run:
    """Send the calls to gateways whose tenant has this limit."""
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
            # A settlement waits 20 ms for company.
            await asyncio.sleep(1)
            cost = await settled_cost(gateways[0])
        finally:
            for channel in channels:
                await channel.close()
    return Run(dict(zip(("HTTP", "gRPC"), found, strict=True)), cost)


def check_requests(ended: Run, calls: int, limit: int) -> bool:
    """Print whether a limit of requests was exact, and return it."""
    served = ended.counts[SERVED]
    is_exact = ended.counts == {SERVED: limit, REFUSED: calls - limit}
    print(f"limit {limit}, served {served}: {'exact' if is_exact else 'NOT EXACT'}")
    return is_exact


def check_budget(ended: Run, calls: int, budget: float) -> bool:
    """Print the share of a budget that was spent, and return whether it was exact."""
    # As many bytes as the longest text has, and its special tokens.
    most = (len(f"text {calls}") + 4) * PRICE / 10**6
    expected = ended.tokens * PRICE / 10**6
    is_counted = abs(ended.cost - expected) < 1e-9 and ended.counts.keys() == {SERVED, REFUSED}
    is_exact = is_counted and budget - most < ended.cost <= budget
    print(
        f"budget {budget} EUR, admitted {ended.cost:.3f} EUR of {expected:.3f} EUR by the replies: "
        f"{ended.cost / budget:.4%}: {'exact' if is_exact else 'NOT EXACT'}"
    )
    return is_exact


def main() -> None:
    """Run, print the outcomes, and exit with 1 if the quota was not exact."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--money", action="store_true", help="limit money in place of requests")
    arguments = parser.parse_args()
    calls = arguments.calls
    limit = int(calls * ALLOWED_SHARE)
    # Both kinds of call send the same texts.
    budget = round(2 * sum(map(tokens_of, range(calls // 2))) * ALLOWED_SHARE * PRICE / 10**6, 3)
    written = f"budget_per_month: {budget}" if arguments.money else f"requests_per_day: {limit}"
    with tempfile.TemporaryDirectory() as folder:
        ended = asyncio.run(run(Path(folder), calls, arguments.gateways, written))
    for kind, outcomes in ended.outcomes.items():
        print(kind, dict(outcomes.counts))
    is_exact = check_budget(ended, calls, budget) if arguments.money else check_requests(ended, calls, limit)
    raise SystemExit(not is_exact)


if __name__ == "__main__":
    main()
