"""Operators drain replicas, put them back, and compare their vectors."""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from gateway.api.operators.replicas import REPLICAS_MAX
from gateway.config.diff import ReloadOutcome
from gateway.config.problems import Problem
from gateway.declared.additions import Drain, Edit
from gateway.events import ReplicaChanged
from tests.api.test_added_models import FakeParent
from tests.conftest import Boots, Running, posted
from tests.fakes.hooks import Gate, tei_with_hook, until
from tests.fakes.tei import FakeTei

A, B = "http://a", "http://b"
PAIR = """
upstreams: {{two: {{backend: tei, replicas: ["http://a", "http://b"], drained: [{drained}]{more}}}}}
models: {{bge: {{upstream: two}}}}
"""
BOTH, ONLY_B = PAIR.format(drained="", more=""), PAIR.format(drained='"http://a"', more="")
NONE = PAIR.format(drained='"http://a", "http://b"', more="")


class HeldTei(FakeTei):
    """Fake TEI that holds requests, those with reference texts too, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate: Gate | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request when the gate is open."""
        if self.gate is not None:
            await self.gate()
        await super().__call__(scope, receive, send)


class OtherTei(FakeTei):
    """Fake TEI with a different model."""

    def _vector(self, text: str, body: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
        vector: np.ndarray[Any, np.dtype[np.float32]] = super()._vector(text, body)[::-1].copy()
        return vector


async def embed(gateway: Running, times: int = 1) -> list[int]:
    # Equal texts in flight would share one batch.
    replies = [await gateway.post("/v1/embeddings", {"input": f"text {times} {n}"}) for n in range(times)]
    return [reply.status_code for reply in replies]


async def states(gateway: Running) -> dict[str, tuple[str, bool]]:
    reply = await gateway.client.get("/admin/status")
    return {
        replica["name"]: (replica["state"], replica["is_drained"]) for replica in reply.json()["replicas"]
    }


async def send(gateway: Running, action: str, **body: Any) -> httpx.Response:
    return await gateway.client.post(f"/admin/replicas/{action}", json=body)


async def test_a_drained_replica_gets_no_work_until_it_is_put_back(boot: Boots) -> None:
    servers = {"a": FakeTei(), "b": FakeTei()}
    async with boot(servers, BOTH) as gateway:
        gateway.follow(ONLY_B)
        before = len(servers["a"].requests)
        assert [200] * 8 == await embed(gateway, 8)
        assert before == len(servers["a"].requests)
        assert {A: ("drained", True), B: ("up", False)} == await states(gateway)
        gateway.follow(BOTH)
        await embed(gateway, 8)
        assert len(servers["a"].requests) > before
        assert {A: ("up", False), B: ("up", False)} == await states(gateway)
    changes = [event for event in gateway.events if isinstance(event, ReplicaChanged) and event.replica == A]

    assert ["up", "drained", "up"] == [event.state for event in changes]
    assert [
        "it is drained, by `drained` in the configuration or by an operator",
        "it is no longer drained",
    ] == [change.reason for change in changes[1:]]


async def test_batches_in_flight_finish_on_a_drained_replica(boot: Boots) -> None:
    gate = Gate()
    servers = {"a": tei_with_hook(gate), "b": FakeTei()}
    async with boot(servers, PAIR.format(drained='"http://b"', more=", hedge_share: 0")) as gateway:
        running = asyncio.create_task(embed(gateway))
        await until(lambda: gate.waiting == 1)
        gateway.follow(PAIR.format(drained='"http://a"', more=", hedge_share: 0"))
        assert [200, 200] == await embed(gateway, 2)
        held = (await gateway.client.get("/admin/status")).json()["replicas"][0]
        gate.opened.set()
        assert [200] == await running

    assert (A, "drained", 1) == (held["name"], held["state"], held["in_flight_batches"])


async def test_calls_fail_with_the_reason_if_every_replica_is_drained(boot: Boots) -> None:
    reply = await posted(boot({"a": FakeTei(), "b": FakeTei()}, NONE), "/v1/embeddings", {"input": "text"})

    assert 503 == reply.status_code
    assert "are drained" in reply.json()["error"]["message"]


async def test_a_drained_replica_joins_without_work_and_shows_that_it_is_down(boot: Boots) -> None:
    async with boot({"b": FakeTei()}, ONLY_B) as gateway:
        assert [200] == await embed(gateway)
        found = await states(gateway)

    assert {A: ("down", True), B: ("up", False)} == found


async def test_edits_go_to_the_parent(boot: Boots) -> None:
    parent = FakeParent(ReloadOutcome())
    async with boot({"a": FakeTei(), "b": FakeTei()}, BOTH, adding=parent.adding) as gateway:
        drained = await send(gateway, "drain", upstream="two", replica=A)
        # A replica that the upstream no longer lists may be put back too.
        undrained = await send(gateway, "undrain", upstream="two", replica="http://gone")
    expected: list[Edit] = [Drain("two", A, is_drained=True), Drain("two", "http://gone", is_drained=False)]

    assert [200, 200] == [drained.status_code, undrained.status_code]
    assert {"changes": [], "needs_restart": []} == drained.json()
    assert expected == parent.edits
    assert ["first", "first"] == parent.actors


@pytest.mark.parametrize(
    ("more", "body", "status", "message"),
    [
        ("", {"upstream": "nowhere", "replica": A}, 404, "no upstream 'nowhere'"),
        ("", {"upstream": "two", "replica": "http://c"}, 404, "no replica 'http://c'"),
        ("", {"upstream": "two", "replica": ""}, 422, "replica"),
        ("", {"upstream": "two", "replica": "x" * 2049}, 422, "replica"),
        ("", {"upstream": "two"}, 422, "replica"),
        ("", {"upstream": "two", "replica": A, "force": True}, 422, "force"),
        ("", {"upstream": "two", "replica": B}, 422, "the last replica that serves bge"),
        (", discover: dns", {"upstream": "two", "replica": f"{A}#0"}, 422, "out of the name"),
    ],
)
async def test_refuses_what_cannot_be_drained(
    boot: Boots, more: str, body: dict[str, str], status: int, message: str
) -> None:
    parent = FakeParent(ReloadOutcome())
    config = PAIR.format(drained="", more=more)
    # The server of the other replica does not answer.
    async with boot({"b": FakeTei()}, config, adding=parent.adding) as gateway:
        reply = await send(gateway, "drain", **body)

    assert status == reply.status_code, reply.text
    assert message in reply.text
    assert [] == parent.edits


@pytest.mark.parametrize(
    ("models", "servers", "status"),
    [
        ("m: {upstreams: [{name: one}, {name: two}]}", ("a", "b"), 200),
        ("m: {upstreams: [{name: two}, {name: one, priority: 1}]}", ("a", "b"), 200),
        ("m: {upstream: one, canary: {name: two, share: 0.5}}", ("a", "b"), 200),
        ("m: {upstream: one, mirror: {name: two, share: 0.5}}", ("a", "b"), 200),
        ("m: {upstreams: [{name: one}, {name: two}]}", ("b",), 422),
        # A canary takes its share only.
        ("m: {upstream: two, canary: {name: one, share: 0.5}}", ("a", "b"), 422),
        ("{n: {upstreams: [{name: one}, {name: two}]}, m: {upstream: two}}", ("a", "b"), 422),
    ],
)
async def test_the_last_replica_is_drained_if_other_upstreams_serve_its_models(
    boot: Boots, models: str, servers: tuple[str, ...], status: int
) -> None:
    parent = FakeParent(ReloadOutcome())
    config = f"""
upstreams: {{one: {{backend: tei, replicas: ["{A}"]}}, two: {{backend: tei, replicas: ["{B}"]}}}}
models: {models if models.startswith("{") else f"{{{models}}}"}
"""
    async with boot({name: FakeTei() for name in servers}, config, adding=parent.adding) as gateway:
        await embed(gateway)
        reply = await send(gateway, "drain", upstream="two", replica=B)

    assert status == reply.status_code, reply.text
    assert (status == 200) == bool(parent.edits)
    assert status == 200 or "that serves m: " in reply.text


async def test_reports_why_the_parent_refuses(boot: Boots) -> None:
    problem = Problem("upstreams.two", "http://a was not drained here")
    parent = FakeParent(ReloadOutcome(problems=(problem,), kind="unknown"))
    async with boot({"a": FakeTei(), "b": FakeTei()}, BOTH, adding=parent.adding) as gateway:
        reply = await send(gateway, "undrain", upstream="two", replica=A)

    assert 404 == reply.status_code
    assert "was not drained here" in reply.json()["error"]


async def test_needs_a_key_with_the_scope_admin(boot: Boots) -> None:
    config = BOTH + "admin: {keys: []}\ntrusted_proxies: []\n"
    async with boot({"a": FakeTei(), "b": FakeTei()}, config) as gateway:
        headers = {"authorization": "", "x-forwarded-for": "203.0.113.9"}
        replies = [
            await gateway.client.post(f"/admin/replicas/{action}", json={}, headers=headers)
            for action in ("drain", "undrain", "verify")
        ]

    assert [401] * 3 == [reply.status_code for reply in replies]


async def test_compares_equal_replicas(boot: Boots) -> None:
    # A drained replica is compared too: it is checked before it is put back.
    async with boot({"a": FakeTei(), "b": FakeTei()}, ONLY_B) as gateway:
        await embed(gateway)
        reply = await send(gateway, "verify", upstreams=["two", "two"])
    report = reply.json()

    assert 200 == reply.status_code, reply.text
    assert (True, [], ["all that should agree does"]) == (
        report["agrees"],
        report["unread"],
        report["findings"],
    )
    assert [f"two {A}", f"two {B}"] == [member["name"] for member in report["members"]]
    assert [True, True] == [member["stored"]["fits"] for member in report["members"]]
    ((pair),) = report["pairs"]
    assert pair["cosine"] == pytest.approx(1.0)


async def test_finds_the_replica_with_other_vectors_and_the_one_that_is_away(boot: Boots) -> None:
    config = BOTH.replace('"http://b"', '"http://b", "http://away"')
    async with boot({"a": FakeTei(), "b": OtherTei()}, config) as gateway:
        await embed(gateway)
        report = (await send(gateway, "verify", upstreams=["two"])).json()

    assert not report["agrees"]
    assert not report["pairs"][0]["fits"]
    assert any(f"two {A} and two {B} differ" in finding for finding in report["findings"])
    (unread,) = report["unread"]
    assert unread.startswith("two http://away: ")


async def test_compares_the_upstreams_behind_one_model(boot: Boots) -> None:
    other = OtherTei()
    other.info["model_id"] = "another/one"
    config = """
upstreams:
  a: {backend: tei, replicas: ["http://a"]}
  b: {backend: tei, replicas: ["http://b"]}
models: {m: {upstreams: [{name: a}, {name: b}]}}
"""
    async with boot({"a": FakeTei(), "b": other}, config) as gateway:
        await embed(gateway)
        report = (await send(gateway, "verify", upstreams=["a", "b"])).json()

    assert not report["agrees"]
    ((pair),) = report["pairs"]
    assert (0.999, False) == (pair["needed"], pair["fits"])
    assert any(f"a {A} and b {B} differ: " in finding for finding in report["findings"])


@pytest.mark.parametrize("upstreams", [[], ["nowhere"], ["two"] * 65, "two"])
async def test_refuses_to_compare_what_is_not_there(boot: Boots, upstreams: Any) -> None:
    async with boot({"a": FakeTei(), "b": FakeTei()}, BOTH) as gateway:
        reply = await send(gateway, "verify", upstreams=upstreams)

    assert (404 if upstreams == ["nowhere"] else 422) == reply.status_code


async def test_compares_a_bounded_number_of_replicas(boot: Boots) -> None:
    replicas = ", ".join(f'"http://r{number}"' for number in range(REPLICAS_MAX + 1))
    config = BOTH.replace('"http://a", "http://b"', replicas)
    async with boot({"r0": FakeTei()}, config) as gateway:
        reply = await send(gateway, "verify", upstreams=["two"])

    assert 422 == reply.status_code
    assert f"at most {REPLICAS_MAX} are compared" in reply.json()["error"]


async def test_runs_one_comparison_at_a_time(boot: Boots) -> None:
    gate, held = Gate(), HeldTei()
    async with boot({"a": held, "b": FakeTei()}, BOTH) as gateway:
        await embed(gateway)
        held.gate = gate
        running = asyncio.create_task(send(gateway, "verify", upstreams=["two"]))
        await until(lambda: gate.waiting == 1)
        second = await send(gateway, "verify", upstreams=["two"])
        gate.opened.set()
        first = await running
        third = await send(gateway, "verify", upstreams=["two"])

    assert [200, 429, 200] == [first.status_code, second.status_code, third.status_code]
