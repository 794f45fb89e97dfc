"""TEI servers with --default-prompt, which counts in the length of an input and which /info does not report.

Source: text-embeddings-inference 1.9.3, run with such a prompt.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.conftest import Boots, Running
from tests.fakes.hostile_replica import HostileReplica
from tests.fakes.tei import FakeTei
from tests.fakes.tei_grpc import FakeTeiGrpc, grpc_tei

CONFIG = """
upstreams: {u: {backend: tei, replicas: ["%s"]}}
models: {m: {upstream: u}}
"""
# 16 words in front of 6 are too many for 16 tokens, and 6 words have 11 bytes.
PROMPT = "p " * 16
LONG = "a b c d e f"


@asynccontextmanager
async def gateway_over(boot: Boots, server: FakeTei, wire: str) -> AsyncIterator[Running]:
    """Boot a gateway in front of a server on a real socket."""
    if wire == "http":
        async with (
            HostileReplica(server) as replica,
            boot({}, CONFIG % replica.address, sockets=True) as gateway,
        ):
            yield gateway
    else:
        async with (
            grpc_tei(FakeTeiGrpc(server)) as address,
            boot({}, CONFIG % address, sockets=True) as gateway,
        ):
            yield gateway


@pytest.mark.parametrize("wire", ["http", "grpc"])
@pytest.mark.parametrize("auto_truncate", [True, False])
async def test_tokens_of_the_default_prompt_count_for_truncation(
    boot: Boots, wire: str, *, auto_truncate: bool
) -> None:
    server = FakeTei(auto_truncate=auto_truncate)
    server.default_prompt = PROMPT
    async with gateway_over(boot, server, wire) as gateway:
        refused = await gateway.post("/embed", {"inputs": LONG, "truncate": False})
        cut = await gateway.post("/embed", {"inputs": LONG, "truncate": True})

    assert (422, "Validation") == (refused.status_code, refused.json()["error_type"])
    assert (200, "unknown") == (cut.status_code, cut.headers["x-truncated-inputs"])


@pytest.mark.parametrize("wire", ["http", "grpc"])
async def test_server_without_a_prompt_is_certain_of_short_texts(boot: Boots, wire: str) -> None:
    async with gateway_over(boot, FakeTei(), wire) as gateway:
        await gateway.post("/embed", {"inputs": "a"})
        reply = await gateway.post("/embed", {"inputs": LONG, "truncate": False})

    assert 200 == reply.status_code
    assert "x-truncated-inputs" not in reply.headers


async def test_server_that_restarts_with_a_prompt_is_found_out_by_its_counts(boot: Boots) -> None:
    server = FakeTei(auto_truncate=True, max_input_length=48)
    async with gateway_over(boot, server, "http") as gateway:
        assert 200 == (await gateway.post("/embed", {"inputs": "a", "truncate": False})).status_code
        server.default_prompt = "p " * 40
        await gateway.post("/embed", {"inputs": "b", "truncate": False})
        refused = await gateway.post("/embed", {"inputs": "a b c d e f g h", "truncate": False})

    assert 422 == refused.status_code
