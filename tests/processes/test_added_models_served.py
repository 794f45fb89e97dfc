"""Operators add upstreams and models to running gateways, shared in Redis or in one gateway's memory."""

import itertools
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from gateway.declared.store import ADDED
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.callers import Callers, is_logged, status
from tests.processes.conftest import Served, wait_until
from tests.processes.holding_server import HELD, HoldingServer
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

CONFIG = """
listen: 127.0.0.1:0
workers: {workers}
quotas: {{store: "{store}"}}
admin: {{files: ./files}}
reload: {{watch: {watch}}}
upstreams: {{one: {{backend: tei, replicas: ["{url}"]}}{upstreams}}}
models: {{m: {{upstream: one}}{models}}}
"""
OF_FILE, OF_ENVIRONMENT, WRITTEN = "secret-of-a-file", "secret-of-the-environment", "secret-written-out"


class Place:
    """A server for upstreams, a Redis, and the files that gateways start with."""

    def __init__(self, folder: Path, url: str, fake: FakeTei, redis: RedisServer) -> None:
        self.url, self.fake, self.redis = url, fake, redis
        self.file = folder / "router.yaml"
        (folder / "files").mkdir()
        (folder / "files" / "token").write_text(f"{OF_FILE}\n")

    def write(self, *, shared: bool = True, workers: int = 1, upstreams: str = "", models: str = "") -> None:
        """Write router.yaml with `one`, `m` and more. shared: on Redis; else in memory, and watched."""
        store = self.redis.url if shared else "memory"
        text = CONFIG.format(
            workers=workers,
            store=store,
            watch=str(not shared).lower(),
            url=self.url,
            upstreams=upstreams,
            models=models,
        )
        new_file = self.file.with_suffix(".new")
        new_file.write_text(text)
        new_file.replace(self.file)

    @contextmanager
    def gateway(self, **environment: str) -> Iterator[Served]:
        """Run a gateway until the block ends."""
        running = Served(self.file, environment).wait_until_up()
        try:
            yield running
        finally:
            running.stop()

    def tei(self, **more: Any) -> dict[str, Any]:
        """Return the settings of an upstream on the server."""
        return {"backend": "tei", "replicas": [self.url], **more}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    fake, redis = FakeTei(), RedisServer(tmp_path)
    with serve_in_thread(fake) as url:
        setup = Place(tmp_path, url, fake, redis)
        setup.write()
        yield setup
    redis.stop()


class Pair(NamedTuple):
    """Two gateways with the same additions; only the first has the secret of its environment."""

    place: Place
    first: Served
    second: Served


@pytest.fixture(scope="module")
def running_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    fake, redis = FakeTei(), RedisServer(folder)
    with serve_in_thread(fake) as url:
        place = Place(folder, url, fake, redis)
        place.write(workers=2)
        with place.gateway(UPSTREAM_KEY=OF_ENVIRONMENT) as first, place.gateway() as second:
            yield Pair(place, first, second)
        logs = "".join([*first.log, *second.log])
    redis.stop()
    assert not [secret for secret in (OF_FILE, OF_ENVIRONMENT, WRITTEN) if secret in logs]


@pytest.fixture
def pair(running_pair: Pair) -> Pair:
    """Return the running gateways, without the additions of the previous test."""
    # As after a removal of all: gateways keep what a store without a version has lost.
    running_pair.place.redis.command("HSET", ADDED, "version", secrets.token_hex(8), "additions", "{}")
    for gateway in running_pair.first, running_pair.second:
        for part in ("models", "upstreams"):
            assert wait_until(lambda gateway=gateway, part=part: not listed(gateway, part))
    return running_pair


def put(gateway: Served, path: str, settings: Any) -> httpx.Response:
    with gateway.client() as client:
        return client.put(f"/admin/{path}", json=settings, timeout=PATIENCE_S)


def removed(gateway: Served, path: str) -> httpx.Response:
    with gateway.client() as client:
        return client.delete(f"/admin/{path}")


def listed(gateway: Served, part: str) -> dict[str, dict[str, Any]]:
    with gateway.client() as client:
        return {entry["name"]: entry for entry in client.get(f"/admin/{part}").json()}


