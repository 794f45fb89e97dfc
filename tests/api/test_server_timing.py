"""The stages of `server-timing` add up to the duration of a call, on a fake clock."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.events import CallFinished
from tests.conftest import Boots, Running
from tests.fakes.hooks import RERANKER
from tests.fakes.tei import FakeTei

OPENAI = "/v1/embeddings"
STAGES = {"parse", "auth", "quota", "queue", "upstream", "encode"}
# Path, body, and the number of requests that replicas receive for the call.
CALLS: Sequence[tuple[str, dict[str, Any], int]] = [
    (OPENAI, {"input": "one two"}, 1),
    (OPENAI, {"input": ["one", "two", "three"], "encoding_format": "base64"}, 1),
    (OPENAI, {"input": [f"text {number}" for number in range(11)]}, 3),
    ("/embed", {"inputs": "one two"}, 1),
    ("/models/org/bge/embed", {"inputs": ["one", "two"]}, 1),
    ("/rerank", {"query": "one", "texts": ["two"]}, 1),
    ("/models/bge/rerank", {"query": "one", "texts": ["two"]}, 1),
    ("/similarity", {"inputs": {"source_sentence": "one", "sentences": ["two"]}}, 1),
    ("/tokenize", {"inputs": "one two"}, 1),
]


class Clock:
    """Replacement of `time.perf_counter`, the clock of every duration of a call."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class SlowHook:
    """Hook that makes each request take two seconds. failures: number of requests answered with 500."""

    def __init__(self, clock: Clock, failures: int = 0) -> None:
        self.requests = 0
        self._clock = clock
        self._failures = failures

    async def __call__(self, path: str, sent: dict[str, Any]) -> tuple[int, bytes] | None:
        """Advance the clock by two seconds."""
        del path, sent
        self.requests += 1
        self._clock.now_s += 2
        self._failures -= 1
        return (500, b"") if self._failures >= 0 else None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(time, "perf_counter", fake)
    return fake


def stages_ms(header: str) -> dict[str, float]:
    pairs = (entry.split(";dur=") for entry in header.split(", "))
    return {stage: float(milliseconds) for stage, milliseconds in pairs}


async def time_call(gateway: Running, path: str, body: dict[str, Any]) -> tuple[dict[str, float], float]:
    """Return the stages of one call and its whole duration, in ms."""
    reply = await gateway.post(path, body)
    assert 200 == reply.status_code
    calls = [event for event in gateway.events if isinstance(event, CallFinished)]
    (finished,) = (call for call in calls if call.method == "POST")
    return stages_ms(reply.headers["server-timing"]), finished.duration_s * 1000


@pytest.mark.parametrize(("path", "body", "requests"), CALLS)
async def test_the_stages_add_up_to_the_whole_duration(
    boot: Boots, clock: Clock, path: str, body: dict[str, Any], requests: int
) -> None:
    embedder, reranker = FakeTei(), FakeTei(model_type=RERANKER)
    async with boot({"tei-0": embedder, "rerank-0": reranker}) as gateway:
        embedder.hook = reranker.hook = slow = SlowHook(clock)
        stages, duration_ms = await time_call(gateway, path, body)

    assert STAGES == stages.keys()
    assert requests == slow.requests
    assert 2000 * requests == duration_ms
    assert pytest.approx(duration_ms, abs=0.05) == sum(stages.values())


async def test_the_stages_include_a_failed_attempt(boot: Boots, clock: Clock) -> None:
    embedder, other = FakeTei(), FakeTei()
    async with boot({"tei-0": embedder, "tei-1": other}) as gateway:
        embedder.hook = other.hook = slow = SlowHook(clock, failures=1)
        stages, duration_ms = await time_call(gateway, OPENAI, {"input": "one"})

    # The attempt that failed, the plain text that its replica computed, and the one that succeeded.
    assert 3 == slow.requests
    assert (6000, 6000) == (duration_ms, pytest.approx(sum(stages.values()), abs=0.05))
