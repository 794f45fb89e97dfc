"""Redis by TLS, behind Sentinel and as a cluster: quotas, usage and keys work the same way."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.config import schema as config
from gateway.errors import QuotaExceeded
from gateway.events import Event, StoreChanged
from gateway.quotas.ledger import QuotaRequest
from gateway.quotas.limits import SECOND_US, Cost, parse_limit
from gateway.quotas.redis_ledger import OutagePolicy, RedisLedger
from gateway.quotas.stored_counts import Counter, CountsInRedis, DayUsageRow, usage_days
from gateway.store.errors import StoreUnavailable
from gateway.store.memory_use import fullest
from gateway.store.redis_client import RedisClient
from gateway.tenants.keyring import StoredKey, key_digest
from gateway.tenants.store import KeyCreation, TenantStore
from tests.actors import TESTER
from tests.processes.conftest import wait_until
from tests.processes.tls_files import Authority
from tests.quotas.conftest import Commands
from tests.quotas.redis_server import RedisServer, SentinelServer, binary, has_tls
from tests.waiting import PATIENCE_S

LIMITS = (parse_limit("requests_per_day", 3), parse_limit("tokens_per_hour", 1000))
SLOTS = 16384
# Plainly in braces, the first two would leave an empty hash tag, which is none.
ODD_TENANTS = ("}x", "", "{}", "a}b", "{x")


@asynccontextmanager
async def ledger_on(url: str) -> AsyncIterator[tuple[RedisLedger, list[Event]]]:
    events: list[Event] = []
    ledger = RedisLedger(RedisClient(url, 3), OutagePolicy("refuse"), secrets.token_hex(4), events.append)
    try:
        yield ledger, events
    finally:
        await ledger.aclose()


async def call(ledger: RedisLedger, tenant: str) -> int:
    """Reserve and settle one request, and return the number of remaining requests."""
    request = QuotaRequest(secrets.token_hex(8), tenant, LIMITS, Cost(tokens=9), 60 * SECOND_US, "m")
    limit_statuses = ledger.settle(await ledger.reserve(request), Cost(tokens=5, inputs=1))
    await ledger.flush()
    return limit_statuses[0].remaining


async def counts(url: str) -> None:
    """Check that two gateways count together, to the token, for tenants on any node."""
    tenants = [*(f"tenant-{number}" for number in range(6)), *ODD_TENANTS]
    today = datetime.now(UTC).date().isoformat()
    async with ledger_on(url) as (first, events), ledger_on(url) as (second, _):
        for tenant in tenants:
            remaining = [await call(ledger, tenant) for ledger in (first, second, first)]
            assert [2, 1, 0] == remaining
        # The reserves of one turn form one batch, or one call per node of a cluster.
        refused = await asyncio.gather(*(call(second, tenant) for tenant in tenants), return_exceptions=True)
        assert {QuotaExceeded} == {type(answer) for answer in refused}
        for tenant in tenants:
            (row,) = await second.usage(tenant, [today])
            assert (3, 15, 3) == (row.requests, row.tokens, row.inputs)
        await first.beat()
        assert not events


async def raises_counts(url: str) -> None:
    """Check that spent limits which were raised are read again and refuse, for tenants on any node."""
    tenants = [*(f"raised-{number}" for number in range(6)), *(f"{name}raised" for name in ODD_TENANTS)]
    today = datetime.now(UTC).date().isoformat()
    counters = [Counter(tenant, "requests_per_day", 3, today, 3) for tenant in sorted(tenants)]
    rows = [DayUsageRow(tenant, today, "m", "k", {"tokens": 5}) for tenant in sorted(tenants)]
    client = RedisClient(url, 3)
    try:
        stored = CountsInRedis(client)
        for _ in range(2):
            await stored.raise_to(counters, rows)
        assert counters == await stored.counters(tenants)
        assert rows == await stored.usage(tenants, usage_days())
        async with ledger_on(url) as (ledger, _):
            for tenant in tenants:
                with pytest.raises(QuotaExceeded):
                    await call(ledger, tenant)
    finally:
        await client.aclose()


async def holds_keys(url: str) -> None:
    store = TenantStore(RedisClient(url, 3))
    settings = config.TenantConfig(limits={"requests_per_hour": 5})
    stored = StoredKey("k", key_digest("secret"), "acme")
    try:
        before = await store.look()
        assert KeyCreation(is_created=True, has_tenant=False) == await store.create_key(stored, by=TESTER)
        await store.put_tenant("acme", settings, by=TESTER)
        assert ([stored], {"acme": settings}) == (await store.keys(), await store.tenants())
        assert await store.has_tenants()
        after = await store.look()
        assert before.version != after.version
        assert before.clock_s < after.clock_s
        assert KeyCreation(is_created=False, has_tenant=True) == await store.create_key(stored, by=TESTER)
        assert await store.remove_tenant("acme", by=TESTER)
        assert not await store.has_tenants()
    finally:
        await store.aclose()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """Start three nodes that own all slots between them, and return the URL of one."""
    with ExitStack() as stack:
        nodes = []
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            node = RedisServer(
                folder, None, "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"
            )
            stack.callback(node.stop)
            nodes.append(node)
        share = -(-SLOTS // len(nodes))
        for number, node in enumerate(nodes):
            slots = range(number * share, min(SLOTS, (number + 1) * share))
            assert "OK" in node.command("CLUSTER", "ADDSLOTS", *map(str, slots))
            # With equal epochs the nodes would dispute the ownership of slots.
            node.command("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
            node.command("CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port))
        known = f"cluster_known_nodes:{len(nodes)}"
        assert wait_until(lambda: all(_agrees(node.command("CLUSTER", "INFO"), known) for node in nodes))
        yield f"redis+cluster://127.0.0.1:{nodes[0].port}"


def _agrees(info: str, known: str) -> bool:
    return "cluster_state:ok" in info and known in info


@pytest.mark.slow
async def test_counts_quotas_and_stores_keys_in_a_cluster(cluster: str) -> None:
    await counts(cluster)
    await raises_counts(cluster)
    await holds_keys(cluster)
    await reports_memory(cluster)


async def reports_memory(url: str) -> None:
    """Check that the memory of each node is read."""
    client = RedisClient(url, 2.0)
    try:
        nodes = await client.memory()
        assert 3 == len(nodes)
        assert fullest(nodes) == (max(node["used_memory"] for node in nodes), 0)
    finally:
        await client.aclose()


@pytest.fixture
def one_node(tmp_path: Path) -> Iterator[RedisServer]:
    """Start a cluster of one node. It stores its slots, and is a cluster again after a restart."""
    node = RedisServer(tmp_path, None, "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
    assert "OK" in node.command("CLUSTER", "ADDSLOTS", *map(str, range(SLOTS)))
    assert wait_until(lambda: "cluster_state:ok" in node.command("CLUSTER", "INFO"))
    yield node
    node.stop()


async def test_uses_a_cluster_that_comes_up_later(one_node: RedisServer) -> None:
    one_node.kill()
    url = f"redis+cluster://127.0.0.1:{one_node.port}"
    events: list[Event] = []
    ledger = RedisLedger(RedisClient(url, 0.25), OutagePolicy("allow"), "gateway", events.append)
    keeper = asyncio.create_task(ledger.maintain())
    try:
        for number in range(3):
            request = QuotaRequest(str(number), "acme", LIMITS, Cost(), 60 * SECOND_US, "m")
            assert (await ledger.reserve(request)).degraded
        one_node.restart()
        async with asyncio.timeout(PATIENCE_S):
            while [True, False] != [event.away for event in events if isinstance(event, StoreChanged)]:  # noqa: ASYNC110 - maintain() has no event
                await asyncio.sleep(0.02)
        assert 2 == await call(ledger, "acme")
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await ledger.aclose()


def test_command_reports_a_cluster_outage_in_one_line(
    one_node: RedisServer, tmp_path: Path, command: Commands
) -> None:
    one_node.kill()
    path = tmp_path / "router.yaml"
    path.write_text(f"""
