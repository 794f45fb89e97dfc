"""Token counts that cannot be are not believed, and a count of another batch shows a reply of another batch.

The servers are on real ports; the tokenizer is that of a small checkpoint.
"""

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Boots, Running
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import RERANKER
from tests.fakes.tei import Computed, FakeTei, assert_vectors
from tests.fakes.threaded import serve_in_thread

TEXTS = ["one", "two three", "four five six"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    return str(write_small_files(folder))


class CountingTei(FakeTei):
    """Server that counts as the checkpoint's tokenizer does, and can count wrongly.

    off_by: added to each count. echo_once: the next reply repeats the one before, as a desynchronized
    connection does.
    """

    def __init__(self, **info: Any) -> None:
        super().__init__(**info)
        self.off_by = 0
        self.echo_once = False
        self.last: bytes = b""

    def _computed(self, reply: Any, texts: Any) -> Computed:
        # As the small checkpoint's tokenizer: a token per word, and two special tokens.
        counted = sum(len(text.split()) + 2 for text in texts)
        return Computed(reply, sum(map(len, texts)), counted + self.off_by * len(texts))

    def _reply(self, path: str, parsed: dict[str, Any], extra: dict[str, str]) -> bytes:
        body = super()._reply(path, parsed, extra)
        if self.echo_once and self.last:
            self.echo_once = False
            return self.last
        self.last = body
        return body


@asynccontextmanager
async def served(boot: Boots, *servers: FakeTei, settings: str = "") -> AsyncIterator[Running]:
    """Serve on ports and yield a gateway in front."""
    with ExitStack() as stack:
        urls = [stack.enter_context(serve_in_thread(server)) for server in servers]
        config = f"upstreams: {{only: {{backend: tei, policy: round_robin, replicas: {urls}{settings}}}}}\n"
        config += "models: {m: {upstream: only}}\n"
        async with boot({}, config, sockets=True) as gateway:
            yield gateway


async def embed(gateway: Running, *texts: str) -> httpx.Response:
    return await gateway.post("/v1/embeddings", {"input": list(texts), "model": "m"})


# As the tokenizer of the small checkpoint counts: a token per word, and two special tokens.
OWN_COUNT = sum(len(text.split()) + 2 for text in TEXTS)


@pytest.mark.parametrize("sent", [None, "0", "1", "1, 1", "-5", "x"])
@pytest.mark.parametrize("path", ["/embed", "/rerank"])
async def test_missing_and_impossible_headers_are_not_believed(
    boot: Boots, checkpoint: str, sent: str | None, path: str
) -> None:
    server = FakeTei(**({"model_type": RERANKER} if path == "/rerank" else {}))
    server.headers_sent = {"x-compute-tokens": sent}
    body = {"query": "q", "texts": TEXTS} if path == "/rerank" else {"inputs": TEXTS, "normalize": False}
    async with served(boot, server, settings=f", tokenizer: {checkpoint}") as gateway:
        reply = await gateway.post(path, body | {"model": "m"})

    assert 200 == reply.status_code, reply.text
    counted = int(reply.headers["x-compute-tokens"])
    if path == "/embed":
        assert OWN_COUNT == counted
    assert counted > len(TEXTS)


async def test_without_a_tokenizer_the_upper_bound_counts(boot: Boots) -> None:
    server = FakeTei()
    server.headers_sent = {"x-compute-tokens": None}
    async with served(boot, server) as gateway:
        reply = await gateway.post("/embed", {"inputs": TEXTS, "normalize": False, "model": "m"})

    assert int(reply.headers["x-compute-tokens"]) >= sum(len(text.split()) + 2 for text in TEXTS)


async def test_reply_of_another_batch_is_refused_and_retried_elsewhere(boot: Boots, checkpoint: str) -> None:
    servers = [CountingTei(), CountingTei()]
    async with served(boot, *servers, settings=f", tokenizer: {checkpoint}, in_flight_batches: 4") as gateway:
        for _ in range(4):
            assert_vectors(await embed(gateway, "one"), "one")
        servers[0].echo_once = True
        replies = [await embed(gateway, text) for text in ("two three", "four five six")]

    assert not servers[0].echo_once
    assert_vectors(replies[0], "two three")
    assert_vectors(replies[1], "four five six")


async def test_reply_of_another_batch_reaches_no_caller_of_a_single_server(
    boot: Boots, checkpoint: str
) -> None:
    server = CountingTei()
    async with served(boot, server, settings=f", tokenizer: {checkpoint}") as gateway:
        assert_vectors(await embed(gateway, "one"), "one")
        server.echo_once = True
        # It is asked again: it works for a plain text.
        assert_vectors(await embed(gateway, "two three"), "two three")

    assert not server.echo_once


async def test_server_that_counts_differently_is_not_believed_and_named_once(
    boot: Boots, checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = CountingTei()
    server.off_by = 3
    async with served(boot, server, settings=f", tokenizer: {checkpoint}") as gateway:
        replies = [await embed(gateway, *TEXTS) for _ in range(3)]

    for reply in replies:
        assert_vectors(reply, *TEXTS)
        assert OWN_COUNT == reply.json()["usage"]["total_tokens"]
    assert 1 == caplog.text.count("counts tokens differently")
