"""Operators add upstreams and models to running gateways: shared in Redis, or kept in memory."""

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.additions.store import ADDED
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.callers import Callers, is_logged, status
from tests.processes.conftest import Served, wait_until
from tests.processes.holding_server import HELD, HoldingServer
from tests.quotas.redis_server import RedisServer

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
    """A server for upstreams, a Redis, and files that gateways are started with."""

    def __init__(self, folder: Path, url: str, fake: FakeTei, redis: RedisServer) -> None:
        self.url, self.fake, self.redis = url, fake, redis
        self.file = folder / "router.yaml"
        (folder / "files").mkdir()
        (folder / "files" / "token").write_text(f"{OF_FILE}\n")

    def write(self, *, shared: bool = True, upstreams: str = "", models: str = "") -> None:
        """What router.yaml says beside `one` and `m`. shared: in Redis, two workers; else it is watched."""
        store, workers = (self.redis.url, 2) if shared else ("memory", 1)
        text = CONFIG.format(
            workers=workers,
            store=store,
            watch=str(not shared).lower(),
            url=self.url,
            upstreams=upstreams,
            models=models,
        )
        beside = self.file.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self.file)

    @contextmanager
    def gateway(self, **environment: str) -> Iterator[Served]:
        """One more, until the block ends."""
        running = Served(self.file, environment).wait_until_up()
        try:
            yield running
        finally:
            running.stop()

    def tei(self, **more: Any) -> dict[str, Any]:
        """An upstream on the server."""
        return {"backend": "tei", "replicas": [self.url], **more}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    fake, redis = FakeTei(), RedisServer(tmp_path)
    with serve_in_thread(fake) as url:
        one = Place(tmp_path, url, fake, redis)
        one.write()
        yield one
    redis.stop()


def put(gateway: Served, path: str, settings: Any) -> httpx.Response:
    with gateway.client() as client:
        return client.put(f"/admin/{path}", json=settings, timeout=120)


def removed(gateway: Served, path: str) -> httpx.Response:
    with gateway.client() as client:
        return client.delete(f"/admin/{path}")


def listed(gateway: Served, part: str) -> dict[str, dict[str, Any]]:
    with gateway.client() as client:
        return {one["name"]: one for one in client.get(f"/admin/{part}").json()}


def reloaded(gateway: Served) -> httpx.Response:
    with gateway.client() as client:
        return client.post("/admin/reload")


def statuses(gateway: Served, model: str) -> set[int]:
    """Of calls on connections of their own: they meet all workers."""
    return {status(gateway, model) for _ in range(12)}


def answers(gateway: Served, model: str) -> bool:
    """Also where workers are just being started again."""
    try:
        return statuses(gateway, model) == {200}
    except httpx.TransportError:
        return False


def test_additions_reach_every_worker_of_every_gateway(place: Place) -> None:
    secrets = {"UPSTREAM_KEY": OF_ENVIRONMENT}
    with place.gateway(**secrets) as one, place.gateway() as two:
        headers = {"x-key": "${UPSTREAM_KEY}"}
        upstream = place.tei(api_key="${file:token}")
        assert 200 == put(one, "upstreams/shared", upstream).status_code
        told = put(one, "models/org/shared", {"upstream": "shared"})
        assert [{"path": "models.org/shared", "how": "added", "detail": ""}] == told.json()["changes"]
        assert {200} == statuses(one, "org/shared")
        assert f"Bearer {OF_FILE}" in {sent.get("authorization") for sent in place.fake.headers}
        assert wait_until(lambda: statuses(two, "org/shared") == {200}, 10)
        # A secret that one of them has not keeps it from serving that alone.
        assert 200 == put(one, "upstreams/apart", place.tei(headers=headers)).status_code
        assert 200 == put(one, "models/apart", {"upstream": "apart"}).status_code
        assert {200} == statuses(one, "apart")
        assert OF_ENVIRONMENT in {sent.get("x-key") for sent in place.fake.headers}
        assert wait_until(lambda: listed(two, "models").get("apart", {}).get("problem"), 10)
        shown = [listed(gateway, "upstreams") for gateway in (one, two)]
        assert [None, True] == [
            told["apart"]["problem"] and "UPSTREAM_KEY" in told["apart"]["problem"] for told in shown
        ]
        assert [upstream, upstream] == [told["shared"]["settings"] for told in shown]
        assert ({404}, 200) == (statuses(two, "apart"), status(two))

        stored = place.redis.command("HGETALL", ADDED)
        refused = removed(two, "upstreams/shared")
        assert (422, True) == (refused.status_code, "org/shared" in refused.json()["error"])
        for path in ("models/org/shared", "upstreams/shared", "models/apart", "upstreams/apart"):
            assert 200 == removed(two, path).status_code
        assert {404} == statuses(two, "org/shared")
        assert wait_until(lambda: statuses(one, "org/shared") == {404}, 10)
        assert 404 == removed(one, "models/org/shared").status_code
    logs = "".join([*one.log, *two.log])
    assert not [one for one in (OF_FILE, OF_ENVIRONMENT) if one in f"{logs}{stored}{shown}"]
    assert "${file:token}" in stored
    assert "upstreams.apart.headers.x-key: left out of what was added" in "".join(two.log)


