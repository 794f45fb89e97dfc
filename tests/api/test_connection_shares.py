"""Connections under load: the share of a tenant, room for probes, and the pace of refusals."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway.api.server.call_io import BURST_S, OWNERS_MAX, REFUSALS_PER_S, WAIT_MAX_S, RefusalPace
from gateway.api.server.connection_limit import PROBES_MAX, SHARE_OF_FREE, ConnectionLimit
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY
from tests.fakes.hooks import Gate, tei_with_hook
from tests.fakes.tei import FakeTei
from tests.socket_gateway import SocketGateway, socket_gateway, wait_for_value
from tests.waiting import PATIENCE_S

GREEDY = "greedy-key-0123456789abcdef"
WRONG = "wrong-key-0123456789abcdef"
SPENT = "spent-key-0123456789abcdef"
CONFIG = f"""
upstreams: {{up: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: up}}}}
tenants:
  acme: {{keys: ["{key_digest(KEY)}"]}}
  greedy: {{keys: ["{key_digest(GREEDY)}"]}}
  spent: {{keys: ["{key_digest(SPENT)}"], limits: {{requests_per_day: 1}}}}
"""
LIMIT = 16
# The most that one tenant may have: it leaves a third of its share free.
SHARE = 12


class Held(Gate):
    """Gate for one text only."""

    async def __call__(self, _: str, sent: dict[str, Any]) -> None:
        """Hold requests with the text."""
        if "held" in (sent.get("input") or ()):
            await super().__call__()


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Callers:
    """Clients of a gateway, whose connections close at the end."""

    def __init__(self, gateway: SocketGateway) -> None:
        self.gateway = gateway
        self.opened: list[Connection] = []

    async def send(self, key: str, text: str) -> Connection:
        """Send a call on a new connection, and return the connection."""
        body = msgspec.json.encode({"input": text})
        self.opened.append(await self.gateway.send_part(key, body, len(body)))
        return self.opened[-1]

    async def connect(self) -> None:
        """Open a connection, and send nothing."""
        self.opened.append(await asyncio.open_connection("127.0.0.1", self.gateway.port))


@asynccontextmanager
async def callers_of(server: FakeTei, connections_max: int = 1000) -> AsyncIterator[Callers]:
    """Run a gateway with a bound on connections."""
    async with (
        socket_gateway(server, CONFIG, connections_max=connections_max) as gateway,
        asyncio.timeout(PATIENCE_S),
    ):
        callers = Callers(gateway)
        try:
            yield callers
        finally:
            for _, writer in callers.opened:
                writer.close()


async def read_reply(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the status and the body of the next reply of a connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head.split(b" ")[1]), await reader.readexactly(size)


async def test_calls_of_one_tenant_leave_connections_to_others_and_to_probes() -> None:
    gate = Held()
    async with callers_of(tei_with_hook(gate), LIMIT) as callers:
        gateway = callers.gateway
        served = [await callers.send(GREEDY, "held") for _ in range(SHARE)]
        await wait_for_value(SHARE, lambda: gateway.application.in_flight.calls)
        refused, _ = await callers.send(GREEDY, "held")
        status, body = await read_reply(refused)
        assert (429, "overloaded") == (status, msgspec.json.decode(body)["error"]["code"])
        # Connections beyond the share wait for nothing that the gateway owes.
        for _ in range(2 * LIMIT):
            await callers.send(GREEDY, "held")

        assert [200] * 5 == [(await gateway.call()).status_code for _ in range(5)]
        assert 200 == (await gateway.probe()).status_code
        gate.opened.set()
        assert [200] * SHARE == [(await read_reply(reader))[0] for reader, _ in served]
        # What the calls took is free again.
        reader, _ = await callers.send(GREEDY, "a")
        assert 200 == (await read_reply(reader))[0]


async def test_probes_are_answered_while_calls_take_all_connections() -> None:
    gate = Held()
    keys = [KEY, GREEDY]
    async with callers_of(tei_with_hook(gate), LIMIT) as callers:
        gateway = callers.gateway
        for number in range(LIMIT):
            await callers.send(keys[number % 2], "held")
        await wait_for_value(LIMIT, lambda: len(gateway.connections))
        # The share leaves some free. Requests that are no calls may take the rest.
        for connection in list(gateway.connections):
            connection.waiting_rank = lambda: None  # type: ignore[method-assign]
        for _ in range(2 * PROBES_MAX):
            assert 200 == (await gateway.probe()).status_code
        for _ in range(2 * PROBES_MAX):
            await callers.connect()
        probed = await gateway.probe()
        assert (200, "close") == (probed.status_code, probed.headers["connection"])
        reply = await gateway.call()
        assert (503, "gateway_full") == (reply.status_code, reply.json()["type"])
        assert "1" == reply.headers["retry-after"]
        gate.opened.set()


class Opened:
    """Connection that counts only as such. rank: as `waiting_rank` returns it."""

    def __init__(self, owner: str, rank: tuple[int, float] | None, *, new: bool = False) -> None:
        self.new = new
        self.owner = owner
        self.rank = rank
        self.for_probes = False
        self.closed = False

    def waiting_rank(self) -> tuple[int, float] | None:
        return self.rank

    def is_new(self) -> bool:
        return self.new

    def make_room(self) -> None:
        self.closed = True


async def test_the_owner_of_the_most_connections_makes_room_first() -> None:
    few = [Opened("address 10.0.0.1", (0, 0.0)), Opened("acme", (1, 0.0))]
    many = [Opened("greedy", None), Opened("greedy", None), Opened("greedy", (1, 9.0))]
    newcomer = Opened("address 10.0.0.2", (0, 5.0))

    assert "open" == ConnectionLimit(5).admit(newcomer, [*few, *many, newcomer])
    assert [False, False, False, False, True] == [each.closed for each in (*few, *many)]


async def test_new_connections_do_not_close_each_other_before_they_are_read() -> None:
    limit = ConnectionLimit(16)
    opened = [Opened("address 10.0.0.1", (0, float(number)), new=True) for number in range(20)]

    assert "open" == limit.admit(opened[-1], opened)
    assert not any(each.closed for each in opened)
    # More than a quarter over the bound.
    opened.append(Opened("address 10.0.0.1", (0, 20.0), new=True))
    assert "open" == limit.admit(opened[-1], opened)
    assert [True] == [each.closed for each in opened if each.closed]
    assert opened[0].closed


async def test_an_idle_connection_stays_while_many_requests_are_about_to_end() -> None:
    limit = ConnectionLimit(8)
    idle, newcomer = Opened("acme", (1, 0.0)), Opened("address 10.0.0.1", (0, 1.0), new=True)
    busy = [Opened("greedy", None) for _ in range(7)]

    assert "open" == limit.admit(newcomer, [idle, *busy, newcomer])
    assert not idle.closed
    for _ in range(6):
        assert limit.claim("greedy")
    assert "open" == limit.admit(newcomer, [idle, *busy, newcomer])
    assert idle.closed


@pytest.mark.parametrize("tenants", [1, 2, 5])
def test_busy_tenants_take_equal_shares_and_leave_room_for_the_next(tenants: int) -> None:
    limit, names = ConnectionLimit(1000), [f"tenant-{number}" for number in range(tenants)]
    held = dict.fromkeys(names, 0)
    for _ in range(1000):
        for name in names:
            held[name] += limit.claim(name)

    assert max(held.values()) - min(held.values()) <= SHARE_OF_FREE
    assert limit.claim("next")
    limit.release("next")
    for name in names:
        for _ in range(held[name]):
            limit.release(name)
    assert limit.claim("alone")


def test_a_single_connection_may_carry_a_call() -> None:
    assert ConnectionLimit(1).claim("acme")


def test_refusals_are_paced_by_owner_within_bounds() -> None:
    pace = RefusalPace()
    burst = int(REFUSALS_PER_S * BURST_S)

    assert [0.0] * burst == [round(pace.wait_s("a", 10.0), 6) for _ in range(burst)]
    waits = [pace.wait_s("a", 10.0) for _ in range(2000)]
    assert waits == sorted(waits)
    assert 0.0 < waits[0] < waits[100] < waits[-1] == WAIT_MAX_S
    assert 0.0 == pace.wait_s("b", 10.0)
    # After a pause it may send as many again.
    assert [0.0] * burst == [round(pace.wait_s("a", 100.0), 6) for _ in range(burst)]
    for number in range(2 * OWNERS_MAX):
        pace.wait_s(str(number), 10.0)
    assert OWNERS_MAX == len(pace._free_at_s)


@pytest.mark.parametrize(("key", "status"), [(WRONG, 401), (SPENT, 429)])
async def test_replies_to_a_loop_of_refused_calls_wait_while_others_are_served(key: str, status: int) -> None:
    async with callers_of(FakeTei()) as callers:
        gateway = callers.gateway
        await read_reply((await callers.send(key, "first"))[0])
        loop_s = asyncio.get_running_loop().time()
        for owner in ("spent", "address 127.0.0.1"):
            for _ in range(3 * REFUSALS_PER_S):
                gateway.application.asgi._parts.refusals.wait_s(owner, loop_s)
        burst = [await callers.send(key, "a" * 30_000) for _ in range(5)]
        await wait_for_value(5, lambda: sum(each.is_held_back for each in gateway.connections))
        # Served while replies to refused calls, whose bodies are not kept, wait.
        assert 200 == (await gateway.call()).status_code
        waiting = [each for each in gateway.connections if each.is_held_back]
        assert {b""} == {bytes(each.cycle.body) for each in waiting}
        assert {0} == {rank[0] for each in waiting if (rank := each.waiting_rank())}
        statuses = [(await read_reply(reader))[0] for reader, _ in burst]
        assert {status, 429} >= set(statuses)
        # The connection goes on after it.
        reader, writer = burst[-1]
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"HTTP/1.1 200 OK\r\n" == await reader.readuntil(b"\r\n")
