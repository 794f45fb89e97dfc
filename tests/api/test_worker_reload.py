"""Live reload: a new config applies at once, and no running call is lost."""

import asyncio

import pytest

from backends.contract import Backend, BackendKind, ReplicaSpec
from backends.http.client import UpstreamClient
from gateway.audit.records import Actor
from gateway.config.diff import ConfigChange, ReloadOutcome
from gateway.config.problems import Problem
from gateway.config.schema import UpstreamSettings
from gateway.events import Event, ReplicaChanged, StoreChanged
from gateway.routing.discovery import resolve
from gateway.tenants.keyring import key_digest
from gateway.upstreams.factory import Dependencies
from gateway.upstreams.upstreams import ScopedObserver, Upstreams
from tests.conftest import CONFIG, KEY, Boots, Running
from tests.fakes.hooks import CLASSIFIER, Gate, tei_with_hook, until
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
    """Return the list of closed upstream clients."""
    doors: list[UpstreamClient] = []
    aclose = UpstreamClient.aclose

    async def noted(door: UpstreamClient) -> None:
        doors.append(door)
        await aclose(door)

    monkeypatch.setattr(UpstreamClient, "aclose", noted)
    return doors


@pytest.mark.parametrize(
    "new_config",
    [
        ONE.replace("http://old", "http://new"),
        ONE.replace('["http://old"]', '["http://new"], queue_tokens: 9'),
        ONE.replace("one", "two").replace("http://old", "http://new"),
    ],
    ids=["replicas exchanged", "upstream changed", "upstream renamed"],
)
async def test_calls_finish_on_the_replicas_they_began_with(
    boot: Boots, new_config: str, closed: list[UpstreamClient]
) -> None:
    gate, new = Gate(), FakeTei()
    old = tei_with_hook(gate)
    async with boot({"old": old, "new": new}, ONE) as gateway:
        running = asyncio.create_task(embed(gateway, "held"))
        await until(lambda: gate.waiting == 1)
        drained = gateway.follow(new_config)
        assert [200, 200] == [await embed(gateway, "a"), await embed(gateway, "b")]
        assert (1, 2, []) == (len(old.requests), len(new.requests), closed)
        gate.opened.set()
        assert 200 == await running
        await drained
        await until(lambda: len(closed) == 1)


async def test_removed_model_rejects_new_calls_and_finishes_running_ones(boot: Boots) -> None:
    gate = Gate()
    async with boot({"old": tei_with_hook(gate), "new": FakeTei()}, ONE) as gateway:
        running = asyncio.create_task(embed(gateway, "held"))
        await until(lambda: gate.waiting == 1)
        gateway.follow(ONE.replace("bge", "other").replace("one", "two").replace("http://old", "http://new"))
        assert [404, 200] == [await embed(gateway), await embed(gateway, model="other")]
        gate.opened.set()
        assert 200 == await running


async def test_retired_lane_serves_its_queued_calls(boot: Boots) -> None:
    gate = Gate()
    config = ONE.replace('["http://old"]', '["http://old"], in_flight_batches: 1')
    async with boot({"old": tei_with_hook(gate), "new": FakeTei()}, config) as gateway:
        running = [asyncio.create_task(embed(gateway, f"text {i}")) for i in range(9)]
        lane = gateway.application.gateway.upstreams["one"].lanes["texts"]
        await until(lambda: gate.waiting == 1 and lane.queued_tokens > 0)
        drained = gateway.follow(ONE.replace("http://old", "http://new").replace("one", "two"))
        gate.opened.set()
        assert [200] * 9 == await asyncio.gather(*running)
        await drained


async def test_unchanged_upstreams_and_replicas_stay(boot: Boots) -> None:
    servers = {"tei-0": FakeTei(), "tei-1": FakeTei(), "rerank-0": FakeTei()}
    async with boot(servers, CONFIG) as gateway:
        before = dict(gateway.application.gateway.upstreams)
        first = before["embedder"].pool.replicas[0]
        events_before = len(gateway.events)
        await gateway.follow(CONFIG.replace(', "http://tei-1"', "").replace("strict:", "stricter:"))
        after = gateway.application.gateway.upstreams
        await until(lambda: len(before["embedder"].pool.replicas) == 1)

        assert before == after
        assert [first] == after["embedder"].pool.replicas
        assert [("http://tei-1", "gone")] == [
            (event.replica, event.state)
            for event in gateway.events[events_before:]
            if isinstance(event, ReplicaChanged)
        ]
        assert 200 == await embed(gateway)