def test_rejects_invalid_additions_without_storing_secrets(place: Place) -> None:
    with place.gateway() as gateway:
        wrong = put(gateway, "upstreams/x", place.tei(api_key=WRITTEN, tls={"ca": "/etc/passwd"}))
        unknown = put(gateway, "models/x", {"upstream": "none"})
        mine = put(gateway, "models/m", {"upstream": "one"})
        left = [listed(gateway, part) for part in ("upstreams", "models")]
        told = [wrong.json()["error"], unknown.json()["error"], mine.json()["error"]]

    assert [422, 422, 422] == [reply.status_code for reply in (wrong, unknown, mine)]
    assert all(path in told[0] for path in ("upstreams.x.api_key", "upstreams.x.tls.ca"))
    assert "there is no upstream 'none'; there are: one" in told[1]
    assert "models.m: router.yaml defines it" in told[2]
    assert [{}, {}] == left
    assert not [one for one in (*told, *gateway.log) if WRITTEN in one]
    assert WRITTEN not in place.redis.command("HGETALL", ADDED)


def test_keeps_all_concurrent_additions_of_two_gateways(place: Place) -> None:
    with place.gateway() as one, place.gateway() as two:
        names = [f"x{number}" for number in range(16)]
        with ThreadPoolExecutor(8) as pool:
            gateways = itertools.cycle((one, two))
            puts = [
                pool.submit(put, gateway, f"models/{name}", {"upstream": "one"})
                for name, gateway in zip(names, gateways, strict=False)
            ]
            puts += [pool.submit(reloaded, gateway) for gateway in (one, two)]
            assert {200} == {each.result(60).status_code for each in puts}
        for gateway in (one, two):
            assert wait_until(lambda gateway=gateway: set(names) <= listed(gateway, "models").keys(), 10)
            assert {200} == {status(gateway, name) for name in names}


def test_restores_additions_after_restart(place: Place) -> None:
    with place.gateway(UPSTREAM_KEY="x") as one:
        put(one, "upstreams/x", place.tei(api_key="${UPSTREAM_KEY}"))
        put(one, "models/x", {"upstream": "x"})
        put(one, "models/y", {"upstream": "one"})
        killed = {pid for pid, line in one.children().items() if "gateway.processes.worker" in line}
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not killed & one.children().keys() and answers(one, "x"))
        assert {200} == statuses(one, "x")
    # Where a secret is gone the gateway starts all the same, and says what it leaves out.
    with place.gateway() as two:
        assert ({200}, {404}, {200}) == tuple(statuses(two, model) for model in ("y", "x", "m"))
        assert "UPSTREAM_KEY" in listed(two, "upstreams")["x"]["problem"]
        assert "there is no upstream 'x'" in listed(two, "models")["x"]["problem"]
        assert is_logged(two, "upstreams.x.api_key: left out of what was added")
    place.redis.command("HSET", ADDED, "version", "other", "additions", "nothing that can be read")
    with place.gateway() as three:
        assert 200 == status(three)
        assert 503 == put(three, "models/z", {"upstream": "one"}).status_code


