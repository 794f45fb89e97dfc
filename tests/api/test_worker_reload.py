"""Another config is served from one moment to the next, and no call that has begun is lost over it."""

import asyncio

import pytest

from backends.contract import Backend, BackendKind, ReplicaSpec
from backends.http import UpstreamClient
from gateway.config.diff import ConfigChange, ReloadOutcome
from gateway.config.problems import Problem
from gateway.config.schema import UpstreamSettings
from gateway.events import Event, ReplicaChanged, StoreChanged
from gateway.routing.discovery import resolve
from gateway.tenants.keyring import key_digest
from gateway.upstreams.factory import Dependencies
from gateway.upstreams.registry import ScopedObserver, UpstreamRegistry
from tests.conftest import CONFIG, KEY, Boots, Running
from tests.fakes.hooks import Gate, tei_with_hook, until
from tests.fakes.replicas import HeldReplica
from tests.fakes.tei import FakeTei

ONE = """
upstreams: {one: {backend: tei, replicas: ["http://old"]}}
models: {bge: {upstream: one}}
"""
TENANTS = f'tenants: {{acme: {{keys: ["{key_digest(KEY)}"]}}, globex: {{keys: ["{key_digest("other")}"]}}}}\n'


async def embed(gateway: Running, text: str = "text", model: str = "bge", key: str = KEY) -> int:
    body = {"model": model, "input": text}
    reply = await gateway.post("/v1/embeddings", body, authorization=f"Bearer {key}")
    return reply.status_code


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[UpstreamClient]:
    """Connections to replicas that were closed."""
    doors: list[UpstreamClient] = []
    aclose = UpstreamClient.aclose

    async def noted(door: UpstreamClient) -> None:
        doors.append(door)
        await aclose(door)

    monkeypatch.setattr(UpstreamClient, "aclose", noted)
    return doors


@pytest.mark.parametrize(
    "wanted",
    [
        ONE.replace("http://old", "http://new"),
        ONE.replace('["http://old"]', '["http://new"], queue_tokens: 9'),
        ONE.replace("one", "two").replace("http://old", "http://new"),
    ],
    ids=["replicas exchanged", "upstream changed", "upstream renamed"],
)
async def test_calls_finish_on_the_replicas_they_began_with(
    boot: Boots, wanted: str, closed: list[UpstreamClient]
) -> None:
    gate, new = Gate(), FakeTei()
    old = tei_with_hook(gate)
    async with boot({"old": old, "new": new}, ONE) as gateway:
        held = asyncio.create_task(embed(gateway, "held"))
        await until(lambda: gate.waiting == 1)
        drained = gateway.follow(wanted)
        assert [200, 200] == [await embed(gateway, "a"), await embed(gateway, "b")]
        assert (1, 2, []) == (len(old.requests), len(new.requests), closed)
        gate.opened.set()
        assert 200 == await held
        await drained
        await until(lambda: len(closed) == 1)


async def test_removed_model_rejects_new_calls_and_finishes_running_ones(boot: Boots) -> None:
    gate = Gate()
    async with boot({"old": tei_with_hook(gate), "new": FakeTei()}, ONE) as gateway:
        held = asyncio.create_task(embed(gateway, "held"))
        await until(lambda: gate.waiting == 1)
        gateway.follow(ONE.replace("bge", "other").replace("one", "two").replace("http://old", "http://new"))
        assert [404, 200] == [await embed(gateway), await embed(gateway, model="other")]
        gate.opened.set()
        assert 200 == await held


async def test_retired_lane_serves_its_queued_calls(boot: Boots) -> None:
    gate = Gate()
    config = ONE.replace('["http://old"]', '["http://old"], in_flight_batches: 1')
    async with boot({"old": tei_with_hook(gate), "new": FakeTei()}, config) as gateway:
        held = [asyncio.create_task(embed(gateway, f"text {i}")) for i in range(9)]
        lane = gateway.application.gateway.upstreams["one"].lane
        await until(lambda: gate.waiting == 1 and lane.queued_tokens > 0)
        drained = gateway.follow(ONE.replace("http://old", "http://new").replace("one", "two"))
        gate.opened.set()
        assert [200] * 9 == await asyncio.gather(*held)
        await drained