def reloaded(gateway: Served) -> httpx.Response:
    with gateway.client() as client:
        return client.post("/admin/reload")


def statuses(gateway: Served, model: str) -> set[int]:
    """Return the statuses of requests on separate connections, which reach every worker."""
    return {status(gateway, model) for _ in range(12)}


def served_without_a_model(gateway: Served) -> str:
    """Return the model that serves a request which specifies none."""
    with gateway.client() as client:
        reply = client.post("/v1/embeddings", json={"input": "a"})
    model: str = reply.json().get("model", reply.text)
    return model


def answers(gateway: Served, model: str) -> bool:
    """Return True if every worker serves the model; False also while a worker restarts."""
    try:
        return statuses(gateway, model) == {200}
    except httpx.TransportError:
        return False


def test_additions_reach_every_worker_of_every_gateway(pair: Pair) -> None:
    place, first, second = pair
    headers = {"x-key": "${UPSTREAM_KEY}"}
    upstream = place.tei(api_key="${file:token}")
    assert 200 == put(first, "upstreams/shared", upstream).status_code
    reply = put(first, "models/org/shared", {"upstream": "shared"})
    assert [{"path": "models.org/shared", "how": "added", "detail": ""}] == reply.json()["changes"]
    assert {200} == statuses(first, "org/shared")
    # The requests that specify no model stay those of the file's model.
    assert {"m"} == {served_without_a_model(first) for _ in range(12)}
    assert f"Bearer {OF_FILE}" in {sent.get("authorization") for sent in place.fake.headers}
    assert wait_until(lambda: statuses(second, "org/shared") == {200})
    # A secret that only first gateway has keeps the other from serving only this upstream.
    assert 200 == put(first, "upstreams/apart", place.tei(headers=headers)).status_code
    assert 200 == put(first, "models/apart", {"upstream": "apart"}).status_code
    assert {200} == statuses(first, "apart")
    assert OF_ENVIRONMENT in {sent.get("x-key") for sent in place.fake.headers}
    assert wait_until(lambda: listed(second, "models").get("apart", {}).get("problem"))
    shown = [listed(gateway, "upstreams") for gateway in (first, second)]
    assert [None, True] == [
        upstreams["apart"]["problem"] and "UPSTREAM_KEY" in upstreams["apart"]["problem"]
        for upstreams in shown
    ]
    assert [upstream, upstream] == [upstreams["shared"]["settings"] for upstreams in shown]
    assert ({404}, 200) == (statuses(second, "apart"), status(second))

    stored = place.redis.command("HGETALL", ADDED)
    refused = removed(second, "upstreams/shared")
    assert (422, True) == (refused.status_code, "org/shared" in refused.json()["error"])
    for path in ("models/org/shared", "upstreams/shared", "models/apart", "upstreams/apart"):
        assert 200 == removed(second, path).status_code
    assert {404} == statuses(second, "org/shared")
    assert wait_until(lambda: statuses(first, "org/shared") == {404})
    assert 404 == removed(first, "models/org/shared").status_code
    # `running_pair` searches the complete logs for secrets.
    assert not [secret for secret in (OF_FILE, OF_ENVIRONMENT) if secret in f"{stored}{shown}"]
    assert "${file:token}" in stored
    assert wait_until(lambda: is_logged(second, "upstreams.apart.headers.x-key: addition is not served"))


def test_rejects_invalid_additions_without_storing_secrets(pair: Pair) -> None:
    place, gateway, _ = pair
    wrong = put(gateway, "upstreams/x", place.tei(api_key=WRITTEN, tls={"ca": "/etc/passwd"}))
    unknown = put(gateway, "models/x", {"upstream": "none"})
    duplicate = put(gateway, "models/m", {"upstream": "one"})
    stored = [listed(gateway, part) for part in ("upstreams", "models")]
    errors = [wrong.json()["error"], unknown.json()["error"], duplicate.json()["error"]]

    assert [422, 422, 422] == [reply.status_code for reply in (wrong, unknown, duplicate)]
    assert all(path in errors[0] for path in ("upstreams.x.api_key", "upstreams.x.tls.ca"))
    assert "there is no upstream 'none'; did you mean 'one'? there are: one" in errors[1]
    assert "models.m: router.yaml defines it" in errors[2]
    assert [{}, {}] == stored
    assert not [line for line in (*errors, *gateway.log) if WRITTEN in line]
    assert WRITTEN not in place.redis.command("HGETALL", ADDED)


