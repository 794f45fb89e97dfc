"""TEI Manager's API for instances: recorded calls, access, and the lives of instances."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.config.load import parse_config
from gateway.declared.host import HostCommand, HostResult
from tests.conftest import MANAGER_PORT, Boots, Running, running_gateway
from tests.fakes.instances import CONFIG, InstanceParent
from tests.fakes.tei import FakeTei

RECORDED = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "golden/tei-manager/rest.jsonl").read_text().splitlines()
]
MANAGER = f"http://gateway:{MANAGER_PORT}"
GATEWAY = 'upstreams: {one: {backend: tei, replicas: ["http://tei-0"]}}\nmodels: {m: {upstream: one}}\n'
# (method, path, body) → status of this gateway, where it differs. docs/instances.md gives the reasons.
DIFFERENT: dict[tuple[str, str, str], int] = {
    ("POST", "/instances", '{"name": "bad name/x", "model_id": "minilm"}'): 400,
    ("POST", "/instances", '{"name": "", "model_id": "x"}'): 400,
    ("POST", "/instances", '{"name": "low", "model_id": "x", "port": 80}'): 400,
    ("POST", "/instances/a/start", "null"): 409,
    ("GET", "/instances/a/logs?start=x", "null"): 422,
}


@pytest.fixture
async def parent(tmp_path: Path) -> AsyncIterator[InstanceParent]:
    """Return a parent whose instances have no processes."""
    parent = InstanceParent(tmp_path)
    yield parent
    await parent.close()


@pytest.fixture
async def gateway(parent: InstanceParent) -> AsyncIterator[Running]:
    """Boot a gateway with that parent."""
    async with running_gateway({"tei-0": FakeTei()}, GATEWAY, manager=parent.run) as running:
        yield running


async def create(gateway: Running, **settings: Any) -> httpx.Response:
    return await gateway.client.post(f"{MANAGER}/instances", json={"model_id": "org/x", **settings})


async def test_recorded_calls_have_the_same_status_and_fields(
    gateway: Running, parent: InstanceParent
) -> None:
    assert 201 == (await create(gateway, name="a", port=7610)).status_code
    await parent.ready("a")
    for number in range(60):
        parent.pool.find("a").log.add(f"line {number}")
    expected_at: dict[str, int] = {}
    for call in RECORDED:
        if call["method"] == "GET" and call["path"] == "/instances/r":
            await parent.ready("r")
        raw = (call["request"] or {}).get("raw")
        body = None if call["request"] is None else (raw or json.dumps(call["request"])).encode()
        reply = await gateway.client.request(call["method"], MANAGER + call["path"], content=body)
        key = (call["method"], call["path"], json.dumps(call["request"]))
        # The first start finds a running instance; the second one starts it.
        is_known = key in DIFFERENT and not (call["path"].endswith("/start") and call["path"] in expected_at)
        expected_at[call["path"]] = 1
        assert (DIFFERENT[key] if is_known else call["status"]) == reply.status_code, call
        if reply.status_code == 204:
            assert b"" == reply.content
        elif call["content-type"] == "application/json" and not is_known:
            assert_has_fields(call["reply"], reply.json())
        elif call["path"] != "/metrics":
            assert {"error", "code", "timestamp"} == reply.json().keys(), call


def assert_has_fields(recorded: Any, ours: Any) -> None:
    if isinstance(recorded, list):
        assert_has_fields(recorded[0], ours[0])
    else:
        assert recorded.keys() <= ours.keys()
    if isinstance(recorded, dict) and "code" in recorded:
        assert recorded | ours | {"timestamp": ours["timestamp"]} == ours
        assert (recorded["error"], recorded["code"]) == (ours["error"], ours["code"])


async def test_a_slice_of_the_log_is_that_of_python(gateway: Running, parent: InstanceParent) -> None:
    await create(gateway, name="a")
    lines = [f"line {number}" for number in range(10)]
    for line in lines:
        parent.pool.find("a").log.add(line)
    for query, expected in (("", lines), ("?start=-2", lines[-2:]), ("?start=1&end=-7", lines[1:-7])):
        reply = await gateway.client.get(f"{MANAGER}/instances/a/logs{query}")
        assert expected == reply.json()["lines"]
        assert 10 == reply.json()["total_lines"]


async def test_the_same_paths_are_below_admin_and_no_others_on_the_managers_address(
    gateway: Running,
) -> None:
    await create(gateway, name="a")
    below = await gateway.client.get("/admin/instances/a")
    assert "a" == below.json()["name"]
    for path in ("/v1/models", "/embed", "/admin/instances", "/admin/keys", "/ui", "//instances", "/"):
        reply = await gateway.client.get(MANAGER + path)
        assert 404 == reply.status_code, path
        assert "code" in reply.json(), path
    assert 404 == (await gateway.client.get("/instances")).status_code


async def test_all_but_health_and_metrics_need_a_key(gateway: Running) -> None:
    await create(gateway, name="a")
    for path in ("/instances", "/instances/a", "/instances/a/logs"):
        reply = await gateway.client.get(MANAGER + path, headers={"authorization": ""})
        assert (401, "UNAUTHENTICATED") == (reply.status_code, reply.json()["code"])
    health = await gateway.client.get(f"{MANAGER}/health", headers={"authorization": ""})
    assert "healthy" == health.json()["status"]
    metrics = await gateway.client.get(f"{MANAGER}/metrics", headers={"authorization": ""})
    assert 'tei_manager_instance_restarts_total{instance="a"} 0' in metrics.text.splitlines()
    assert "tei_manager_instances_created_total 1" in metrics.text.splitlines()


async def test_a_gateway_without_manager_says_so(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, GATEWAY) as gateway:
        reply = await gateway.client.get("/admin/instances")
    assert 404 == reply.status_code
    assert "manager.listen" in reply.json()["error"]


async def test_a_parent_that_does_not_answer_is_a_timeout(boot: Boots) -> None:
    async def ask(_: HostCommand) -> HostResult:
        raise TimeoutError

    async with boot({"tei-0": FakeTei()}, GATEWAY, manager=ask) as gateway:
        reply = await gateway.client.get(f"{MANAGER}/instances")
    assert "DEADLINE_EXCEEDED" == reply.json()["code"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "x y"}, "cannot be a name"),
        ({"name": "../x"}, "cannot be a name"),
        ({"name": "embed"}, "cannot be a name"),
        ({"name": "x", "upstream": "a/b"}, "cannot be a name"),
        ({"name": "x", "model_id": "/etc"}, "admin.files"),
        ({"name": "x", "model_id": "--help"}, "`model_id`"),
        ({"name": "x", "kind": "sh"}, "allowed: engine, fake"),
        ({"name": "x", "pooling": "cls"}, "has no place for it"),
        ({"name": "x", "port": 70000}, "1024 to 65535"),
        ({"name": "x", "port": 9000, "prometheus_port": 9000}, "are the same"),
        ({"name": "x", "extra_args": ["a\0b"]}, "NUL"),
        ({"name": "x", "kind": "engine", "port": 9000}, "no port of its own"),
        ({"name": "x", "kind": "engine", "extra_args": ["-v"]}, "takes no arguments"),
        ({"name": "x", "kind": "engine", "pooling": "median"}, "pooling"),
        ({"name": "x", "kind": "engine", "gpu_id": 0, "device": "cpu"}, "set one of them"),
        ({"name": "old-model"}, "name of a model already"),
        ({"name": "old"}, "name it in `upstream` to join it"),
        ({"name": "x", "upstream": "own"}, "of another kind"),
        ({"name": "x", "kind": "engine", "upstream": "own"}, "has another model"),
        ({"name": "x", "startup_timeout_secs": 0}, "at least 1"),
    ],
)
async def test_refuses_what_cannot_run(gateway: Running, settings: dict[str, Any], message: str) -> None:
    reply = await create(gateway, **settings)
    assert (400, "VALIDATION_ERROR") == (reply.status_code, reply.json()["code"])
    assert message in reply.json()["error"]
    assert [] == (await gateway.client.get(f"{MANAGER}/instances")).json()


async def test_instances_join_and_leave_upstreams(gateway: Running, parent: InstanceParent) -> None:
    await create(gateway, name="a")
    await create(gateway, name="b", upstream="a")
    await create(gateway, name="c", upstream="old")
    assert [] == parent.sent
    for name in "abc":
        await parent.ready(name)

    upstreams = parent.config.upstreams
    assert (2, 2) == (len(upstreams["a"].replicas), len(upstreams["old"].replicas))
    assert "http://old" == upstreams["old"].replicas[0]
    assert {"old-model", "a"} == parent.config.models.keys()
    # Another model, or an own name that is taken, would put two vector spaces into one upstream.
    assert 400 == (await create(gateway, name="d", upstream="a", model_id="org/y")).status_code
    for name in ("a", "c"):
        reply = await gateway.client.post(f"{MANAGER}/instances/{name}/stop")
        assert ("stopped", None) == (reply.json()["status"], reply.json()["pid"])
    assert 1 == len(parent.config.upstreams["a"].replicas)
    assert ("http://old",) == parent.config.upstreams["old"].replicas
    await gateway.client.delete(f"{MANAGER}/instances/b")
    assert parent.base == parent.config


async def test_an_instance_that_exits_stays_in_its_upstream(gateway: Running, parent: InstanceParent) -> None:
    await create(gateway, name="a")
    await parent.ready("a")
    for _ in range(5):
        parent.children["a"].instance.on_exit("ended", "signal SIGKILL")
    info = (await gateway.client.get(f"{MANAGER}/instances/a")).json()
    assert ("starting", 5, True) == (info["status"], info["restarts"], info["joined"])
    await parent.ready("a")
    assert 1 == len(parent.sent)


async def test_an_instance_runs_once_the_workers_send_it_calls(
    gateway: Running, parent: InstanceParent
) -> None:
    """While the gateway itself starts, workers learn of it late; its process is asked again and again."""
    parent.may_publish.clear()
    await create(gateway, name="a")
    for _ in range(3):
        parent.children["a"].instance.on_ready()
        await asyncio.sleep(0)
    info = parent.pool.info(parent.pool.find("a"))
    assert ("starting", False) == (info.status, info.joined)
    parent.may_publish.set()
    await parent.ready("a")
    info = parent.pool.info(parent.pool.find("a"))
    assert ("running", True) == (info.status, info.joined)


async def test_an_instance_that_is_deleted_while_it_is_created_leaves_no_process(
    gateway: Running, parent: InstanceParent, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = parent.pool._write

    async def slow_write() -> None:
        await asyncio.sleep(0)
        await write()

    monkeypatch.setattr(parent.pool, "_write", slow_write)
    delete = f"{MANAGER}/instances/a"
    replies = await asyncio.gather(
        create(gateway, name="a"), *[gateway.client.delete(delete) for _ in range(20)]
    )

    assert 201 == replies[0].status_code
    listed = (await gateway.client.get(f"{MANAGER}/instances")).json()
    running = [name for name, child in parent.children.items() if not child.is_stopped]
    assert [instance["name"] for instance in listed] == running


async def test_calls_to_a_stopped_instance_may_be_sent_again_later(
    gateway: Running, parent: InstanceParent
) -> None:
    await create(gateway, name="a")
    gateway.application.instances.update(parent.pool.infos)
    reply = await gateway.post("/v1/embeddings", {"model": "a", "input": "x"})
    assert (503, True) == (reply.status_code, "retry-after" in reply.headers)
    assert "is starting, not running" in reply.json()["error"]["message"]
    missing = await gateway.post("/v1/embeddings", {"model": "b", "input": "x"})
    assert 404 == missing.status_code


async def test_an_instance_that_never_gets_ready_fails_with_its_reason(
    gateway: Running, parent: InstanceParent
) -> None:
    await create(gateway, name="a")
    child = parent.children["a"]
    for _ in range(3):
        child.instance.on_exit("ended", "exit status 1")
    info = (await gateway.client.get(f"{MANAGER}/instances/a")).json()
    assert "failed" == info["status"]
    assert "exited 3 times" in info["reason"]
    log = (await gateway.client.get(f"{MANAGER}/instances/a/logs")).json()["lines"]
    assert log[-1] == f"failed: {info['reason']}"
    started = await gateway.client.post(f"{MANAGER}/instances/a/start")
    assert child.is_stopped
    assert ("starting", None) == (started.json()["status"], started.json()["reason"])


async def test_instances_are_kept_over_a_restart(
    gateway: Running, parent: InstanceParent, tmp_path: Path
) -> None:
    await create(gateway, name="a")
    await create(gateway, name="b")
    await create(gateway, name="c")
    await gateway.client.post(f"{MANAGER}/instances/b/stop")
    await gateway.client.delete(f"{MANAGER}/instances/c")
    await parent.close()

    later = InstanceParent(tmp_path)
    # A template may be gone by then.
    commands = CONFIG.replace("fake", "other")
    later.config = later.base = parse_config(commands, {}, tmp_path)
    await later.pool.start(later.records)
    assert [("a", "failed"), ("b", "stopped")] == [(info.name, info.status) for info in later.pool.infos]
    assert "has no 'fake'" in str(later.pool.infos[0].reason)
    await later.close()


async def test_a_stopping_gateway_changes_no_instance(gateway: Running, parent: InstanceParent) -> None:
    await parent.pool.stop_all()
    reply = await create(gateway, name="a")
    assert (503, "INSTANCES_UNAVAILABLE") == (reply.status_code, reply.json()["code"])


async def test_the_status_lists_instances(gateway: Running, parent: InstanceParent) -> None:
    await create(gateway, name="a")
    gateway.application.instances.update(parent.pool.infos)
    snapshot = (await gateway.client.get("/admin/status")).json()
    assert [("a", "starting", 4711)] == [
        (instance["name"], instance["status"], instance["pid"]) for instance in snapshot["instances"]
    ]
