"""Redis loses keys and tenants, refuses, or is silent: what callers and operators see."""

import asyncio
import json
import os
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.api.server.authentication import Authenticator
from gateway.config.schema import TenantConfig
from gateway.errors import AuthThrottled, QuotaUnavailable, Unauthenticated
from gateway.events import Event, StoreLost
from gateway.store.redis_client import RedisClient
from gateway.telemetry.access_log import EventLine
from gateway.tenants.file_store import FILE_NAME as TENANTS_FILE
from gateway.tenants.follower import KeyFollower
from gateway.tenants.guess_throttle import GUESSES_MAX
from gateway.tenants.keyring import FirstKey, Keyring, StoredKey, key_digest
from gateway.tenants.snapshot import CONFIRM_EVERY_S, FILE_NAME, SnapshotFile
from gateway.tenants.store import KEYS, TENANTS, VERSION, TenantStore
from tests.actors import TESTER
from tests.conftest import KEY, Boots, Running, request_with
from tests.fakes.tei import FakeTei
from tests.processes.tls_files import Authority
from tests.quotas.redis_server import RedisServer, opened
from tests.quotas.test_first_key import start
from tests.waiting import PATIENCE_S

NUMBERS = range(20)
CONFIG = """
listen: 0.0.0.0:8080
quotas: {{store: "{store}", timeout_ms: 1000}}
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: one}}}}
"""
OPS = f"tenants:\n  ops: {{keys: [{{digest: '{key_digest(KEY)}', scopes: [embed, metrics, admin]}}]}}\n"


class Worker:
    """Keyring of a gateway that follows the store. now_s: its wall clock, which a test moves."""

    def __init__(
        self, url: str, folder: Path | None = None, grace_s: float = 60.0, first_key: FirstKey | None = None
    ) -> None:
        self.now_s = 0.0
        self.events: list[Event] = []
        self.keyring = Keyring({}, first_key, self._clock, has_store=True)
        self.authenticator = Authenticator(self.keyring)
        snapshot = None if folder is None else SnapshotFile(folder / FILE_NAME, url)
        self.follower = KeyFollower(
            self.keyring,
            TenantStore(RedisClient(url, 1)),
            grace_s,
            self.authenticator.forgive_known_keys,
            self._clock,
            observe=self.events.append,
            snapshot=snapshot,
        )

    def _clock(self) -> float:
        return time.time() + self.now_s

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Worker"]:
        task = asyncio.create_task(self.follower.run())
        try:
            await self.follower.refresh()
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def status(self, key: str) -> str:
        """Return the outcome of a call with this key."""
        try:
            tenant = self.authenticator.authenticate(request_with(b"authorization", f"Bearer {key}"))
        except (Unauthenticated, AuthThrottled, QuotaUnavailable) as error:
            return type(error).__name__
        return tenant.name

    @property
    def losses(self) -> list[StoreLost]:
        return [event for event in self.events if isinstance(event, StoreLost)]


async def fill(server: RedisServer) -> None:
    async with opened(server) as store:
        for number in NUMBERS:
            await store.put_tenant(f"team{number}", TenantConfig(weight=2), by=TESTER)
            await store.create_key(
                StoredKey(f"k{number}", key_digest(f"sk-{number}"), f"team{number}"), by=TESTER
            )


def served(worker: Worker) -> list[str]:
    return [worker.status(f"sk-{number}") for number in NUMBERS]


ALL = [f"team{number}" for number in NUMBERS]


async def test_two_gateways_serve_all_tenants_of_an_emptied_store(own_redis: RedisServer) -> None:
    await fill(own_redis)
    async with Worker(own_redis.url).running() as one, Worker(own_redis.url).running() as two:
        for worker in (one, two):
            assert worker.follower.state.keys == len(NUMBERS)
        own_redis.command("FLUSHALL")
        for worker in (one, two):
            for _ in range(3):
                await worker.follower.refresh()
                assert served(worker) == ALL
            [loss] = worker.losses
            assert (loss.keys, loss.tenants) == (len(NUMBERS), len(NUMBERS))
            state = worker.follower.state
            assert (state.keys, state.tenants, state.kept_keys) == (0, 0, len(NUMBERS))
            assert state.loss is not None