quotas: {{store: "redis+cluster://127.0.0.1:{one_node.port}"}}
upstreams: {{one: {{backend: tei, replicas: ["http://127.0.0.1:1"]}}}}
models: {{bge: {{upstream: one}}}}
""")
    ended = command("keys", "list", "-c", str(path))

    assert 1 == ended.status
    assert "unavailable" in ended.err


@pytest.mark.slow
async def test_follows_a_sentinel_failover(tmp_path: Path) -> None:
    with ExitStack() as stack:
        master = RedisServer(tmp_path, None, "--repl-diskless-sync-delay", "0")
        stack.callback(master.stop)
        replica = RedisServer(tmp_path, None, "--replicaof", "127.0.0.1", str(master.port))
        stack.callback(replica.stop)
        assert wait_until(lambda: "master_link_status:up" in replica.command("INFO", "replication"))
        sentinel = SentinelServer(tmp_path, master)
        stack.callback(sentinel.stop)
        assert wait_until(
            lambda: str(replica.port) in sentinel.command("SENTINEL", "REPLICAS", sentinel.name)
        )

        await counts(sentinel.url)
        await holds_keys(sentinel.url)
        async with ledger_on(sentinel.url) as (ledger, _):
            assert 2 == await call(ledger, "acme")
            state = master.command("HGET", "gw:{acme}:limits", "requests_per_day=3")
            assert wait_until(
                lambda: state == replica.command("HGET", "gw:{acme}:limits", "requests_per_day=3")
            )
            master.kill()
            assert await asyncio.to_thread(
                wait_until, lambda: "role:master" in replica.command("INFO", "replication")
            )
            # The usage before the failover still counts, and the same ledger continues.
            await _beats(ledger)
            assert 1 == await call(ledger, "acme")


async def _beats(ledger: RedisLedger) -> None:
    """Send heartbeats until the store replies, as maintain() does."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await ledger.beat()
            except StoreUnavailable:
                await asyncio.sleep(0.02)
            else:
                return


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[tuple[RedisServer, Authority]]:
    """Start a server that speaks TLS only, and return it with its authority."""
    if not has_tls(binary()):
        pytest.skip("this redis-server is built without TLS")
    ours = Authority(tmp_path / "ours")
    certificate, key = ours.sign("redis")
    files = [
        "--tls-cert-file",
        str(certificate),
        "--tls-key-file",
        str(key),
        "--tls-ca-cert-file",
        str(ours.ca),
    ]
    server = RedisServer(tmp_path, None, *files, "--tls-auth-clients", "optional")
    yield server, ours
    server.stop()