async def test_new_keys_and_tenants_apply_to_the_next_call(boot: Boots) -> None:
    gate = Gate()
    async with boot({"old": tei_with_hook(gate)}, ONE + TENANTS) as gateway:
        running = asyncio.create_task(embed(gateway, "held", key="other"))
        await until(lambda: gate.waiting == 1)
        gateway.follow(ONE + TENANTS.replace(key_digest("other"), key_digest("third")))
        gate.opened.set()

        assert 401 == await embed(gateway, key="other")
        assert [200, 200] == [await embed(gateway), await embed(gateway, key="third")]
        assert 200 == await running


async def test_a_tenant_that_leaves_the_file_leaves_no_call_to_its_successor(boot: Boots) -> None:
    async def calls(key: str) -> int:
        reply = await gateway.client.get("/usage/calls", headers={"authorization": f"Bearer {key}"})
        return len(reply.json()["calls"])

    async with boot({"old": FakeTei()}, f"{TENANTS}{ONE}") as gateway:
        for key in (KEY, "other"):
            assert await embed(gateway, key=key) == 200
        only = TENANTS.replace(", globex", ", else")
        gateway.follow(f"{only}{ONE}")
        gateway.follow(f"{TENANTS}{ONE}")
        assert [await calls(KEY), await calls("other")] == [1, 0]


async def test_an_added_model_gets_no_request_of_the_only_model_of_the_file(boot: Boots) -> None:
    one, added = FakeTei(model_type=CLASSIFIER), FakeTei()
    async with boot({"old": one, "new": added}, ONE) as gateway:
        with_added = ONE.replace(
            "upstreams: {", 'upstreams: {two: {backend: tei, replicas: ["http://new"]}, '
        )
        gateway.follow(with_added.replace("models: {", "models: {more: {upstream: two}, "), ["more"])
        assert 200 == await embed(gateway, model="more")
        root = await gateway.post("/", {"inputs": "confidential"})
        ids = await gateway.post("/tokenize", {"inputs": "confidential"})
        labels = await gateway.post("/predict", {"inputs": "confidential", "model": "bge"})

    assert [200, 200, 200] == [reply.status_code for reply in (root, ids, labels)]
    assert labels.json() == root.json()
    assert "confidential" not in str(added.requests)


async def test_new_limits_apply_to_the_next_call(boot: Boots) -> None:
    limited = TENANTS.replace("acme: {", "acme: {limits: {requests_per_day: 2}, ")
    async with boot({"old": FakeTei()}, ONE + limited) as gateway:
        assert [200, 200, 429] == [await embed(gateway) for _ in range(3)]
        gateway.follow(ONE + limited.replace("per_day: 2", "per_day: 3"))
        # A limit with another amount is a new limit, which starts full.
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
        metrics = await _metrics(gateway)

    gauges = [line for line in metrics.splitlines() if 'upstream="one"' in line and "_total" not in line]
    assert 'gateway_lane_queued_tokens{upstream="two"}' in metrics
    assert [] == [line for line in gauges if line.startswith(("gateway_lane_", "gateway_replica_"))]


async def test_status_shows_only_the_current_upstreams(boot: Boots) -> None:
    gate = Gate()
    async with boot({"old": tei_with_hook(gate), "new": FakeTei()}, ONE) as gateway:
        running = asyncio.create_task(embed(gateway, "held"))
        await until(lambda: gate.waiting == 1)
        before = await _status(gateway)
        gateway.follow(ONE.replace("one", "two").replace("bge", "other").replace("http://old", "http://new"))
        assert 200 == await embed(gateway, model="other")
        after = await _status(gateway)
        events_before = len(gateway.events)
        gate.opened.set()
        assert 200 == await running

    assert [["one"], ["http://old"], ["bge"]] == before
    assert [["two"], ["http://new"], ["other"]] == after
    reported = [event for event in gateway.events[events_before:] if isinstance(event, ReplicaChanged)]
    assert [] == [event for event in reported if event.upstream == "one"]


