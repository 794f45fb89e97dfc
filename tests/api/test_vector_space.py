"""Replicas with other vectors than their upstream: refused or marked as mixed, always reported."""

import asyncio
from typing import Any

import pytest

from gateway.config import schema as config
from gateway.errors import NoReplica
from gateway.events import ReplicaChanged, SpaceChecked
from gateway.lane.lane import Lane
from gateway.lane.retries import LaneSettings
from gateway.lane.slices import Bounds
from gateway.routing import prober
from gateway.routing.health import ReplicaEvent
from gateway.routing.pool import Pool
from gateway.routing.replica import Replica
from gateway.upstreams.model_inputs import ModelInputs
from gateway.upstreams.upstream import Upstream
from gateway.vector_spaces.space import VectorSpace
from tests.conftest import Boots, Running
from tests.fakes.hooks import RERANKER, until
from tests.fakes.replicas import HeldReplica
from tests.fakes.tei import FakeTei, TeiError
from tests.waiting import PATIENCE_S

ONE = """
upstreams: {only: {backend: tei, replicas: ["http://tei-0"]%s}}
models: {m: {upstream: only}}
"""
TWO = """
upstreams: {only: {backend: tei, replicas: ["http://tei-0", "http://tei-1"]%s}}
models: {m: {upstream: only}}
"""
WARN = ", vector_space: {on_mismatch: warn}"
REQUEST = {"model": "m", "input": "a"}