async def test_unchanged_upstreams_and_replicas_stay(boot: Boots) -> None:
    servers = {"tei-0": FakeTei(), "tei-1": FakeTei(), "rerank-0": FakeTei()}
    async with boot(servers, CONFIG) as gateway:
        before = dict(gateway.application.gateway.upstreams)
        first = before["embedder"].pool.replicas[0]
        joined = len(gateway.events)
        await gateway.follow(CONFIG.replace(', "http://tei-1"', "").replace("strict:", "stricter:"))
        after = gateway.application.gateway.upstreams
        await until(lambda: len(before["embedder"].pool.replicas) == 1)

        assert before == after
        assert [first] == after["embedder"].pool.replicas
        assert [("http://tei-1", "gone")] == [
            (one.replica, one.state) for one in gateway.events[joined:] if isinstance(one, ReplicaChanged)
        ]
        assert 200 == await embed(gateway)


async def test_new_keys_and_tenants_apply_to_the_next_call(boot: Boots) -> None:
    gate = Gate()
    async with boot({"old": tei_with_hook(gate)}, ONE + TENANTS) as gateway:
        held = asyncio.create_task(embed(gateway, "held", key="other"))
        await until(lambda: gate.waiting == 1)
        gateway.follow(ONE + TENANTS.replace(key_digest("other"), key_digest("third")))
        gate.opened.set()

        assert 401 == await embed(gateway, key="other")
        assert [200, 200] == [await embed(gateway), await embed(gateway, key="third")]
        assert 200 == await held


async def test_new_limits_apply_to_the_next_call(boot: Boots) -> None:
    limited = TENANTS.replace("acme: {", "acme: {limits: {requests_per_day: 2}, ")
    async with boot({"old": FakeTei()}, ONE + limited) as gateway:
        assert [200, 200, 429] == [await embed(gateway) for _ in range(3)]
        gateway.follow(ONE + limited.replace("per_day: 2", "per_day: 3"))
        # A limit of another amount is another limit, which starts full.
        assert [200, 200, 200, 429] == [await embed(gateway) for _ in range(4)]
        gateway.follow("limits: {inputs: 1}\n" + ONE + TENANTS)
        reply = await gateway.post("/v1/embeddings", {"input": ["a", "b"]})
        assert 400 == reply.status_code


async def test_new_operator_keys_end_keyless_access_at_once(boot: Boots) -> None:
    async with boot({"old": FakeTei()}, ONE + TENANTS) as gateway:
        path, local = "/admin/usage?tenant=acme", {"host": "127.0.0.1"}
        assert 200 == (await gateway.client.get(path, headers=local)).status_code
        gateway.follow(f'admin: {{keys: ["{key_digest("operator")}"]}}\n' + ONE + TENANTS)
        assert 403 == (await gateway.client.get(path, headers=local)).status_code
        as_operator = {"authorization": "Bearer operator", **local}
        assert 200 == (await gateway.client.get(path, headers=as_operator)).status_code


async def test_metrics_show_only_the_current_upstreams(boot: Boots) -> None:
    async with boot({"old": FakeTei(), "new": FakeTei()}, ONE) as gateway:
        assert 'gateway_lane_queued_tokens{upstream="one"}' in await _metrics(gateway)
        await gateway.follow(ONE.replace("one", "two").replace("http://old", "http://new"))
        assert 200 == await embed(gateway)
        told = await _metrics(gateway)

    gauges = [line for line in told.splitlines() if 'upstream="one"' in line and "_total" not in line]
    assert 'gateway_lane_queued_tokens{upstream="two"}' in told
    assert [] == [line for line in gauges if line.startswith(("gateway_lane_", "gateway_replica_"))]


async def test_status_shows_only_the_current_upstreams(boot: Boots) -> None:
    gate = Gate()
    async with boot({"old": tei_with_hook(gate), "new": FakeTei()}, ONE) as gateway:
        held = asyncio.create_task(embed(gateway, "held"))
        await until(lambda: gate.waiting == 1)
        before = await _status(gateway)
        gateway.follow(ONE.replace("one", "two").replace("bge", "other").replace("http://old", "http://new"))
        assert 200 == await embed(gateway, model="other")
        after = await _status(gateway)
        joined = len(gateway.events)
        gate.opened.set()
        assert 200 == await held

    assert [["one"], ["http://old"], ["bge"]] == before
    assert [["two"], ["http://new"], ["other"]] == after
    told = [one for one in gateway.events[joined:] if isinstance(one, ReplicaChanged)]
    assert [] == [one for one in told if one.upstream == "one"]


