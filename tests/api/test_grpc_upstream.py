"""A gateway whose replicas are called over gRPC: servers of TEI, and another gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from tests.conftest import CONFIG, KEY, Running, running_gateway
from tests.fakes.hooks import CLASSIFIER, RERANKER, Gate, until
from tests.fakes.tei import FakeTei, assert_vectors, score_of, vector_of
from tests.fakes.tei_grpc import FakeTeiGrpc, grpc_tei
from tests.waiting import PATIENCE_S

BACK = CONFIG.replace(
    "models:\n", "  classes: {backend: tei, replicas: ['http://classes']}\nmodels:\n"
).replace("  cross:", "  labels: {upstream: classes}\n  cross:")


@asynccontextmanager
async def behind_a_gateway() -> AsyncIterator[tuple[Running, Running]]:
    """Yield a gateway, and the one behind it that it calls over gRPC."""
    fakes = {"tei-0": FakeTei(), "tei-1": FakeTei(), "rerank-0": FakeTei(model_type=RERANKER)}
    fakes["classes"] = FakeTei(model_type=CLASSIFIER)
    async with running_gateway(fakes, BACK + "grpc: {listen: 127.0.0.1:0}\n") as back:
        assert back.application.create_grpc is not None
        server = back.application.create_grpc()
        await server.start("127.0.0.1:0")
        common = f"backend: tei, replicas: ['grpc://127.0.0.1:{server.port}'], api_key: {KEY}"
        front_config = f"""
upstreams:
  far: {{{common}, model: org/bge}}
  far-ranker: {{{common}, model: cross}}
  far-labels: {{{common}, model: labels}}
models: {{bge: {{upstream: far}}, cross: {{upstream: far-ranker}}, labels: {{upstream: far-labels}}}}
"""
        try:
            async with running_gateway({}, front_config, sockets=True) as front:
                yield front, back
        finally:
            await server.stop()


async def test_a_gateway_is_a_replica_of_another() -> None:
    async with behind_a_gateway() as (front, _):
        embedded = await front.post("/v1/embeddings", {"model": "bge", "input": ["a", "b c", "d"]})
        ranked = await front.post("/models/cross/rerank", {"query": "q", "texts": ["a", "b"]})
        labelled = await front.post("/models/labels/predict", {"inputs": "a"})
        tokens = await front.post("/models/bge/tokenize", {"inputs": "red blue"})
        refused = await front.post("/models/bge/embed", {"inputs": "w " * 20, "truncate": False})

    assert_vectors(embedded, "a", "b c", "d")
    assert 3 + 4 + 3 == embedded.json()["usage"]["total_tokens"]
    scores = {rank["index"]: rank["score"] for rank in ranked.json()}
    np.testing.assert_allclose([score_of("q", "a"), score_of("q", "b")], [scores[0], scores[1]], rtol=1e-6)
    assert {"joy", "anger", "fear"} == {entry["label"] for entry in labelled.json()}
    assert ["[CLS]", "red", "blue", "[SEP]"] == [token["text"] for token in tokens.json()[0]]
    assert (422, "Validation") == (refused.status_code, refused.json()["error_type"])


async def test_calls_of_a_server_that_dies_are_done_by_another() -> None:
    dying, living = (FakeTeiGrpc(FakeTei(max_client_batch_size=32)) for _ in range(2))
    gate = Gate()
    async with grpc_tei(living) as address:
        stack = grpc_tei(dying)
        replicas = f"['{await stack.__aenter__()}', '{address}']"
        config = (
            f"upstreams: {{up: {{backend: tei, replicas: {replicas}}}}}\nmodels: {{bge: {{upstream: up}}}}\n"
        )
        async with running_gateway({}, config, sockets=True) as gateway:
            async with asyncio.timeout(PATIENCE_S):
                while not (dying.model.reference_requests and living.model.reference_requests):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            dying.model.hook = gate  # type: ignore[assignment]
            calls = [
                asyncio.create_task(gateway.post("/v1/embeddings", {"model": "bge", "input": f"t{number}"}))
                for number in range(40)
            ]
            await until(lambda: gate.waiting > 0)
            await stack.__aexit__(None, None, None)
            replies = await asyncio.gather(*calls)

    assert [200] * 40 == [reply.status_code for reply in replies]
    vectors = [reply.json()["data"][0]["embedding"] for reply in replies]
    np.testing.assert_array_equal([vector_of(f"t{i}") for i in range(40)], np.array(vectors, np.float32))