@pytest.fixture(autouse=True)
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check replicas continuously."""
    monkeypatch.setattr(prober, "CHECK_EVERY_S", 0.005)
    monkeypatch.setattr(prober, "IDLE_PROBE_AFTER_S", 0.0)


def other_model(**info: Any) -> FakeTei:
    """Create a server of another model under the same name."""
    server = FakeTei(**info)
    server.space = "other "
    return server


def states(gateway: Running) -> list[tuple[str, str]]:
    """Return each change of a replica."""
    return [(event.replica[-1], event.state) for event in gateway.events if isinstance(event, ReplicaChanged)]


def checks(gateway: Running) -> list[SpaceChecked]:
    """Return the outcomes of checks that changed."""
    return [event for event in gateway.events if isinstance(event, SpaceChecked) and event.changed]


async def fingerprint(gateway: Running) -> str | None:
    """Return the space id in the header of a reply."""
    reply = await gateway.post("/v1/embeddings", REQUEST)
    assert 200 == reply.status_code, reply.text
    return reply.headers.get("x-embedding-fingerprint")


async def state_of(gateway: Running) -> tuple[str, str | None]:
    """Return the state and the space id of the model in /v1/models."""
    model = (await gateway.client.get("/v1/models/m")).json()
    return model["state"], model["fingerprint"]


async def test_space_id_is_stable_across_gateways_and_restarts(boot: Boots) -> None:
    ids = set()
    for servers in ({"tei-0": FakeTei()}, {"tei-0": FakeTei(max_client_batch_size=32)}):
        async with boot(servers, ONE % "") as gateway:
            ids.add(await fingerprint(gateway))
            assert ("ready", *ids) == await state_of(gateway)
    [only] = ids
    assert only is not None
    assert 16 == len(only)
    int(only, 16)


async def test_different_spaces_have_different_ids(boot: Boots) -> None:
    ids = []
    for server in (FakeTei(), other_model()):
        async with boot({"tei-0": server}, ONE % "") as gateway:
            ids.append(await fingerprint(gateway))

    assert ids[0] != ids[1]


@pytest.mark.parametrize(
    ("path", "body"), [("/rerank", {"query": "q", "texts": ["a"]}), ("/tokenize", {"inputs": "a"})]
)
async def test_replies_without_vectors_have_no_space_id(boot: Boots, path: str, body: Any) -> None:
    async with boot({"tei-0": FakeTei()}, ONE % "") as gateway:
        reply = await gateway.post(path, body)
        embedded = await gateway.post("/embed", {"inputs": "a"})

    assert 200 == reply.status_code
    assert "x-embedding-fingerprint" not in reply.headers
    assert "x-embedding-fingerprint" in embedded.headers


async def wait_for_checks(gateway: Running, events: int) -> None:
    """Wait until that many outcomes have changed."""
    await until(lambda: len(checks(gateway)) >= events)


async def test_rejects_a_replica_with_other_vectors(boot: Boots) -> None:
    servers = {"tei-0": FakeTei(), "tei-1": other_model()}
    async with boot(servers, TWO % "") as gateway:
        await wait_for_checks(gateway, 2)
        good, bad = sorted(checks(gateway), key=lambda check: check.outcome != "fits")
        for _ in range(20):
            await fingerprint(gateway)
        served = {name: len(server.requests) for name, server in servers.items()}

    assert ("fits", "differs") == (good.outcome, bad.outcome)
    assert bad.cosine is not None
    assert bad.cosine < 0.9
    assert "0.999 needed" in bad.reason
    # The first replica defined the fingerprint.
    assert {good.replica: 20, bad.replica: 0} == {f"http://{name}": n for name, n in served.items()}
    assert (bad.replica[-1], "down") in states(gateway)
    # Two mismatches before the report, and one request for the fingerprint.
    assert servers[bad.replica.removeprefix("http://")].reference_requests >= 4


async def test_replica_joins_once_its_vectors_match(boot: Boots) -> None:
    servers = {"tei-0": FakeTei(), "tei-1": other_model()}
    async with boot(servers, TWO % "") as gateway:
        await wait_for_checks(gateway, 2)
        [bad] = [check for check in checks(gateway) if check.outcome == "differs"]
        for server in servers.values():
            server.space = servers["tei-0" if bad.replica.endswith("1") else "tei-1"].space
        await until(lambda: (bad.replica[-1], "probation") in states(gateway))

    assert "fits" == checks(gateway)[-1].outcome


async def test_warn_mode_serves_and_marks_replies_as_mixed(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei(), "tei-1": other_model()}, TWO % WARN) as gateway:
        await wait_for_checks(gateway, 2)

        assert "mixed" == await fingerprint(gateway)
        assert [("0", "up"), ("1", "up")] == sorted(states(gateway))


async def test_other_dimensions_are_a_mismatch(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei(), "tei-1": DoubleLengthTei()}, TWO % "") as gateway:
        await wait_for_checks(gateway, 2)
        [bad] = [check for check in checks(gateway) if check.outcome == "differs"]

    assert (0.0, True) == (bad.cosine, "dimensions, the upstream's" in bad.reason)


class DoubleLengthTei(FakeTei):
    """Server that returns vectors of twice the length."""

    def _vector(self, text: str, body: dict[str, Any]) -> Any:
        return super()._vector(text, body).repeat(2)


async def test_ignores_a_single_mismatch(boot: Boots) -> None:
    first = FakeTei()
    second = GlitchTei(first)
    async with boot({"tei-0": first, "tei-1": second}, TWO % "") as gateway:
        await wait_for_checks(gateway, 2)

    assert {"fits"} == {check.outcome for check in checks(gateway)}
    # The reference texts take two requests.
    assert (2, 4) == (first.reference_requests, second.reference_requests)


class GlitchTei(FakeTei):
    """Server that joins after another one, and returns wrong vectors once."""

    def __init__(self, first: FakeTei) -> None:
        super().__init__()
        self.first = first

    async def _answer(self, *arguments: Any) -> tuple[int, bytes]:
        await until(lambda: self.first.reference_requests == 2)
        return await super()._answer(*arguments)

    def _vector(self, text: str, body: dict[str, Any]) -> Any:
        self.space = "other " if self.reference_requests == 1 else ""
        return super()._vector(text, body)


async def test_last_replica_keeps_serving_another_model_with_an_alarm(boot: Boots) -> None:
    server = FakeTei()
    async with boot({"tei-0": server}, ONE % "") as gateway:
        before = await fingerprint(gateway)
        server.space, server.info = "other ", server.info | {"model_sha": "new"}
        await wait_for_checks(gateway, 2)

        assert "mixed" == await fingerprint(gateway) != before
        assert ("ready", "mixed") == await state_of(gateway)
    assert ["fits", "differs"] == [check.outcome for check in checks(gateway)]
    assert [("0", "up"), ("0", "probation")] == states(gateway)[:2]
    assert ("0", "down") not in states(gateway)


async def test_ejects_one_of_two_replicas_that_changed_model(boot: Boots) -> None:
    servers = [FakeTei(), FakeTei()]
    async with boot({f"tei-{i}": server for i, server in enumerate(servers)}, TWO % "") as gateway:
        before = await fingerprint(gateway)
        servers[1].space, servers[1].info = "other ", servers[1].info | {"model_sha": "new"}
        await until(lambda: ("1", "down") in states(gateway))

        assert before == await fingerprint(gateway)
        assert ("ready", before) == await state_of(gateway)


async def test_changed_replica_stays_out_while_another_serves(boot: Boots) -> None:
    servers = [FakeTei(), FakeTei()]
    async with boot({f"tei-{i}": server for i, server in enumerate(servers)}, TWO % "") as gateway:
        before = await fingerprint(gateway)
        await restart_with_other_model(gateway, servers[1], "1")
        await until(lambda: checks(gateway)[-1].outcome == "differs")
        for _ in range(10):
            assert before == await fingerprint(gateway)

    assert "down" == states(gateway)[-1][1]


async def test_only_replica_returns_with_another_model_and_an_alarm(boot: Boots) -> None:
    server = FakeTei()
    async with boot({"tei-0": server}, ONE % "") as gateway:
        await restart_with_other_model(gateway, server, "0")
        await until(lambda: ("0", "probation") in states(gateway))

        assert "mixed" == await fingerprint(gateway)
    assert "differs" == checks(gateway)[-1].outcome


async def restart_with_other_model(gateway: Running, server: FakeTei, name: str) -> None:
    """Fail all requests until the gateway notices, then serve another model."""
    alive = server._answer

    async def dead(*_: Any) -> tuple[int, bytes]:
        raise TeiError(503, "gone", None)

    server._answer = dead  # type: ignore[method-assign]
    await until(lambda: (name, "down") in states(gateway))
    server.space, server._answer = "other ", alive  # type: ignore[method-assign]


async def test_reports_a_model_without_accepted_replicas(boot: Boots) -> None:
    # The first replica to join fails; the other one is of a different space.
    servers = {"tei-0": FakeTei(), "tei-1": other_model()}
    async with boot(servers, TWO % "") as gateway:
        await wait_for_checks(gateway, 2)
        [good] = [check.replica for check in checks(gateway) if check.outcome == "fits"]
        await fail_all_requests(servers[good.removeprefix("http://")])
        await until(lambda: (good[-1], "down") in states(gateway))
        reply = await gateway.post("/v1/embeddings", REQUEST)

        assert (503, "no_replica") == (reply.status_code, reply.json()["error"]["code"])
        assert "a different space" in reply.json()["error"]["message"]
        assert "refused" == (await state_of(gateway))[0]
        assert 200 == (await gateway.client.get("/readyz")).status_code


async def fail_all_requests(server: FakeTei) -> None:
    """Make a server fail every request."""

    async def dead(*_: Any) -> tuple[int, bytes]:
        raise TeiError(503, "gone", None)

    server._answer = dead  # type: ignore[method-assign]


class ReferenceRejectingTei(FakeTei):
    """Server that rejects the reference texts."""

    def _check(self, texts: Any, body: dict[str, Any]) -> None:
        if self.reference_requests and not self.requests:
            raise TeiError(422, "Input validation error: too odd", "Validation")
        super()._check(texts, body)


async def test_replica_that_rejects_reference_texts_joins_unchecked(boot: Boots) -> None:
    async with boot({"tei-0": ReferenceRejectingTei()}, ONE % "") as gateway:
        assert await fingerprint(gateway) is None

    assert ["unchecked"] == [check.outcome for check in checks(gateway)]
    assert [("0", "up")] == states(gateway)


async def test_sends_no_reference_texts_to_replicas_that_do_not_embed(boot: Boots) -> None:
    server = FakeTei(model_type=RERANKER)
    async with boot({"tei-0": server}, ONE % "") as gateway:
        assert [("0", "up")] == states(gateway)

    assert 0 == server.reference_requests
    assert [] == checks(gateway)


class BrokenTei(FakeTei):
    """Server that describes itself and cannot embed."""

    def _check(self, *_: Any) -> None:
        raise TeiError(424, "CUDA error", "Backend")


async def test_replica_that_fails_to_embed_does_not_join(boot: Boots) -> None:
    async with boot({"tei-0": BrokenTei()}, ONE % "") as gateway:
        assert [("0", "down")] == states(gateway)
        assert ("refused", None) == await state_of(gateway)


async def test_records_metrics_and_log_lines(boot: Boots, caplog: pytest.LogCaptureFixture) -> None:
    async with boot({"tei-0": FakeTei(), "tei-1": other_model()}, TWO % "") as gateway:
        await wait_for_checks(gateway, 2)
        [bad] = [check.replica for check in checks(gateway) if check.outcome == "differs"]
        metrics = (await gateway.client.get("/metrics", headers={"host": "localhost"})).text

    labels = f'{{outcome="differs",replica="{bad}",upstream="only"}}'
    assert f"gateway_vector_space_checks_total{labels}" in metrics
    assert f'gateway_vector_space_min_cosine{{replica="{bad}",upstream="only"}}' in metrics


async def test_requests_do_not_wait_for_a_refused_engine() -> None:
    engine = Replica("engine", HeldReplica())
    pool = Pool("up", [engine], "least_tokens", lambda _: None, holds=True)
    clock = asyncio.get_running_loop().time
    lane = Lane(pool, LaneSettings(1000, 30, holds=True), lambda _: None, clock, Bounds)
    upstream_settings = config.UpstreamSettings(backend="torch", model="m")
    space = VectorSpace("up", upstream_settings, None, lambda _: None)
    inputs = ModelInputs(upstream_settings, pool.capabilities)
    upstream = Upstream("up", upstream_settings, pool, {"texts": lane}, space, inputs)
    waiting = asyncio.create_task(lane.wait_for_replica(clock() + 60))
    await asyncio.sleep(0)
    assert ("loading", False) == (upstream.state, upstream.startup_done)
    engine.record_space(None, is_foreign=True)
    pool.transition(engine, ReplicaEvent.FOREIGN, "another model")

    with pytest.raises(NoReplica, match="a different space"):
        async with asyncio.timeout(PATIENCE_S):
            await waiting
    assert ("refused", True) == (upstream.state, upstream.startup_done)