async def _status(gateway: Running) -> list[list[str]]:
    """Lanes, replicas in use and models."""
    told = (await gateway.client.get("/admin/status", headers={"host": "127.0.0.1"})).json()
    return [
        [one["upstream"] for one in told["lanes"]],
        [one["name"] for one in told["replicas"] if one["state"] == "up" and one["since_s"]],
        [one["name"] for one in told["models"]],
    ]


async def test_retired_upstream_reports_no_replica_events() -> None:
    told: list[Event] = []
    voice = ScopedObserver(told.append)
    events: list[Event] = [
        ReplicaChanged("one", "http://a", "down", "away"),
        StoreChanged(away=True, reason=""),
    ]
    for one in events:
        voice.observe(one)
    voice.is_retired = True
    for one in events:
        voice.observe(one)

    assert [*events, events[1]] == told


async def _metrics(gateway: Running) -> str:
    return (await gateway.client.get("/metrics", headers={"host": "127.0.0.1"})).text


async def test_replica_that_cannot_be_opened_changes_nothing() -> None:
    def opened(kind: BackendKind, spec: ReplicaSpec) -> Backend:
        if spec.address == "http://new":
            raise FileNotFoundError("no such file")
        return HeldReplica()

    fleet = UpstreamRegistry(Dependencies(opened, resolve, lambda _: None))
    one = UpstreamSettings(backend="tei", replicas=("http://old",))
    fleet.apply({"one": one}, {})
    before = fleet.upstreams
    with pytest.raises(FileNotFoundError):
        fleet.apply({"two": one, "three": UpstreamSettings(backend="tei", replicas=("http://new",))}, {})

    assert before == fleet.upstreams
    await fleet.aclose()


OUTCOME = ReloadOutcome(
    (ConfigChange("models.bge.deadline_s", "changed", "60.0 → 5.0"),), (ConfigChange("listen", "changed"),)
)
PROBLEM = ReloadOutcome(
    problems=(Problem("models.bge.upstream", "there is no upstream 'x'"), Problem("a", "b"))
)


async def test_reload_reports_applied_and_pending_changes(boot: Boots) -> None:
    async def reload() -> ReloadOutcome:
        return OUTCOME

    async with boot({"old": FakeTei()}, ONE, reload=reload) as gateway:
        reply = await gateway.client.post("/admin/reload")

    assert 200 == reply.status_code
    assert {
        "changes": [{"path": "models.bge.deadline_s", "how": "changed", "detail": "60.0 → 5.0"}],
        "needs_restart": [{"path": "listen", "how": "changed", "detail": ""}],
    } == reply.json()


async def test_reload_reports_every_problem_of_the_file(boot: Boots) -> None:
    async def reload() -> ReloadOutcome:
        return PROBLEM

    async with boot({"old": FakeTei()}, ONE, reload=reload) as gateway:
        reply = await gateway.client.post("/admin/reload")

    assert 422 == reply.status_code
    assert "models.bge.upstream: there is no upstream 'x'; a: b" in reply.json()["error"]


async def test_reload_reports_a_timeout_and_is_404_without_a_file(boot: Boots) -> None:
    async def reload() -> ReloadOutcome:
        raise TimeoutError

    async with boot({"old": FakeTei()}, ONE, reload=reload) as gateway:
        late = await gateway.client.post("/admin/reload")
    async with boot({"old": FakeTei()}, ONE) as gateway:
        nowhere = await gateway.client.post("/admin/reload")

    assert ("the reload takes long" in late.json()["error"], 404) == (True, nowhere.status_code)


async def test_only_operators_may_reload(boot: Boots) -> None:
    async def reload() -> ReloadOutcome:
        raise AssertionError("nobody may")

    async with boot({"old": FakeTei()}, ONE + TENANTS, reload=reload) as gateway:
        # Not this machine's name: a key is needed, and this one is for models.
        reply = await gateway.client.post("/admin/reload")

    assert 403 == reply.status_code