async def test_what_the_store_lost_is_refused_after_the_grace_and_is_no_guess(own_redis: RedisServer) -> None:
    await fill(own_redis)
    async with Worker(own_redis.url, grace_s=60).running() as worker:
        own_redis.command("FLUSHALL")
        await worker.follower.refresh()
        worker.now_s = 59
        await worker.follower.refresh()
        assert served(worker) == ALL
        worker.now_s = 61
        await worker.follower.refresh()
        refused = [worker.status("sk-1") for _ in range(GUESSES_MAX + 5)]
        assert refused == ["Unauthenticated"] * (GUESSES_MAX + 5)
        guessed = [worker.status("wrong") for _ in range(GUESSES_MAX + 1)]
        assert guessed[-1] == "AuthThrottled"
        assert worker.follower.state.loss is None


async def test_revoked_keys_are_never_kept(own_redis: RedisServer) -> None:
    await fill(own_redis)
    async with Worker(own_redis.url).running() as worker, opened(own_redis) as store:
        assert await store.revoke("k0", by=TESTER)
        await worker.follower.refresh()
        own_redis.command("FLUSHALL")
        await worker.follower.refresh()
        # The store does not have it any more, and the operator still can revoke it.
        assert worker.follower.keeps_key("k1")
        assert not await store.revoke("k1", by=TESTER)
        assert not await store.remove_tenant("team2", by=TESTER)
        await worker.follower.refresh()
        refused = ["Unauthenticated"] * 3
        assert served(worker) == refused + ALL[3:]
        # The tenant is created again, and its old key stays refused.
        await store.put_tenant("team2", TenantConfig(), by=TESTER)
        await worker.follower.refresh()
        assert served(worker) == refused + ALL[3:]


async def test_new_state_wins_at_once(own_redis: RedisServer) -> None:
    await fill(own_redis)
    async with Worker(own_redis.url).running() as worker, opened(own_redis) as store:
        own_redis.command("FLUSHALL")
        await worker.follower.refresh()
        await store.put_tenant("team0", TenantConfig(weight=7), by=TESTER)
        await store.create_key(StoredKey("k1", key_digest("sk-new"), "team1"), by=TESTER)
        await worker.follower.refresh()
        assert worker.keyring.identify("sk-0").weight == 7
        assert worker.keyring.identify("sk-2").weight == 2
        assert worker.status("sk-new") == "team1"
        assert worker.status("sk-1") == "Unauthenticated"
        assert len(worker.losses) == 1


async def test_removal_of_the_last_tenant_and_key_is_no_loss(own_redis: RedisServer) -> None:
    async with opened(own_redis) as store:
        await store.put_tenant("acme", TenantConfig(), by=TESTER)
        await store.create_key(StoredKey("k", key_digest("sk-0"), "acme"), by=TESTER)
        async with Worker(own_redis.url).running() as worker:
            assert worker.status("sk-0") == "acme"
            await store.revoke("k", by=TESTER)
            await store.remove_tenant("acme", by=TESTER)
            await worker.follower.refresh()
            assert worker.status("sk-0") == "Unauthenticated"
            assert worker.losses == []


async def test_store_that_was_written_again_before_it_was_read_is_a_loss(own_redis: RedisServer) -> None:
    await fill(own_redis)
    worker = Worker(own_redis.url)
    async with worker.running(), opened(own_redis) as store:
        # As many changes as before, all between two looks.
        own_redis.command("FLUSHALL")
        for _ in range(3 * len(NUMBERS)):
            await store.put_tenant("team0", TenantConfig(weight=5), by=TESTER)
        await worker.follower.refresh()
        assert served(worker) == ALL
        assert worker.keyring.identify("sk-0").weight == 5


