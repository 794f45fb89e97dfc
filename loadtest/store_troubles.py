"""Calls by status while the shared store is emptied, killed or refuses, with 20 tenants and two gateways.

    .venv/bin/python -m loadtest.store_troubles flush             # Redis is emptied under load
    .venv/bin/python -m loadtest.store_troubles outage            # Redis is killed, and returns after a while
    .venv/bin/python -m loadtest.store_troubles password          # a gateway starts with a wrong password
    .venv/bin/python -m loadtest.store_troubles flush --tree ../other-checkout

Each run takes less than a minute and stops by itself. `flush`: tenants without limits send 40 calls a second
together. `outage`: idle tenants with a limit of 10 requests a minute send six calls each within 20 s, to both
gateways in turn; Redis, which keeps its data, returns after ten seconds.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from loadtest import servers
from loadtest.client_connection import ClientConnection, Reply, connect
from loadtest.processes import PinnedProcess, free_port, listens, process_group
from loadtest.servers import ROOT, RunningServer

HOST = "127.0.0.1"
TENANTS = 20
TIMEOUT_S = 30.0
FLUSH_CALLS = 1200
FLUSH_CALLS_PER_S = 40.0
OUTAGE_CALLS_EACH = 5
OUTAGE_EVERY_S = 3.0
OUTAGE_S = 10.0
PERSISTENT = ("--appendonly", "yes", "--appendfsync", "always")
OPERATOR = "sk-operator"

# Sends one call with a key, and returns its status.
Call = Callable[[str], Awaitable[int]]


def config(stub: RunningServer, redis_url: str, folder: Path) -> str:
    """Return router.yaml of a gateway whose tenants are all in Redis."""
    return (
        f"state_dir: {folder}\n"
        f"quotas: {{store: '{redis_url}'}}\n"
        f"upstreams: {{stub: {{backend: tei, replicas: ['http://{HOST}:{stub.target.port}']}}}}\n"
        "models: {stub: {upstream: stub}}\n"
    )


async def caller(gateway: RunningServer) -> Call:
    """Return a caller of one gateway on a connection of its own."""
    arrived: asyncio.Queue[Reply] = asyncio.Queue()

    def on_reply(_: ClientConnection, reply: Reply) -> None:
        arrived.put_nowait(reply)

    connection = await connect(HOST, gateway.target.port, on_reply)
    turn = asyncio.Lock()

    async def call(key: str) -> int:
        async with turn, asyncio.timeout(TIMEOUT_S):
            connection.send(_request("POST", "/embed", key, b'{"inputs":"a text"}'))
            return (await arrived.get()).status

    return call


def _request(method: str, path: str, key: str, body: bytes) -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: {HOST}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def admin(gateway: RunningServer, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    """Send one request of the operator, and return the status and the body of its reply."""
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection(HOST, gateway.target.port)
        encoded = b"" if body is None else msgspec.json.encode(body)
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(encoded)}\r\n\r\n"
        )
        writer.write(head.encode() + encoded)
        reply = await reader.read()
        writer.close()
    lines, _, content = reply.partition(b"\r\n\r\n")
    return int(lines.split(b" ")[1]), content


async def create_tenants(gateway: RunningServer, limits: dict[str, int]) -> list[str]:
    """Create the tenants, and return a key of each."""
    keys = []
    for number in range(TENANTS):
        await admin(gateway, "PUT", f"/admin/tenants/team{number:02}", {"limits": limits})
        _, created = await admin(gateway, "POST", "/admin/keys", {"tenant": f"team{number:02}"})
        keys.append(json.loads(created)["key"])
    # The other gateway has read them.
    await asyncio.sleep(1)
    return keys


def report(statuses: Counter[int], gateways: Sequence[RunningServer]) -> None:
    """Print the calls by status, and the lines of the logs that are no calls."""
    print(dict(sorted(statuses.items())))
    for gateway in gateways:
        for line in gateway.process.log.read_text().splitlines():
            if '"level":"error"' in line or '"level":"warning"' in line:
                print(f"{gateway.name}: {line[:300]}")


async def flush(folder: Path, tree: Path) -> None:
    """Empty Redis after a third of the calls."""
    with process_group() as processes:
        gateways, _, url = _start(folder, tree, processes)
        keys = await create_tenants(gateways[0], {})
        callers = [await caller(gateway) for gateway in gateways for _ in range(4)]
        statuses: Counter[int] = Counter()
        began_s = time.monotonic()
        for number in range(FLUSH_CALLS):
            if number == FLUSH_CALLS // 3:
                await _command(url, "FLUSHALL")
            await asyncio.sleep(max(0.0, began_s + number / FLUSH_CALLS_PER_S - time.monotonic()))
            statuses[await callers[number % len(callers)](keys[number % len(keys)])] += 1
        report(statuses, gateways)
        print("status:", (await _store_status(gateways[0])))


async def outage(folder: Path, tree: Path) -> None:
    """Kill Redis when its tenants are idle, and start it again while they call."""
    with process_group() as processes:
        gateways, redis, url = _start(folder, tree, processes, PERSISTENT)
        keys = await create_tenants(gateways[0], {"requests_per_minute": 10})
        callers = [await caller(gateway) for gateway in gateways]
        statuses: Counter[int] = Counter()
        # One call each, so that both gateways know the limits.
        for number, key in enumerate(keys):
            statuses[await callers[number % 2](key)] += 1
        redis.kill()
        redis.process.wait()

        async def call_now_and_then(key: str, number: int) -> None:
            await asyncio.sleep(2 + number * OUTAGE_EVERY_S / TENANTS)
            for turn in range(OUTAGE_CALLS_EACH):
                statuses[await callers[(number + turn) % 2](key)] += 1
                await asyncio.sleep(OUTAGE_EVERY_S)

        async def restart() -> None:
            await asyncio.sleep(OUTAGE_S)
            again, _ = servers.start_redis(folder, port_of(url), PERSISTENT)
            processes.append(again)

        calls = [call_now_and_then(key, number) for number, key in enumerate(keys)]
        await asyncio.gather(restart(), *calls)
        report(statuses, gateways)


async def password(folder: Path, tree: Path) -> None:
    """Start a gateway whose password is wrong, and print what its probe answers."""
    with process_group() as processes:
        stub = servers.start_stub(folder)
        processes.append(stub.process)
        redis, url = servers.start_redis(folder, persistence=("--save", "", "--requirepass", "right"))
        processes.append(redis)
        port = free_port()
        path = folder / "wrong.yaml"
        wrong = url.replace("redis://", "redis://:wrong@")
        path.write_text(f"listen: {HOST}:{port}\n{config(stub, wrong, folder / 'state')}")
        command = [sys.executable, "-m", "gateway", "serve", "-c", str(path)]
        process = PinnedProcess(
            command, "0", folder / "wrong.log", {"PYTHONPATH": str(tree)}, working_directory=tree
        )
        processes.append(process)
        process.wait_until(lambda: listens(port))
        gateway = RunningServer("wrong", servers.with_key(port, OPERATOR), process)
        await asyncio.sleep(5)
        for probe in ("/readyz", "/readyz?verbose"):
            print(probe, *(await admin(gateway, "GET", probe)))
        report(Counter(), [gateway])


def _start(
    folder: Path,
    tree: Path,
    processes: list[PinnedProcess],
    persistence: Sequence[str] = servers.NOT_PERSISTENT,
) -> tuple[list[RunningServer], PinnedProcess, str]:
    stub = servers.start_stub(folder)
    processes.append(stub.process)
    redis, url = servers.start_redis(folder, persistence=persistence)
    processes.append(redis)
    gateways = []
    for number in range(2):
        text = config(stub, url, folder / f"state-{number}")
        gateways.append(servers.start_gateway(folder, text, name=f"gateway-{number}", tree=tree))
        processes.append(gateways[-1].process)
    return gateways, redis, url


def port_of(url: str) -> int:
    """Return the port of a server's URL."""
    return int(url.rpartition(":")[2].partition("/")[0])


async def _command(url: str, word: str) -> None:
    reader, writer = await asyncio.open_connection(HOST, port_of(url))
    writer.write(f"*1\r\n${len(word)}\r\n{word}\r\n".encode())
    await reader.readline()
    writer.close()


async def _store_status(gateway: RunningServer) -> object:
    _, content = await admin(gateway, "GET", "/admin/status")
    return json.loads(content)["store"]


RUNS = {"flush": flush, "outage": outage, "password": password}


def main() -> None:
    """Run one trouble and print the calls by status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", choices=sorted(RUNS))
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose gateway runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(RUNS[arguments.run](Path(folder), arguments.tree.resolve()))


if __name__ == "__main__":
    main()
