"""Hundreds of cancelled requests release every resource, over real sockets and a real Redis."""

import asyncio
from pathlib import Path

from gateway.app import Application
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY
from tests.fakes.hooks import Gate
from tests.fakes.tei import FakeTei
from tests.quotas.redis_server import RedisServer
from tests.socket_gateway import socket_gateway, wait_for_value
from tests.waiting import PATIENCE_S

# Enough for eight batches that the replica computes, and eight full ones after them.
CALLERS = 300
CONFIG = """
quotas: {{store: "{store}"}}
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"], in_flight_batches: 8}}}}
models: {{bge: {{upstream: one}}}}
tenants: {{acme: {{keys: ["{digest}"], limits: {{requests_in_flight: 600, tokens_per_minute: 1000000}}}}}}
"""


def open_files() -> int:
    """Return the number of open files of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def resources_of(application: Application, redis: RedisServer) -> dict[str, object]:
    """Return every resource that a request holds."""
    upstream = application.gateway.upstreams["one"]
    lane, edge = upstream.lanes["texts"], application.in_flight
    (replica,) = lane._pool.replicas
    return {
        "calls": edge.calls,
        "bytes": edge._bytes,
        "ways to call off": len(edge.cancels),
        "queued": (len(lane._queue), lane.queued_tokens),
        "shared": len(lane._shared),
        "attempts": len(lane._attempts.in_flight),
        "at the replica": (replica.batches, replica.inputs, replica.tokens, dict(replica.batches_by_tenant)),
        "reservations": redis.command("HLEN", "gw:{acme}:open"),
        "their ends": redis.command("ZCARD", "gw:{acme}:ends"),
    }


NOTHING = {
    "calls": 0,
    "bytes": 0,
    "ways to call off": 0,
    "queued": (0, 0),
    "shared": 0,
    "attempts": 0,
    "at the replica": (0, 0, 0, {}),
    "reservations": ":0\r\n",
    "their ends": ":0\r\n",
}


# Each caller is a connection of its own.
async def test_cancelled_requests_release_all_resources(own_redis: RedisServer) -> None:
    server = FakeTei(max_client_batch_size=32)
    config = CONFIG.format(store=own_redis.url, digest=key_digest(KEY))
    async with socket_gateway(server, config) as gateway, asyncio.timeout(PATIENCE_S):
        application = gateway.application
        # The first request opens the connections to Redis.
        assert (await gateway.call()).status_code == 200
        tasks, files = len(asyncio.all_tasks()), open_files()
        for joined in (False, True):
            first, second = Gate(), Gate()
            server.hook = first
            clients = [await gateway.send_call(f"{joined} {number}") for number in range(CALLERS)]
            await wait_for_value((CALLERS, 8), lambda gate=first: (application.in_flight.calls, gate.waiting))
            if joined:
                # The queued inputs are sent as full batches, which the second gate holds.
                server.hook = second
                first.opened.set()
                await wait_for_value(8, lambda gate=second: gate.waiting)
            for client in clients:
                client.close()
            await wait_for_value(NOTHING, lambda: resources_of(application, own_redis))
        # The connection of the first request may still be open.
        await wait_for_value(
            (0, 0), lambda: (max(0, len(asyncio.all_tasks()) - tasks), max(0, open_files() - files))
        )
        server.hook = None
        reply = await gateway.call()

    assert reply.status_code == 200
    assert reply.headers["x-ratelimit-limit-requests"] == "600"
