"""Numbers in descriptions and replies are within bounds on every wire."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from backends.contract import (
    NUMBER_MAX,
    BackendKind,
    Capabilities,
    Embed,
    EmbedReply,
    QueueDepth,
    ReportsQueueDepth,
)
from backends.contract.errors import ReplicaFailed
from backends.http.client import UpstreamClient
from backends.http.offers import check_numbers
from backends.http.replies import check_tokens, read_gauge
from backends.torch.serving.client import TorchBackend
from tests.backends.adapters import SERVERS, adapter
from tests.fakes.openai import FakeOpenAI

BAD = [-100_000, -1, 0, NUMBER_MAX + 1, 10**30]


class ListedLength(FakeOpenAI):
    """Server whose model list contains a length, as SGLang's does."""

    length = 512

    def _models(self, body: dict[str, Any]) -> Any:
        reply = super()._models(body)
        return reply | {"data": [entry | {"max_model_len": self.length} for entry in reply["data"]]}


# Kind and number of a server → how it is set at its fake, and the capability that it becomes.
REPORTED: dict[tuple[BackendKind, str], tuple[Callable[[Any, int], None], str]] = {
    ("tei", "max_input_length"): (
        lambda server, number: server.info.update(max_input_length=number),
        "max_input_tokens",
    ),
    ("tei", "max_client_batch_size"): (
        lambda server, number: server.info.update(max_client_batch_size=number),
        "request_inputs",
    ),
    ("tei", "max_concurrent_requests"): (
        lambda server, number: server.info.update(max_concurrent_requests=number),
        "concurrent_inputs",
    ),
    ("vllm", "max_model_len"): (
        lambda server, number: setattr(server, "max_tokens", number),
        "max_input_tokens",
    ),
    ("infinity", "batch_size"): (
        lambda server, number: setattr(server, "batch_size", number),
        "request_inputs",
    ),
    ("openai", "max_model_len"): (
        lambda server, number: setattr(server, "length", number),
        "max_input_tokens",
    ),
}


def engine_of(body: dict[str, Any]) -> TorchBackend:
    """Return the adapter of an engine that replies the same to every request."""
    content = msgspec.msgpack.encode(body)
    backend = TorchBackend("http+unix://socket/m")
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=content))
    backend._http = UpstreamClient("http://engine", transport=transport)
    return backend


@pytest.mark.parametrize("number", BAD)
@pytest.mark.parametrize("case", REPORTED, ids=" ".join)
async def test_description_out_of_bounds_is_rejected_and_the_last_one_stays(
    case: tuple[BackendKind, str], number: int, small_files: str
) -> None:
    kind, _ = case
    report, name = REPORTED[case]
    if kind == "openai" and number == 0:
        pytest.skip("a server that knows no length lists zero")
    server = ListedLength() if kind == "openai" else SERVERS[kind]()
    backend = adapter(kind, server, small_files)
    well = getattr(await backend.describe(5.0), name)
    report(server, number)
    with pytest.raises(ReplicaFailed, match=f"`{name}`"):
        await backend.describe(5.0)
    report(server, well)
    reply = await backend.run(Embed(("hello there",)), 5.0)
    assert isinstance(reply, EmbedReply)
    assert reply.tokens > 0


@pytest.mark.parametrize("number", BAD)
@pytest.mark.parametrize("field", ["max_input_tokens", "request_inputs", "request_tokens", "dimensions"])
async def test_description_of_an_engine_is_bounded(field: str, number: int) -> None:
    with pytest.raises(ReplicaFailed, match=f"`{field}`"):
        await engine_of({"model_id": "m", "operations": ["embed"], field: min(number, 2**63)}).describe(5.0)


def test_overhead_of_pairs_may_be_zero_and_not_less() -> None:
    check_numbers(Capabilities("m", frozenset(), overhead_tokens=0))
    with pytest.raises(ReplicaFailed, match="`overhead_tokens`"):
        check_numbers(Capabilities("m", frozenset(), overhead_tokens=-1))


@pytest.mark.parametrize("tokens", [-1, 2 * NUMBER_MAX + 1, 10**40])
@pytest.mark.parametrize("most", [None, 512])
def test_token_counts_of_replies_are_bounded(tokens: int, most: int | None) -> None:
    with pytest.raises(ReplicaFailed, match="tokens"):
        check_tokens(tokens, 2, most)


async def test_token_count_of_an_engine_is_bounded() -> None:
    vector = ("<f4", (1, 1), b"\0\0\0\0")
    engine = engine_of({"type": "embedded", "vectors": vector, "tokens": -300, "truncated": []})
    with pytest.raises(ReplicaFailed, match="-300 tokens"):
        await engine.run(Embed(("a",)), 5.0)


@pytest.mark.parametrize("value", [b"-5", b"1e300", b"nan", b"-inf", b"4294967296"])
def test_queue_depth_out_of_bounds_is_none(value: bytes) -> None:
    assert read_gauge(b"te_queue_size " + value + b"\n", "te_queue_size") is None


@pytest.mark.parametrize("waiting", [-7, 10**12])
async def test_queue_depth_of_infinity_out_of_bounds_is_none(waiting: int, small_files: str) -> None:
    models = {"data": [{"id": "m", "capabilities": ["rerank"], "stats": {"queue_absolute": waiting}}]}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=json.dumps(models)))
    backend = adapter("infinity", transport, small_files)
    await backend.describe(5.0)
    assert isinstance(backend, ReportsQueueDepth)
    assert await backend.queue_depth(5.0) is None
    models["data"][0]["stats"] = {"queue_absolute": 7}
    assert QueueDepth(7) == await backend.queue_depth(5.0)
