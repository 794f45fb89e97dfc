"""Several upstreams behind one model in a real gateway: refused at start and later, changed without loss."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.callers import Callers, is_logged
from tests.processes.conftest import Served, run_serve, wait_until
from tests.quotas.redis_server import RedisServer

pytestmark = pytest.mark.slow

CONFIG = """
listen: 127.0.0.1:0
workers: {workers}
quotas: {{store: "{store}"}}
upstreams:
  a: {{backend: tei, replicas: ["{a}"]}}
  b: {{backend: tei, replicas: ["{b}"]}}
  other: {{backend: tei, replicas: ["{other}"]}}
models:
  single: {{upstream: a}}
{models}"""
EVEN = "  m: {upstreams: [{name: a}, {name: b}]}\n"
DIFFERENT = "  m: {upstreams: [{name: a}, {name: other}]}\n"
CANARY = {"upstream": "a", "canary": {"name": "b", "share": 0.5, "min_cosine": 0.99}}

CANARY_AND_MIRROR = """
  tried: {upstream: a, canary: {name: b, share: 0.5}}
  mirrored: {upstream: a, mirror: {name: b, share: 0.5}}
"""

Writes = Callable[..., Path]


class Servers:
    """Servers of one vector space, and one of another; and the file that names them."""

    def __init__(self, folder: Path, urls: dict[str, str], fakes: dict[str, FakeTei]) -> None:
        self.fakes = fakes
        self._file, self._urls = folder / "router.yaml", urls

    def write(self, models: str, store: str = "memory", workers: int = 1) -> Path:
        """Write router.yaml with these models."""
        text = CONFIG.format(models=models, store=store, workers=workers, **self._urls)
        self._file.write_text(text)
        return self._file

    @contextmanager
    def gateway(self, models: str, **settings: Any) -> Iterator[Served]:
        """Run a gateway until the block ends."""
        running = Served(self.write(models, **settings)).wait_until_up()
        try:
            yield running
        finally:
            running.stop()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    fakes = {name: FakeTei() for name in ("a", "b", "other")}
    fakes["other"].space = "other"
    with ExitStack() as stack:
        urls = {name: stack.enter_context(serve_in_thread(fake)) for name, fake in fakes.items()}
        yield Servers(tmp_path, urls, fakes)


def embed(gateway: Served, text: str = "x", model: str = "m") -> int:
    with gateway.client() as client:
        return client.post("/v1/embeddings", json={"model": model, "input": text}).status_code


def upstreams_of(gateway: Served, model: str = "m") -> dict[str, Any]:
    with gateway.client() as client:
        models = client.get("/admin/status").json()["models"]
    (found,) = [each for each in models if each["name"] == model]
    return {each["name"]: each for each in found["upstreams"]}


def test_a_gateway_does_not_start_with_upstreams_of_different_models(servers: Servers) -> None:
    ended = run_serve(servers.write(DIFFERENT))

    assert 1 == ended.returncode
    assert "models.m.upstreams[1].name: 'other' and 'a': its vectors are not those" in ended.stderr
    assert "needed" in ended.stderr


def test_a_reload_or_an_edit_with_upstreams_of_different_models_is_refused(servers: Servers) -> None:
    with servers.gateway(EVEN) as gateway, gateway.client() as client:
        servers.write(DIFFERENT)
        reload = client.post("/admin/reload")
        put = client.put("/admin/models/n", json={"upstreams": [{"name": "a"}, {"name": "other"}]})
        fitting = client.put("/admin/models/n", json={"upstreams": [{"name": "a"}, {"name": "b"}]})
        served = embed(gateway), embed(gateway, model="n")

    assert [422, 422, 200] == [reply.status_code for reply in (reload, put, fitting)]
    for reply in (reload, put):
        assert "cosine" in reply.text
        assert "0.999 needed" in reply.text
    assert (200, 200) == served
    assert not servers.fakes["other"].requests


def test_edits_and_reloads_under_load_lose_no_call(servers: Servers) -> None:
    shapes: list[dict[str, Any]] = [
        {"upstreams": [{"name": "a"}, {"name": "b"}]},
        {"upstreams": [{"name": "b", "weight": 5}, {"name": "a", "priority": 1}]},
        {"upstream": "a"},
        CANARY,
        {"upstream": "b", "mirror": {"name": "a", "share": 1}},
        {"upstreams": [{"name": "a"}, {"name": "b"}], "split_by": "tenant"},
    ]
    with servers.gateway("") as gateway, gateway.client() as client:
        assert 200 == client.put("/admin/models/m", json=shapes[0]).status_code
        callers = Callers(gateway, 6)
        for shape in shapes * 3:
            reached = len(callers.statuses) + 20
            assert 200 == client.put("/admin/models/m", json=shape).status_code
            assert wait_until(lambda reached=reached: len(callers.statuses) > reached)
            assert 200 == client.post("/admin/reload").status_code
        callers.stop()

    assert {200} == set(callers.statuses)
    assert len(callers.statuses) > 300


def test_all_workers_withdraw_a_canary_and_an_edit_puts_it_back(servers: Servers, tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    try:
        with servers.gateway("", store=redis.url, workers=2) as gateway, gateway.client() as client:
            assert 200 == client.put("/admin/models/m", json=CANARY).status_code
            callers = Callers(gateway, 6)
            assert wait_until(lambda: len(callers.statuses) > 60)
            assert servers.fakes["b"].requests
            servers.fakes["b"].space = "other"
            # Each worker logs it, although only one of them need have compared anything.
            assert wait_until(
                lambda: sum("upstream b is withdrawn as its canary" in line for line in gateway.log) >= 2
            )
            servers.fakes["b"].requests.clear()
            reached = len(callers.statuses) + 60
            assert wait_until(lambda: len(callers.statuses) > reached)
            assert len(servers.fakes["b"].requests) <= 6
            assert "withdrawn" == upstreams_of(gateway)["b"]["standing"]
            servers.fakes["b"].space = ""
            assert 200 == client.put("/admin/models/m", json=CANARY).status_code
            assert wait_until(lambda: len(servers.fakes["b"].requests) > 20)
            assert "serving" == upstreams_of(gateway)["b"]["standing"]
            callers.stop()
    finally:
        redis.stop()

    assert {200} == set(callers.statuses)
    assert not is_logged(gateway, "Traceback")


def test_the_banner_waits_for_the_spaces_that_gateways_share(servers: Servers, tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    try:
        with servers.gateway(CANARY_AND_MIRROR, store=redis.url) as gateway:
            ready = json.loads(gateway.banner)
    finally:
        redis.stop()

    assert [("single", "tei"), ("tried", "tei"), ("mirrored", "tei")] == [
        (model["name"], model["backend"]) for model in ready["models"]
    ]
    assert all(model["operations"] for model in ready["models"])