def test_keeps_all_concurrent_additions_of_two_gateways(pair: Pair) -> None:
    _, first, second = pair
    names = [f"x{number}" for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        gateways = itertools.cycle((first, second))
        puts = [
            pool.submit(put, gateway, f"models/{name}", {"upstream": "one"})
            for name, gateway in zip(names, gateways, strict=False)
        ]
        puts += [pool.submit(reloaded, gateway) for gateway in (first, second)]
        assert {200} == {each.result(PATIENCE_S).status_code for each in puts}
    for gateway in (first, second):
        assert wait_until(lambda gateway=gateway: set(names) <= listed(gateway, "models").keys())
        assert {200} == {status(gateway, name) for name in names}


def test_restores_additions_after_restart(place: Place) -> None:
    with place.gateway(UPSTREAM_KEY="x") as first:
        put(first, "upstreams/x", place.tei(api_key="${UPSTREAM_KEY}"))
        put(first, "models/x", {"upstream": "x"})
        put(first, "models/y", {"upstream": "one"})
        killed = {pid for pid, line in first.children().items() if "gateway.processes.worker" in line}
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not killed & first.children().keys() and answers(first, "x"))
        assert {200} == statuses(first, "x")
    # Without a secret the gateway still starts, and reports the addition that it excludes.
    with place.gateway() as second:
        assert ({200}, {404}, {200}) == tuple(statuses(second, model) for model in ("y", "x", "m"))
        assert "UPSTREAM_KEY" in listed(second, "upstreams")["x"]["problem"]
        assert "there is no upstream 'x'" in listed(second, "models")["x"]["problem"]
        assert is_logged(second, "upstreams.x.api_key: addition is not served")
    place.redis.command("HSET", ADDED, "version", "other", "additions", "nothing that can be read")
    with place.gateway() as third:
        assert 200 == status(third)
        assert 503 == put(third, "models/z", {"upstream": "one"}).status_code


def test_file_overrides_additions_and_restores_them_when_it_changes_back(place: Place) -> None:
    place.write(shared=False, upstreams=f', two: {{backend: tei, replicas: ["{place.url}"]}}')
    with place.gateway() as gateway:
        assert 200 == put(gateway, "models/x", {"upstream": "two"}).status_code
        assert 200 == put(gateway, "upstreams/y", place.tei()).status_code
        assert 200 == put(gateway, "models/y", {"upstream": "y"}).status_code
        # The file now defines the name of one addition, and removes the upstream of another.
        place.write(shared=False, models=", y: {upstream: one}")
        gateway.process.send_signal(signal.SIGHUP)
        assert wait_until(
            lambda: is_logged(gateway, "models.y: addition is not served: router.yaml defines it")
        )
        assert wait_until(lambda: status(gateway, "x") == 404)
        assert "there is no upstream 'two'" in listed(gateway, "models")["x"]["problem"]
        assert 422 == put(gateway, "models/y", {"upstream": "y"}).status_code
        assert 200 == status(gateway, "y")

        place.write(shared=False, upstreams=f', two: {{backend: tei, replicas: ["{place.url}"]}}')
        # No reload is requested: the file is watched.
        assert wait_until(lambda: status(gateway, "x") == 200)
        assert [200, 200] == [status(gateway, model) for model in ("x", "y")]
        assert [None, None] == [listed(gateway, "models")[name]["problem"] for name in ("x", "y")]
        assert {"changes": [], "needs_restart": []} == reloaded(gateway).json()


