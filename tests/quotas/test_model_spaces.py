"""Vector spaces of models shared in Redis: gateways never serve two of them under one name."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from backends.contract import Capabilities, Operation
from gateway.store.redis_client import RedisClient
from gateway.upstreams.group import UpstreamGroup
from gateway.upstreams.groups import Groups
from gateway.vector_spaces.fingerprint import Fingerprint, fingerprint_of
from gateway.vector_spaces.model_space import ModelSpace
from gateway.vector_spaces.store import MODEL_SPACES, ModelSpaceStore
from tests.conftest import Boots, Running
from tests.fakes.hooks import until
from tests.fakes.tei import FakeTei, vector_of
from tests.quotas.redis_server import RedisServer

CAPABILITIES = Capabilities("org/model", frozenset({Operation.EMBED}), dtype="float32")
CONFIG = """
quotas: {{store: "{store}"}}
upstreams:
  a: {{backend: tei, replicas: ["http://a"]}}
  b: {{backend: tei, replicas: ["http://b"]}}
models: {{m: {{upstreams: [{{name: a}}, {{name: b}}]}}}}
tenants: {{acme: {{keys: ["sha256:{digest}"]}}}}
"""


def fingerprint(space: str = "") -> Fingerprint:
    vectors = np.stack([vector_of(f"{space}{number}") for number in range(6)])
    return fingerprint_of(vectors, "tei", CAPABILITIES)


class Gateway:
    """The space of the model `m` in one gateway."""

    def __init__(self, server: RedisServer, *upstreams: str) -> None:
        self.client = RedisClient(server.url, 1.0)
        self.space = ModelSpace("m", upstreams, ModelSpaceStore(self.client))

    async def learn(self, known: dict[str, Fingerprint], *, is_complete: bool = False) -> str | None:
        """Learn fingerprints, agree with the others, and return the id of the space."""
        self.space.propose(known, is_complete=is_complete)
        await self.space.share()
        return self.space.id


Gateways = Callable[..., Gateway]


@pytest.fixture
async def gateway_of(own_redis: RedisServer) -> AsyncIterator[Gateways]:
    """Return the function that opens a gateway with these upstreams."""
    opened: list[Gateway] = []

    def open_gateway(*upstreams: str) -> Gateway:
        opened.append(Gateway(own_redis, *upstreams))
        return opened[-1]

    yield open_gateway
    for gateway in opened:
        await gateway.client.aclose()


async def test_the_first_claim_counts_for_all_gateways(gateway_of: Gateways) -> None:
    first, second = gateway_of("a", "b"), gateway_of("a", "b")
    ours, others = fingerprint(), fingerprint("other")

    assert first.space.reference is None
    assert ours.id == await first.learn({"a": ours})
    assert ours.id == await second.learn({"b": others})
    assert second.space.includes(ours)
    assert not second.space.includes(others)
    assert "cosine" in second.space.mismatch_reason(others)


async def test_a_space_that_is_proposed_during_an_exchange_is_shared_by_the_next(
    gateway_of: Gateways,
) -> None:
    gateway = gateway_of("a", "b")
    exchange = asyncio.create_task(gateway.space.share())
    await asyncio.sleep(0)
    gateway.space.propose({"a": fingerprint()}, is_complete=False)
    await exchange
    assert gateway.space.wanted is not None

    assert fingerprint().id == await gateway.learn({})


async def test_nothing_is_served_before_the_gateways_agree(gateway_of: Gateways) -> None:
    gateway = gateway_of("a", "b")
    gateway.space.propose({"a": fingerprint()}, is_complete=False)

    assert gateway.space.reference is None
    assert not gateway.space.includes(fingerprint())


async def test_a_space_that_no_upstream_is_of_any_more_is_replaced(gateway_of: Gateways) -> None:
    gateway, other = gateway_of("a", "b"), gateway_of("a", "b")
    before, after = fingerprint(), fingerprint("accepted")
    await gateway.learn({"a": before, "b": before}, is_complete=True)
    await other.learn({"a": before})

    assert before.id == await gateway.learn({"a": after, "b": before}, is_complete=True)
    assert before.id == await gateway.learn({"a": after}, is_complete=False)
    assert after.id == await gateway.learn({"a": after, "b": after}, is_complete=True)
    assert after.id == await other.learn({})


async def test_a_model_with_other_upstreams_has_a_space_of_its_own(gateway_of: Gateways) -> None:
    ours, others = fingerprint(), fingerprint("other")
    await gateway_of("a", "b").learn({"a": ours})

    assert ours.id == await gateway_of("b", "c").learn({"c": others})
    # `c` has been a neighbour of `b`, which was one of `a`: the space stays.
    assert ours.id == await gateway_of("c", "d").learn({"d": others})
    assert others.id == await gateway_of("x", "y").learn({"y": others})


async def test_without_redis_a_gateway_counts_on_its_own_space_and_offers_it_later(
    gateway_of: Gateways, own_redis: RedisServer
) -> None:
    gateway = gateway_of("a", "b")
    own_redis.stop()
    assert fingerprint().id == await gateway.learn({"a": fingerprint()})
    assert gateway.space.wanted is not None


async def test_unreadable_spaces_change_nothing(gateway_of: Gateways) -> None:
    gateway = gateway_of("a", "b")
    await gateway.client.execute("HSET", MODEL_SPACES, "m", b"\x93")

    assert fingerprint().id == await gateway.learn({"a": fingerprint()})


async def test_two_gateways_that_reach_different_upstreams_serve_one_space(
    boot: Boots, own_redis: RedisServer
) -> None:
    """Without an agreement each of them would serve the upstream that it reaches."""
    from gateway.tenants.keyring import key_digest
    from tests.conftest import KEY

    config = CONFIG.format(store=own_redis.url, digest=key_digest(KEY).removeprefix("sha256:"))
    other = FakeTei()
    other.space = "other"

    async def status(gateway: Running) -> int:
        reply = await gateway.post("/v1/embeddings", {"model": "m", "input": "x"})
        return reply.status_code

    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(boot({"a": FakeTei()}, config))
        space = first.application.gateway.serving.groups["m"].space
        await until(lambda: space.reference is not None)
        second = await stack.enter_async_context(boot({"b": other}, config, wait=False))
        group = second.application.gateway.serving.groups["m"]
        await until(lambda: group.judge.judgements["b"].standing == "refused")
        served = [await status(first), await status(second)]

    assert [200, 503] == served
    assert not other.requests


async def test_groups_are_settled_once_the_space_is_agreed_on(gateway_of: Gateways) -> None:
    space = gateway_of("a", "b").space
    groups = Groups(lambda _: None, None)
    groups.groups = {"m": cast("UpstreamGroup", SimpleNamespace(space=space))}
    before = groups.is_settled
    space.propose({"a": fingerprint()}, is_complete=False)
    meanwhile = groups.is_settled
    await space.share()

    assert (True, False, True) == (before, meanwhile, groups.is_settled)