async def test_connects_by_tls_with_a_private_authority(encrypted: tuple[RedisServer, Authority]) -> None:
    server, ours = encrypted
    url = f"rediss://127.0.0.1:{server.port}/0?ssl_ca_certs={ours.ca}"
    await counts(url)
    await holds_keys(url)


def test_rejects_an_untrusted_certificate(
    encrypted: tuple[RedisServer, Authority], tmp_path: Path, command: Commands
) -> None:
    server, ours = encrypted
    path = tmp_path / "router.yaml"
    ended = []
    for query in ("", f"?ssl_ca_certs={Authority(tmp_path / 'strangers').ca}", f"?ssl_ca_certs={ours.ca}"):
        path.write_text(f"""
quotas: {{store: "rediss://127.0.0.1:{server.port}/0{query}"}}
upstreams: {{one: {{backend: tei, replicas: ["http://127.0.0.1:1"]}}}}
models: {{bge: {{upstream: one}}}}
""")
        ended.append(command("keys", "list", "--json", "-c", str(path)))

    assert [1, 1, 0] == [result.status for result in ended]
    assert all("unavailable" in result.err for result in ended[:2])
    assert "[]" == ended[2].out.strip()


@asynccontextmanager
async def distant(server: RedisServer, each_way_s: float) -> AsyncIterator[int]:
    """Delay every byte to and from a server, and yield the port of the proxy."""
    loop = asyncio.get_running_loop()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            loop.call_later(each_way_s, writer.write, data)
        writer.close()

    async def connected(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, on = await asyncio.open_connection("127.0.0.1", server.port)
        with suppress(OSError):
            await asyncio.gather(carry(near, on), carry(far, back))
        for writer in (on, back):
            writer.close()

    proxy = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield proxy.sockets[0].getsockname()[1]
    finally:
        proxy.close()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*_other_tasks(), return_exceptions=True)


def _other_tasks() -> set[asyncio.Task[object]]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


async def test_connecting_may_take_longer_than_the_timeout(encrypted: tuple[RedisServer, Authority]) -> None:
    server, ours = encrypted
    async with distant(server, each_way_s=0.02) as port:
        # The round trip takes 40 ms: a command fits into 100 ms, a TLS handshake with the greetings does not.
        client = RedisClient(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={ours.ca}", 0.1)
        with pytest.raises(StoreUnavailable, match="no answer within"):
            await client.execute("PING")
        async with asyncio.timeout(PATIENCE_S):
            while not await _pong(client):
                pass
        await client.aclose()


async def _pong(client: RedisClient) -> bool:
    try:
        return bool(await client.execute("PING"))
    except StoreUnavailable:
        return False