def test_keeps_serving_and_rejects_additions_while_redis_is_unavailable(pair: Pair) -> None:
    place, gateway, _ = pair
    assert 200 == put(gateway, "models/x", {"upstream": "one"}).status_code
    place.redis.freeze()
    try:
        refused = put(gateway, "models/y", {"upstream": "one"})
        assert (503, True) == (refused.status_code, "retry-after" in refused.headers)
        assert 200 == status(gateway, "x")
        assert ["x"] == list(listed(gateway, "models"))
    finally:
        place.redis.thaw()
    # The edit during the outage may have been stored or not; this one is.
    assert wait_until(lambda: put(gateway, "models/z", {"upstream": "one"}).status_code == 200)
    assert {200} == statuses(gateway, "z")
    # What an emptied Redis has lost stays, and the next edit stores it again.
    place.redis.command("FLUSHALL")
    assert wait_until(lambda: any("Redis has lost the additions" in line for line in gateway.log))
    assert {200} == statuses(gateway, "z")
    assert wait_until(lambda: put(gateway, "models/last", {"upstream": "one"}).status_code == 200)
    assert {"x", "z", "last"} <= set(listed(gateway, "models"))
    assert {200} == statuses(gateway, "z")


def test_adding_and_removing_under_load_loses_no_request(pair: Pair) -> None:
    stub = HoldingServer()
    held: list[int] = []
    place, gateway, _ = pair
    callers = Callers(gateway, 4)
    try:
        for number in range(12):
            assert 200 == put(gateway, "upstreams/x", place.tei(queue_tokens=1000 + number)).status_code
            assert 200 == put(gateway, "models/x", {"upstream": "x"}).status_code
            assert 200 == status(gateway, "x")
            assert 200 == reloaded(gateway).status_code
            assert [200, 200] == [
                removed(gateway, f"{part}/x").status_code for part in ("models", "upstreams")
            ]
        # A request in flight completes although its model and its upstream are removed.
        put(gateway, "upstreams/slow", place.tei(replicas=[stub.url]))
        put(gateway, "models/slow", {"upstream": "slow"})
        caller = threading.Thread(target=lambda: held.append(_called(gateway, "slow", HELD)))
        caller.start()
        assert wait_until(lambda: stub.waiting == 1)
        assert [200, 200] == [
            removed(gateway, f"{part}/slow").status_code for part in ("models", "upstreams")
        ]
        assert {404} == statuses(gateway, "slow")
        stub.release()
        caller.join(PATIENCE_S)
    finally:
        callers.stop()
        stub.stop()

    assert [200] == held
    assert {200} == set(callers.statuses)


def _called(gateway: Served, model: str, text: str) -> int:
    with gateway.client() as client:
        return client.post("/v1/embeddings", json={"model": model, "input": text}).status_code


def test_loads_added_torch_upstream_first_and_restores_it_after_restart(place: Place) -> None:
    torch = {"backend": "torch", "model": "sentence-transformers/all-MiniLM-L6-v2", "dtype": "float32"}
    with place.gateway() as gateway:
        refused = put(gateway, "upstreams/t", {**torch, "task": "rerank"})
        assert (422, True) == (refused.status_code, "upstreams.t:" in refused.json()["error"])
        assert {} == listed(gateway, "upstreams")
        assert not [line for line in gateway.children().values() if "backends.torch.serving.server" in line]
        assert 200 == put(gateway, "upstreams/t", torch).status_code
        assert 200 == put(gateway, "models/t", {"upstream": "t"}).status_code
        assert 200 == status(gateway, "t")
        # A valid addition that cannot be loaded, such as one stored before the release or GPU changed.
        stored = place.redis.command("HGET", ADDED, "additions").split("\r\n")[1]
    broken = stored.replace('"upstreams":{', '"upstreams":{"broken":{"backend":"torch","model":"org/none"},')
    place.redis.command("HSET", ADDED, "version", "other", "additions", broken)
    with place.gateway() as gateway:
        assert 200 == status(gateway)
        assert wait_until(lambda: status(gateway, "t") == 200)
        assert listed(gateway, "upstreams")["broken"]["problem"]
        assert listed(gateway, "upstreams")["t"]["problem"] is None
