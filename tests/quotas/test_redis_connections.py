"""Redis by TLS, behind a sentinel and as a cluster: quotas, usage and keys are the same everywhere."""

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
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.tenants.keyring import StoredKey, key_digest
from gateway.tenants.store import TenantStore
from tests.processes.conftest import wait_until
from tests.processes.tls_files import Authority
from tests.quotas.conftest import Commands
from tests.quotas.redis_server import RedisServer, SentinelServer, binary, has_tls

LIMITS = (parse_limit("requests_per_day", 3), parse_limit("tokens_per_hour", 1000))
SLOTS = 16384


@asynccontextmanager
async def ledger_on(url: str) -> AsyncIterator[tuple[RedisLedger, list[Event]]]:
    events: list[Event] = []
    ledger = RedisLedger(RedisClient(url, 3), OutagePolicy("refuse"), secrets.token_hex(4), events.append)
    try:
        yield ledger, events
    finally:
        await ledger.aclose()


async def call(ledger: RedisLedger, tenant: str) -> int:
    """One call, reserved and settled; how many requests it left."""
    ask = QuotaRequest(secrets.token_hex(8), tenant, LIMITS, Cost(tokens=9), 60 * SECOND_US, "m")
    limit_statuses = ledger.settle(await ledger.reserve(ask), Cost(tokens=5, inputs=1))
    await ledger.flush()
    return limit_statuses[0].remaining


async def counts(url: str) -> None:
    """Two gateways count together, to the token, for tenants on any node."""
    tenants = [f"tenant-{number}" for number in range(6)]
    today = datetime.now(UTC).date().isoformat()
    async with ledger_on(url) as (one, events), ledger_on(url) as (two, _):
        for tenant in tenants:
            left = [await call(ledger, tenant) for ledger in (one, two, one)]
            assert [2, 1, 0] == left
        # All of one turn travel together, to several nodes where there are some.
        refused = await asyncio.gather(*(call(two, tenant) for tenant in tenants), return_exceptions=True)
        assert {QuotaExceeded} == {type(answer) for answer in refused}
        for tenant in tenants:
            (row,) = await two.usage(tenant, [today])
            assert (3, 15, 3) == (row.requests, row.tokens, row.inputs)
        await one._heartbeat.beat()
        assert not events


async def holds_keys(url: str) -> None:
    store = TenantStore(RedisClient(url, 3))
    settings = config.TenantConfig(limits={"requests_per_hour": 5})
    stored = StoredKey("k", key_digest("secret"), "acme")
    try:
        before = await store.version()
        await store.put(stored)
        await store.put_tenant("acme", settings)
        assert ([stored], {"acme": settings}) == (await store.keys(), await store.tenants())
        assert await store.holds_any()
        assert before != await store.version()
        assert await store.remove_tenant("acme")
        assert not await store.holds_any()
    finally:
        await store.aclose()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """Three nodes that have met and own every slot between them; the URL of one."""
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
            # Different ones, or they would argue over who owns what.
            node.command("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
            node.command("CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port))
        known = f"cluster_known_nodes:{len(nodes)}"
        assert wait_until(lambda: all(_agrees(node.command("CLUSTER", "INFO"), known) for node in nodes))
        yield f"redis+cluster://127.0.0.1:{nodes[0].port}"


def _agrees(told: str, known: str) -> bool:
    return "cluster_state:ok" in told and known in told


@pytest.mark.slow
async def test_counts_quotas_and_stores_keys_in_a_cluster(cluster: str) -> None:
    await counts(cluster)
    await holds_keys(cluster)


@pytest.fixture
def one_node(tmp_path: Path) -> Iterator[RedisServer]:
    """The smallest cluster. It keeps who owns what, so that it is one again after it was killed."""
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
            ask = QuotaRequest(str(number), "acme", LIMITS, Cost(), 60 * SECOND_US, "m")
            assert (await ledger.reserve(ask)).degraded
        one_node.restart()
        async with asyncio.timeout(15):
            while [True, False] != [one.away for one in events if isinstance(one, StoreChanged)]:  # noqa: ASYNC110 - the keeper tells nobody
                await asyncio.sleep(0.05)
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
    assert "away" in ended.err


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
            kept = master.command("HGET", "gw:{acme}:limits", "requests_per_day=3")
            assert wait_until(
                lambda: kept == replica.command("HGET", "gw:{acme}:limits", "requests_per_day=3")
            )
            master.kill()
            assert await asyncio.to_thread(
                wait_until, lambda: "role:master" in replica.command("INFO", "replication")
            )
            # What was used before is not forgotten, and the same ledger goes on.
            await _beats(ledger)
            assert 1 == await call(ledger, "acme")


async def _beats(ledger: RedisLedger) -> None:
    """As its keeper does: ask until the store is back."""
    async with asyncio.timeout(15):
        while True:
            try:
                await ledger._heartbeat.beat()
            except StoreUnavailable:
                await asyncio.sleep(0.05)
            else:
                return


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[tuple[RedisServer, Authority]]:
    """A server that speaks TLS only, and whom to trust for it."""
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

    assert [1, 1, 0] == [one.status for one in ended]
    assert all("away" in one.err for one in ended[:2])
    assert "[]" == ended[2].out.strip()


@asynccontextmanager
async def distant(server: RedisServer, each_way_s: float) -> AsyncIterator[int]:
    """The server as if it were far away: every byte takes its time. Yields the port."""
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
        async with asyncio.timeout(5):
            await asyncio.gather(*_others(), return_exceptions=True)


def _others() -> set[asyncio.Task[object]]:
    return {one for one in asyncio.all_tasks() if one is not asyncio.current_task()}


async def test_connecting_may_take_longer_than_the_timeout(encrypted: tuple[RedisServer, Authority]) -> None:
    server, ours = encrypted
    async with distant(server, each_way_s=0.02) as port:
        # 40 ms there and back: a command fits into 100 ms, TLS and the greetings after it do not.
        door = RedisClient(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={ours.ca}", 0.1)
        with pytest.raises(StoreUnavailable, match="no answer within"):
            await door.execute("PING")
        async with asyncio.timeout(10):
            while not await _pong(door):
                pass
        await door.aclose()


async def _pong(door: RedisClient) -> bool:
    try:
        return bool(await door.execute("PING"))
    except StoreUnavailable:
        return False