def test_file_overrides_additions_and_restores_them_when_it_changes_back(place: Place) -> None:
    place.write(shared=False, upstreams=f', two: {{backend: tei, replicas: ["{place.url}"]}}')
    with place.gateway() as gateway:
        assert 200 == put(gateway, "models/x", {"upstream": "two"}).status_code
        assert 200 == put(gateway, "upstreams/y", place.tei()).status_code
        assert 200 == put(gateway, "models/y", {"upstream": "y"}).status_code
        # The file comes to define a name, and takes away what another goes by.
        place.write(shared=False, models=", y: {upstream: one}")
        gateway.process.send_signal(signal.SIGHUP)
        assert wait_until(
            lambda: is_logged(gateway, "models.y: left out of what was added: router.yaml defines it")
        )
        assert wait_until(lambda: status(gateway, "x") == 404)
        assert "there is no upstream 'two'" in listed(gateway, "models")["x"]["problem"]
        assert 422 == put(gateway, "models/y", {"upstream": "y"}).status_code
        assert 200 == status(gateway, "y")

        place.write(shared=False, upstreams=f', two: {{backend: tei, replicas: ["{place.url}"]}}')
        # Nobody asks: the file is watched.
        assert wait_until(lambda: status(gateway, "x") == 200)
        assert [200, 200] == [status(gateway, model) for model in ("x", "y")]
        assert [None, None] == [listed(gateway, "models")[name]["problem"] for name in ("x", "y")]
        assert {"changes": [], "needs_restart": []} == reloaded(gateway).json()


def test_keeps_serving_and_rejects_additions_while_redis_is_unavailable(place: Place) -> None:
    with place.gateway() as gateway:
        assert 200 == put(gateway, "models/x", {"upstream": "one"}).status_code
        place.redis.freeze()
        try:
            refused = put(gateway, "models/y", {"upstream": "one"})
            assert (503, True) == (refused.status_code, "retry-after" in refused.headers)
            assert 200 == status(gateway, "x")
            assert ["x"] == list(listed(gateway, "models"))
        finally:
            place.redis.thaw()
        # Whether the one in between was heard after all or not, this one is.
        assert wait_until(lambda: put(gateway, "models/z", {"upstream": "one"}).status_code == 200)
        assert {200} == statuses(gateway, "z")
        # A Redis that was emptied holds nothing.
        place.redis.command("FLUSHALL")
        assert wait_until(lambda: statuses(gateway, "z") == {404})
        assert ({}, 200) == (listed(gateway, "models"), status(gateway))


@pytest.mark.timeout(120)
def test_adding_and_removing_under_load_loses_no_request(place: Place) -> None:
    stub = HoldingServer()
    held: list[int] = []
    with place.gateway() as gateway:
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
            # A call that is in flight when its model and its upstream go ends as it would have.
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
            caller.join(30)
        finally:
            callers.stop()
            stub.stop()

    assert [200] == held
    assert {200} == set(callers.statuses)


def _called(gateway: Served, model: str, text: str) -> int:
    with gateway.client() as client:
        return client.post("/v1/embeddings", json={"model": model, "input": text}).status_code


@pytest.mark.timeout(180)
def test_loads_added_torch_upstream_first_and_restores_it_after_restart(place: Place) -> None:
    torch = {"backend": "torch", "model": "sentence-transformers/all-MiniLM-L6-v2", "dtype": "float32"}
    with place.gateway() as gateway:
        refused = put(gateway, "upstreams/t", {**torch, "task": "rerank"})
        assert (422, True) == (refused.status_code, "upstreams.t:" in refused.json()["error"])
        assert {} == listed(gateway, "upstreams")
        assert not [line for line in gateway.children().values() if "backends.torch.server" in line]
        assert 200 == put(gateway, "upstreams/t", torch).status_code
        assert 200 == put(gateway, "models/t", {"upstream": "t"}).status_code
        assert 200 == status(gateway, "t")
        # One that can be read and not loaded: as it stood in Redis before a release, or a card, was changed.
        stored = place.redis.command("HGET", ADDED, "additions").split("\r\n")[1]
    broken = stored.replace('"upstreams":{', '"upstreams":{"broken":{"backend":"torch","model":"org/none"},')
    place.redis.command("HSET", ADDED, "version", "other", "additions", broken)
    with place.gateway() as gateway:
        assert 200 == status(gateway)
        assert wait_until(lambda: status(gateway, "t") == 200, 60)
        assert listed(gateway, "upstreams")["broken"]["problem"]
        assert listed(gateway, "upstreams")["t"]["problem"] is None