async def _status(gateway: Running) -> list[list[str]]:
    """Return the lanes, the replicas in use and the models."""
    snapshot = (await gateway.client.get("/admin/status", headers={"host": "127.0.0.1"})).json()
    return [
        [item["upstream"] for item in snapshot["lanes"]],
        [item["name"] for item in snapshot["replicas"] if item["state"] == "up" and item["since_s"]],
        [item["name"] for item in snapshot["models"]],
    ]


async def test_retired_upstream_reports_no_replica_events() -> None:
    reported: list[Event] = []
    observer = ScopedObserver(reported.append)
    events: list[Event] = [
        ReplicaChanged("one", "http://a", "down", "away"),
        StoreChanged(away=True, reason=""),
    ]
    for event in events:
        observer.observe(event)
    observer.retire()
    for event in events:
        observer.observe(event)

    assert [*events, events[1]] == reported


async def _metrics(gateway: Running) -> str:
    return (await gateway.client.get("/metrics", headers={"host": "127.0.0.1"})).text


async def test_replica_that_cannot_be_opened_changes_nothing() -> None:
    def open_replica(kind: BackendKind, spec: ReplicaSpec) -> Backend:
        if spec.address == "http://new":
            raise FileNotFoundError("no such file")
        return HeldReplica()

    upstreams = Upstreams(Dependencies(open_replica, resolve, lambda _: None))
    upstream = UpstreamSettings(backend="tei", replicas=("http://old",))
    upstreams.apply({"one": upstream}, {})
    before = upstreams.by_name
    with pytest.raises(FileNotFoundError):
        upstreams.apply(
            {"two": upstream, "three": UpstreamSettings(backend="tei", replicas=("http://new",))}, {}
        )

    assert before == upstreams.by_name
    await upstreams.aclose()


OUTCOME = ReloadOutcome(
    (ConfigChange("models.bge.deadline_s", "changed", "60.0 → 5.0"),), (ConfigChange("listen", "changed"),)
)
PROBLEM = ReloadOutcome(
    problems=(Problem("models.bge.upstream", "there is no upstream 'x'"), Problem("a", "b"))
)


async def test_reload_reports_applied_and_pending_changes(boot: Boots) -> None:
    async def reload(by: Actor) -> ReloadOutcome:
        return OUTCOME

    async with boot({"old": FakeTei()}, ONE, reload=reload) as gateway:
        reply = await gateway.client.post("/admin/reload")

    assert 200 == reply.status_code
    assert {
        "changes": [{"path": "models.bge.deadline_s", "how": "changed", "detail": "60.0 → 5.0"}],
        "needs_restart": [{"path": "listen", "how": "changed", "detail": ""}],
    } == reply.json()


async def test_reload_reports_every_problem_of_the_file(boot: Boots) -> None:
    async def reload(by: Actor) -> ReloadOutcome:
        return PROBLEM

    async with boot({"old": FakeTei()}, ONE, reload=reload) as gateway:
        reply = await gateway.client.post("/admin/reload")

    assert 422 == reply.status_code
    assert "models.bge.upstream: there is no upstream 'x'; a: b" in reply.json()["error"]


async def test_reload_reports_a_timeout_and_is_404_without_a_file(boot: Boots) -> None:
    async def reload(by: Actor) -> ReloadOutcome:
        raise TimeoutError

    async with boot({"old": FakeTei()}, ONE, reload=reload) as gateway:
        late = await gateway.client.post("/admin/reload")
    async with boot({"old": FakeTei()}, ONE) as gateway:
        nowhere = await gateway.client.post("/admin/reload")

    assert ("the reload takes long" in late.json()["error"], 404) == (True, nowhere.status_code)


async def test_only_operators_may_reload(boot: Boots) -> None:
    async def reload(by: Actor) -> ReloadOutcome:
        raise AssertionError("reloaded without permission")

    async with boot({"old": FakeTei()}, ONE + TENANTS, reload=reload) as gateway:
        # The host is not local, therefore a key is required, and this one is for models.
        reply = await gateway.client.post("/admin/reload")

    assert 403 == reply.status_code
