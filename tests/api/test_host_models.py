"""TEI Manager's API for models: shapes, errors, downloads from a fake Hub, access."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from backends.torch.wire import ModelBoot, SmokeLoad
from gateway.api.operators import manager
from gateway.config.load import parse_config
from gateway.declared.checkpoints import ListedModel, Registry
from gateway.processes import model_requests
from gateway.processes.model_requests import ModelRequests
from tests.conftest import MANAGER_PORT, Running, running_gateway
from tests.fakes.hub import FakeHub, serving_hub, use_hub, write_cache
from tests.unit.test_registry import FILES
from tests.waiting import PATIENCE_S

MANAGER = f"http://gateway:{MANAGER_PORT}"
CONFIG = """
upstreams: {one: {backend: torch, model: org/used}}
models: {m: {upstream: one}}
"""
GATEWAY = 'upstreams: {one: {backend: tei, replicas: ["http://tei-0"]}}\nmodels: {m: {upstream: one}}\n'


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve a repository to an empty cache."""
    use_hub(monkeypatch, HF_HUB_CACHE=str(tmp_path / "cache"))
    with serving_hub({"org/model": FILES}, monkeypatch) as fake:
        yield fake


@pytest.fixture
async def gateway(tmp_path: Path, fake_hub: FakeHub) -> AsyncIterator[Running]:
    """Boot a gateway whose parent keeps its records in a folder of the test."""
    del fake_hub
    config = parse_config(CONFIG, {}, tmp_path)
    requests = ModelRequests(lambda: config, tmp_path / "state", {})
    async with running_gateway({}, GATEWAY, wait=False, manager=requests.run) as running:
        yield running


async def test_models_are_added_listed_and_described(gateway: Running) -> None:
    client = gateway.client
    added = await client.post(f"{MANAGER}/models", json={"model_id": "org/model"})
    again = await client.post(f"{MANAGER}/models", json={"model_id": "org/model"})
    listed = (await client.get(f"{MANAGER}/models")).json()
    one = await client.get(f"{MANAGER}/models/org%2Fmodel")
    below_admin = await client.get("/admin/registry/org/model")

    assert (201, 200) == (added.status_code, again.status_code)
    assert {"org/model": "available", "org/used": "available"} == {
        model["model_id"]: model["status"] for model in listed
    }
    assert {"model_id", "status", "downloaded", "added_at"} <= one.json().keys()
    assert one.json() == below_admin.json()
    assert ("available", False) == (one.json()["status"], one.json()["downloaded"])


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/models/none", None, 404, "MODEL_NOT_FOUND"),
        ("POST", "/models", {}, 422, "VALIDATION_ERROR"),
        ("POST", "/models", {"model_id": "../../etc"}, 400, "VALIDATION_ERROR"),
        ("POST", "/models", {"model_id": "a", "other": 1}, 422, "VALIDATION_ERROR"),
        ("POST", "/models/org%2Fnone/download", None, 500, "MODEL_DOWNLOAD_FAILED"),
        ("POST", "/models/org%2Fnone/load", None, 404, "MODEL_NOT_FOUND"),
        ("DELETE", "/models/none", None, 405, "METHOD_NOT_ALLOWED"),
    ],
)
async def test_errors_have_the_managers_form(
    gateway: Running, method: str, path: str, body: object, status: int, code: str
) -> None:
    reply = await gateway.client.request(method, MANAGER + path, json=body)
    assert (status, code) == (reply.status_code, reply.json()["code"]), reply.text
    assert {"error", "code", "timestamp"} == reply.json().keys()


async def test_a_model_is_downloaded_and_loaded(
    gateway: Running, fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(boot: ModelBoot, timeout_s: float, environment: object) -> SmokeLoad:
        del environment
        assert (timeout_s > 0, boot.model) == (True, "org/model")
        return SmokeLoad(None, ("embed",), 384, 256, 1.5)

    # A process of its own loads torch, which tests/engine/test_inspect_command.py shows.
    monkeypatch.setattr(model_requests, "smoke_load", load)
    downloaded = await gateway.client.post(f"{MANAGER}/models/org%2Fmodel/download")
    loaded = await gateway.client.post(f"{MANAGER}/models/org%2Fmodel/load")

    assert ("downloaded", True) == (downloaded.json()["status"], downloaded.json()["downloaded"])
    assert ("verified", 384, 1.5) == tuple(
        loaded.json()[name] for name in ("status", "dimensions", "load_secs")
    )
    assert fake_hub.downloads


async def status_of(gateway: Running) -> str:
    """Return the status of the model."""
    status: str = (await gateway.client.get(f"{MANAGER}/models/org%2Fmodel")).json()["status"]
    return status


async def test_a_long_download_goes_on_in_the_background(
    gateway: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cache(tmp_path / "cache", "org/model", FILES)
    monkeypatch.setattr(model_requests, "WAIT_S", 0.0)
    assert 200 == (await gateway.client.post(f"{MANAGER}/models/org%2Fmodel/download")).status_code
    async with asyncio.timeout(PATIENCE_S):
        while await status_of(gateway) != "downloaded":  # noqa: ASYNC110 - a thread changes it
            await asyncio.sleep(0.05)


async def test_a_request_that_fails_in_an_unforeseen_way_frees_its_place(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("unforeseen")

    monkeypatch.setattr(Registry, "verify", fail)
    await gateway.client.post(f"{MANAGER}/models", json={"model_id": "org/model"})
    for _ in range(3):
        reply = await gateway.client.post(f"{MANAGER}/models/org%2Fmodel/load")
        assert (503, "the request failed: ValueError") == (reply.status_code, reply.json()["error"])


async def test_operators_alone_use_the_registry(gateway: Running) -> None:
    for path in ("/models", "/models/org%2Fmodel"):
        reply = await gateway.client.get(MANAGER + path, headers={"authorization": "Bearer nobody"})
        assert 401 == reply.status_code
    # Callers' /models/{name} is TEI's.
    assert "code" not in (await gateway.client.get("/models/org%2Fmodel/info")).json()


async def test_the_status_lists_models_of_the_host(gateway: Running) -> None:
    await gateway.client.post(f"{MANAGER}/models", json={"model_id": "org/model"})
    snapshot = (await gateway.client.get("/admin/status")).json()
    assert [("org/model", "available", []), ("org/used", "available", ["one"])] == [
        (model["model"], model["state"], model["upstreams"]) for model in snapshot["registry"]
    ]


async def test_the_status_reads_the_registry_every_few_seconds(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = 0
    models = Registry.models

    def counted(registry: Registry) -> list[ListedModel]:
        nonlocal lists
        lists += 1
        return models(registry)

    monkeypatch.setattr(Registry, "models", counted)
    for _ in range(5):
        assert 2 > len((await gateway.client.get("/admin/status")).json()["registry"])
    assert 1 == lists


async def test_the_status_does_not_wait_for_a_slow_registry(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "RECENT_TIMEOUT_S", 0.01)
    released = threading.Event()
    monkeypatch.setattr(Registry, "models", lambda _: released.wait(PATIENCE_S) and [])
    try:
        assert [] == (await gateway.client.get("/admin/status")).json()["registry"]
    finally:
        released.set()