@pytest.mark.parametrize("field", [KEYS, TENANTS])
async def test_half_of_the_data_lost_is_a_loss(own_redis: RedisServer, field: str) -> None:
    await fill(own_redis)
    async with Worker(own_redis.url).running() as worker:
        own_redis.command("DEL", field)
        await worker.follower.refresh()
        assert served(worker) == ALL
        assert len(worker.losses) == 1


async def test_older_copy_loses_only_what_is_newer(own_redis: RedisServer) -> None:
    await fill(own_redis)
    version = own_redis.command("GET", VERSION).splitlines()[1]
    async with Worker(own_redis.url).running() as worker, opened(own_redis) as store:
        await store.put_tenant("late", TenantConfig(), by=TESTER)
        await store.create_key(StoredKey("late", key_digest("sk-late"), "late"), by=TESTER)
        await worker.follower.refresh()
        # As the copy of an hour ago has it.
        own_redis.command("HDEL", TENANTS, "late")
        own_redis.command("HDEL", KEYS, "late")
        own_redis.command("SET", VERSION, version)
        await worker.follower.refresh()
        assert worker.status("sk-late") == "late"
        [loss] = worker.losses
        assert (loss.keys, loss.tenants) == (1, 1)


async def test_restored_data_ends_the_loss(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await fill(own_redis)
    copies = {key: own_redis_dump(own_redis, key) for key in (KEYS, TENANTS)}
    version = own_redis.command("GET", VERSION).splitlines()[1]
    async with Worker(own_redis.url).running() as worker:
        own_redis.command("FLUSHALL")
        await worker.follower.refresh()
        for key, fields in copies.items():
            own_redis.command("HSET", key, *fields)
        own_redis.command("SET", VERSION, version)
        await worker.follower.refresh()
        assert served(worker) == ALL
        assert worker.follower.state.loss is None
        assert len(worker.losses) == 1
    assert any("were restored" in line for line in caplog.messages)


def own_redis_dump(server: RedisServer, key: str) -> list[str]:
    return [line for line in server.command("HGETALL", key).splitlines()[1:] if not line.startswith("$")]


async def test_restarted_gateway_knows_by_its_snapshot_what_was_lost(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    await fill(own_redis)
    async with Worker(own_redis.url, tmp_path).running() as worker:
        assert served(worker) == ALL
    own_redis.command("FLUSHALL")
    async with Worker(own_redis.url, tmp_path).running() as restarted:
        assert served(restarted) == ALL
        [loss] = restarted.losses
        assert loss.keys == len(NUMBERS)
        since_s = restarted.follower.state.loss
    # The grace is counted from the loss, and not from the next start.
    async with Worker(own_redis.url, tmp_path).running() as again:
        assert served(again) == ALL
        [repeated] = again.losses
        assert msgspec.structs.replace(repeated, is_repeated=False) == loss
        assert str(EventLine(repeated)).startswith(
            "Redis had lost, before this start, and still lacks 20 tenants and 20 keys (their version"
        )
        assert again.follower.state.loss == since_s
        again.now_s = 61
        await again.follower.refresh()
        assert set(served(again)) == {"Unauthenticated"}


@pytest.mark.parametrize("is_noticed", [True, False], ids=["noticed", "while stopped"])
async def test_first_key_stays_ended_after_a_loss(
    own_redis: RedisServer, tmp_path: Path, is_noticed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert await asyncio.to_thread(start, tmp_path, own_redis.url) is not None
    text = (tmp_path / "first-key").read_text().strip()
    await fill(own_redis)
    async with Worker(own_redis.url, tmp_path).running() as worker:
        if is_noticed:
            own_redis.command("FLUSHALL")
            await worker.follower.refresh()
            # The grace ends, and nothing is kept any more.
            worker.now_s = 61
            await worker.follower.refresh()
            assert worker.follower.state.loss is None
    if not is_noticed:
        own_redis.command("FLUSHALL")

    assert await asyncio.to_thread(start, tmp_path, own_redis.url) is None
    key = "sk-own"
    assert await asyncio.to_thread(start, tmp_path, own_redis.url, {"GATEWAY_API_KEY": key}) is None
    assert sum("is ignored: Redis has lost its tenants" in line for line in caplog.messages) == 2
    # A gateway that starts in an outage decides it later, by the same rule.
    pending = FirstKey(key_digest(text), is_pending=True, is_kept=True)
    async with Worker(own_redis.url, tmp_path, first_key=pending).running() as restarted:
        assert restarted.status(text) == "Unauthenticated"


@pytest.mark.parametrize("is_seen", [True, False], ids=["while running", "while stopped"])
async def test_first_key_returns_when_operators_remove_the_last_tenant(
    own_redis: RedisServer, tmp_path: Path, is_seen: bool
) -> None:
    async with opened(own_redis) as store:
        await store.put_tenant("acme", TenantConfig(), by=TESTER)
        async with Worker(own_redis.url, tmp_path).running() as worker:
            if is_seen:
                await store.remove_tenant("acme", by=TESTER)
                await worker.follower.refresh()
        if not is_seen:
            await store.remove_tenant("acme", by=TESTER)

    assert await asyncio.to_thread(start, tmp_path, own_redis.url) is not None
    pending = FirstKey(key_digest("sk-own"), is_pending=True)
    async with Worker(own_redis.url, tmp_path, first_key=pending).running() as restarted:
        assert restarted.status("sk-own") == "default"


def run_gateway(folder: Path, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the host of a gateway with this state_dir."""
    path = folder / "router.yaml"
    path.write_text(CONFIG.format(store=url) + f"state_dir: {folder}\n")
    command = [sys.executable, "-m", "gateway", *words, "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)


@pytest.mark.parametrize("is_noticed", [True, False], ids=["noticed", "while stopped"])
async def test_commands_name_what_was_lost(own_redis: RedisServer, tmp_path: Path, is_noticed: bool) -> None:
    async with opened(own_redis) as store:
        await store.put_tenant("acme", TenantConfig(weight=2, limits={"tokens_per_minute": 5000}), by=TESTER)
        for name in ("k1", "k2"):
            await store.create_key(StoredKey(name, key_digest(f"sk-{name}"), "acme"), by=TESTER)
    async with Worker(own_redis.url, tmp_path).running() as worker:
        if is_noticed:
            own_redis.command("FLUSHALL")
            await worker.follower.refresh()
    if not is_noticed:
        own_redis.command("FLUSHALL")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return run_gateway(tmp_path, own_redis.url, *words)

    for words in (("tenants", "list"), ("keys", "list"), ("keys", "list", "--json")):
        listed = await asyncio.to_thread(run, *words)
        [line] = listed.stderr.splitlines()
        until = "until 20" if is_noticed else "for quotas.key_grace_s (3600 s) from the loss"
        assert line.startswith(
            f"Redis has lost 1 tenant and 2 keys: gateways that knew them accept them {until}"
        )
    assert listed.stdout == "[]\n"
    done = await asyncio.to_thread(run, "tenants", "set", "acme", "--limit", "requests_per_minute=600")
    # The first key has ended before: no note on that.
    assert done.stderr.splitlines() == [
        "Redis had lost acme; these settings replace those that gateways kept:",
        "  limits.tokens_per_minute: 5000 -> not set",
        "  weight: 2 -> 1",
        "  limits.requests_per_minute: not set -> 600",
    ]
    again = await asyncio.to_thread(run, "tenants", "list")
    assert "Redis has lost 0 tenants and 2 keys" in again.stderr


async def test_commands_hint_at_a_loss_that_no_snapshot_shows(own_redis: RedisServer, tmp_path: Path) -> None:
    blank = await asyncio.to_thread(run_gateway, tmp_path, own_redis.url, "tenants", "list")
    async with opened(own_redis) as store:
        await store.put_tenant("acme", TenantConfig(), by=TESTER)
        await store.remove_tenant("acme", by=TESTER)
    removed = await asyncio.to_thread(run_gateway, tmp_path, own_redis.url, "tenants", "list")

    assert blank.stderr.startswith("Redis has no record of any tenant or key: it is new, or it was emptied")
    assert removed.stderr == ""


async def test_snapshot_serves_its_callers_while_redis_is_away(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    await fill(own_redis)
    async with Worker(own_redis.url, tmp_path).running():
        pass
    path = tmp_path / FILE_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"sk-1" not in path.read_bytes()
    own_redis.kill()
    async with Worker(own_redis.url, tmp_path).running() as restarted:
        assert served(restarted) == ALL
        # It may be in Redis since.
        assert restarted.status("sk-other") == "QuotaUnavailable"
        assert restarted.follower.unserved == ""
    async with Worker("redis://127.0.0.1:1/0", tmp_path).running() as other:
        assert set(served(other)) == {"QuotaUnavailable"}
        assert other.follower.unserved != ""
    old_s = time.time() - 61 - CONFIRM_EVERY_S
    os.utime(path, (old_s, old_s))
    async with Worker(own_redis.url, tmp_path).running() as late:
        assert set(served(late)) == {"QuotaUnavailable"}


async def test_unknown_keys_are_not_wrong_while_redis_is_away(own_redis: RedisServer) -> None:
    await fill(own_redis)
    async with Worker(own_redis.url).running() as worker:
        async with opened(own_redis) as store:
            await store.revoke("k0", by=TESTER)
            await worker.follower.refresh()
            assert worker.status("sk-new") == "Unauthenticated"
            own_redis.freeze()
            # It was written before Redis stopped answering, and this gateway has not read it.
            await until_away(worker)
        # A client repeats it, which is no further guess.
        tried = [worker.status("sk-new") for _ in range(GUESSES_MAX + 5)]
        assert tried == ["QuotaUnavailable"] * (GUESSES_MAX + 5)
        assert worker.status("sk-0") == "Unauthenticated"
        guessed = [worker.status(f"wrong {number}") for number in range(GUESSES_MAX + 5)]
        assert guessed[0] == "QuotaUnavailable"
        assert guessed[-5:] == ["AuthThrottled"] * 5
        assert served(worker)[1:] == ALL[1:]

        own_redis.thaw()
        async with opened(own_redis) as store:
            await store.create_key(StoredKey("new", key_digest("sk-new"), "team1"), by=TESTER)
        await worker.follower.refresh()
        assert worker.status("sk-new") == "team1"
        assert worker.status("another") == "Unauthenticated"


async def until_away(worker: Worker) -> None:
    """Wait until the follower has noticed that the store does not answer."""
    async with asyncio.timeout(PATIENCE_S):
        while worker.status("sk-new") != "QuotaUnavailable":  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_broken_snapshot_is_reported_and_replaced(
    own_redis: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(own_redis)
    (tmp_path / FILE_NAME).write_text("{")
    async with Worker(own_redis.url, tmp_path).running() as worker:
        assert served(worker) == ALL
    assert any("is not used" in line for line in caplog.messages)
    assert len(json.loads((tmp_path / FILE_NAME).read_bytes())["keys"]) == len(NUMBERS)


async def test_version_of_an_earlier_release_goes_on(own_redis: RedisServer) -> None:
    await fill(own_redis)
    own_redis.command("SET", VERSION, "0123456789abcdef")
    async with Worker(own_redis.url).running() as worker, opened(own_redis) as store:
        await store.revoke("k0", by=TESTER)
        await worker.follower.refresh()
        assert worker.status("sk-0") == "Unauthenticated"
        assert own_redis.command("GET", VERSION).splitlines()[1].startswith("0123456789abcdef.1.")
        assert worker.losses == []


async def written(path: Path) -> None:
    """Wait for a file that a thread writes."""
    async with asyncio.timeout(PATIENCE_S):
        while not path.exists():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.02)


async def store_status(gateway: Running) -> dict[str, Any]:
    status: dict[str, Any] = (await gateway.client.get("/admin/status")).json()["store"]
    return status


async def test_status_and_metrics_show_a_loss(boot: Boots, own_redis: RedisServer) -> None:
    await fill(own_redis)
    async with boot({"tei-0": FakeTei()}, CONFIG.format(store=own_redis.url) + OPS) as gateway:
        async with asyncio.timeout(PATIENCE_S):
            # It is ready before it has read the store: it has a tenant in its file.
            while (before := await store_status(gateway))["keys"] != len(NUMBERS):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        own_redis.command("FLUSHALL")
        async with asyncio.timeout(PATIENCE_S):
            while not any(isinstance(event, StoreLost) for event in gateway.events):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        after = await store_status(gateway)
        metrics = (await gateway.client.get("/metrics")).text
        call = await gateway.client.post(
            "/v1/embeddings", json={"input": "a"}, headers={"authorization": "Bearer sk-3"}
        )
        revoked = await gateway.client.delete("/admin/keys/k3")
        after_revocation = await gateway.client.post(
            "/v1/embeddings", json={"input": "a"}, headers={"authorization": "Bearer sk-3"}
        )

    assert (before["keys"], before["tenants"], before["loss"]) == (20, 20, None)
    assert (after["keys"], after["loss"]["keys"], after["loss"]["tenants"]) == (0, 20, 20)
    assert after["loss"]["until_s"] - after["loss"]["since_s"] == 3600
    for line in (
        "gateway_store_keys 0.0",
        "gateway_store_tenants 0.0",
        "gateway_store_kept_keys 20.0",
        "gateway_store_kept_tenants 20.0",
        "gateway_store_losses_total 1.0",
    ):
        assert line in metrics.splitlines()
    assert [200, 200, 401] == [call.status_code, revoked.status_code, after_revocation.status_code]


async def test_status_has_the_reason_of_an_outage(boot: Boots, own_redis: RedisServer) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG.format(store=own_redis.url) + OPS) as gateway:
        assert (await store_status(gateway))["reason"] == ""
        own_redis.command("ACL", "SETUSER", "default", "nocommands", "+acl")
        async with asyncio.timeout(PATIENCE_S):
            while not (status := await store_status(gateway))["away"]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert "its user lacks rights" in status["reason"]


WRONG_PASSWORD = "wrong password"
NO_RIGHTS = "no rights"
NO_TLS = "no TLS"


async def tls_listener(folder: Path) -> asyncio.Server:
    """Return a listener whose certificate is of an authority that no gateway knows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*Authority(folder / "tls").sign("redis"))
    return await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)


@pytest.mark.parametrize("more", ["", OPS], ids=["tenants in Redis", "tenants in the file"])
@pytest.mark.parametrize("trouble", [WRONG_PASSWORD, NO_RIGHTS, NO_TLS])
async def test_gateway_that_redis_refuses_is_not_ready(
    boot: Boots,
    own_redis: RedisServer,
    tmp_path: Path,
    trouble: str,
    more: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await fill(own_redis)
    tenants_file = tmp_path / TENANTS_FILE
    async with boot(
        {"tei-0": FakeTei()}, CONFIG.format(store=own_redis.url) + more, tenants_file=tenants_file
    ) as gateway:
        await written(tenants_file.with_name(FILE_NAME))
        assert (await gateway.client.get("/readyz")).status_code == 200
    url = own_redis.url
    if trouble == WRONG_PASSWORD:
        own_redis.command("CONFIG", "SET", "requirepass", "right")
        url = url.replace("redis://", "redis://:wrong@")
    elif trouble == NO_RIGHTS:
        own_redis.command("ACL", "SETUSER", "guest", "on", ">pass", "~other", "+get")
        url = url.replace("redis://", "redis://guest:pass@")
    terminator = await tls_listener(tmp_path)
    if trouble == NO_TLS:
        url = f"rediss://127.0.0.1:{terminator.sockets[0].getsockname()[1]}/0"
    async with (
        terminator,
        boot(
            {"tei-0": FakeTei()}, CONFIG.format(store=url) + more, tenants_file=tenants_file, wait=False
        ) as gateway,
    ):
        async with asyncio.timeout(PATIENCE_S):
            while not any("Redis refuses" in line for line in caplog.messages):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        plain = await gateway.client.get("/readyz")
        verbose = await gateway.client.get("/readyz?verbose")

    assert (plain.status_code, verbose.status_code) == (503, 503)
    assert "retry-after" in plain.headers
    assert "retry-after" in verbose.headers
    checks = {check["name"]: check for check in verbose.json()["checks"]}
    assert not checks["store"]["ok"]
    assert "Redis refuses this gateway" in checks["store"]["reason"]
    assert checks["running"]["ok"]
    assert "right" not in verbose.text.replace("rights", "")


@pytest.mark.parametrize(
    ("more", "has_snapshot", "policy", "status"),
    [
        ("", False, "local", 503),
        ("", True, "local", 200),
        (OPS, False, "local", 200),
        (OPS, True, "allow", 200),
        (OPS, True, "refuse", 503),
    ],
)
async def test_gateway_without_an_answer_is_ready_if_it_knows_its_tenants(
    boot: Boots,
    own_redis: RedisServer,
    tmp_path: Path,
    more: str,
    has_snapshot: bool,
    policy: str,
    status: int,
) -> None:
    config = CONFIG.format(store=own_redis.url).replace(
        "timeout_ms", f"when_unavailable: {policy}, timeout_ms"
    )
    config += more
    tenants_file = tmp_path / TENANTS_FILE
    if has_snapshot:
        await fill(own_redis)
        async with boot({"tei-0": FakeTei()}, config, tenants_file=tenants_file):
            await written(tenants_file.with_name(FILE_NAME))
    own_redis.kill()
    async with boot({"tei-0": FakeTei()}, config, tenants_file=tenants_file, wait=False) as gateway:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                reply = await gateway.client.get("/readyz?verbose")
                checks = {check["name"]: check for check in reply.json()["checks"]}
                is_decided = checks["store"]["reason"] != NOT_YET
                if checks["upstreams"]["ok"] and is_decided:
                    break
                await asyncio.sleep(0.02)
        own_redis.restart()
        async with asyncio.timeout(PATIENCE_S):
            while (await gateway.client.get("/readyz")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    assert reply.status_code == status
    assert reply.json()["ready"] is (status == 200)


NOT_YET = "the keys and tenants in Redis are not known (it has not answered yet)"


async def test_gateway_stays_ready_when_redis_dies_later(boot: Boots, own_redis: RedisServer) -> None:
    await fill(own_redis)
    async with boot({"tei-0": FakeTei()}, CONFIG.format(store=own_redis.url)) as gateway:
        own_redis.kill()
        await asyncio.sleep(1)
        assert (await gateway.client.get("/readyz")).status_code == 200


def test_snapshot_keeps_limits_and_expiry(tmp_path: Path) -> None:
    file = SnapshotFile(tmp_path / FILE_NAME, "redis://:one@host:1/0")
    key = StoredKey("k", key_digest("sk"), "acme", expires_s=5.0, limits={"tokens_per_day": 3})
    stored = msgspec.json.encode(
        {
            "store": file.store,
            "version": "a.1.b",
            "stored_keys": 1,
            "stored_tenants": 0,
            "keys": [msgspec.to_builtins(key)],
        }
    )
    (tmp_path / FILE_NAME).write_bytes(stored)
    found = SnapshotFile(tmp_path / FILE_NAME, "redis://:two@host:1/0").read()
    assert found is not None
    assert found[0].keys == (key,)
    assert SnapshotFile(tmp_path / FILE_NAME, "redis://host:2/0").read() is None
