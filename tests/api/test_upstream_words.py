"""Operators read where a call was sent and what the upstream said; callers do not."""

from typing import Any

from gateway.events import CallFinished
from gateway.telemetry.access_log import call_line
from tests.conftest import Boots, Running
from tests.fakes.tei import FakeTei, is_canaries

TWO = """
upstreams: {u: {backend: tei, replicas: ["http://tei-0", "http://tei-1"], policy: round_robin}}
models: {m: {upstream: u}}
"""
SECRET = "the private text of a tenant that no log may contain"
CUDA = "CUDA error: an illegal memory access was encountered"


def failing(status: int, words: str) -> FakeTei:
    """Return a server that answers every call with an error."""
    server = FakeTei()

    async def fail(path: str, body: dict[str, Any]) -> tuple[int, bytes] | None:
        is_call = path != "/info" and not is_canaries(body.get("inputs", body.get("input")))
        return (status, b'{"error":"%b","error_type":"Backend"}' % words.encode()) if is_call else None

    server.hook = fail
    return server


def last_call(gateway: Running) -> CallFinished:
    """Return the event of the latest call."""
    return [event for event in gateway.events if isinstance(event, CallFinished)][-1]


async def test_failed_call_has_its_replicas_and_the_words_of_the_upstream(boot: Boots) -> None:
    servers = {f"tei-{i}": failing(500, f"{CUDA} at '{SECRET}'") for i in range(2)}
    async with boot(servers, TWO) as gateway:
        reply = await gateway.post("/embed", {"inputs": SECRET})
        event = last_call(gateway)
        recent = (await gateway.client.get("/admin/calls")).text

    assert 424 == reply.status_code
    assert CUDA not in reply.text
    assert {"http://tei-0", "http://tei-1"} == set(event.replicas)
    assert event.attempts >= 2
    assert "500" == event.upstream_status
    assert f"{CUDA} at '[input]'" == event.upstream_words
    assert f'upstream_status=500  upstream_words="{CUDA} at' in call_line(event)
    assert SECRET not in recent
    assert '"upstream_status":"500"' in recent
    assert CUDA in recent


async def test_call_that_another_replica_answered_has_both(boot: Boots) -> None:
    async with boot({"tei-0": failing(500, CUDA), "tei-1": FakeTei()}, TWO) as gateway:
        events = []
        for number in range(4):
            assert 200 == (await gateway.post("/embed", {"inputs": f"text {number}"})).status_code
            events.append(last_call(gateway))

    moved = [event for event in events if event.attempts > 1]
    assert moved
    assert {("http://tei-0", "http://tei-1")} == {event.replicas for event in moved}
    assert {CUDA} == {event.upstream_words for event in moved}
    assert all(event.upstream_words is None for event in events if event.attempts == 1)


async def test_duration_of_attempts_is_known_by_replica(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei(), "tei-1": FakeTei()}, TWO) as gateway:
        for _ in range(2):
            await gateway.post("/embed", {"inputs": "a"})
        metrics = (await gateway.client.get("/metrics")).text

    for number in range(2):
        labels = f'replica="http://tei-{number}",upstream="u"'
        assert f"gateway_attempt_duration_seconds_count{{{labels}}} 1.0" in metrics
