"""The cache of vectors: what is found, who finds it, what it costs, and what is not kept."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from backends.contract.errors import ReplicaUnavailable
from gateway.config.boot import cache_share
from gateway.config.load import parse_config
from gateway.config.problems import ConfigError
from gateway.config.schema import CacheSettings, Config
from gateway.routing.health import ReplicaEvent
from tests.conftest import Boots, Running
from tests.fakes.engines import FakeEngine, tokens_of
from tests.fakes.tei import FakeTei

TENANTS = ("acme", "zeta")
CONFIG = """
upstreams: {only: {backend: torch, model: org/model}}
models: {m: {upstream: only, cache: CACHED}}
cache: {SETTINGS}
tenants:
  acme:
    keys: ["sha256:ACME", {digest: "sha256:OPERATOR", scopes: [admin]}]
    limits: {tokens_per_day: 1000, inputs_per_day: 100}
  zeta: {keys: ["sha256:ZETA"]}
"""

ADMIN = {"authorization": "Bearer key-of-operator"}


@asynccontextmanager
async def gateway_of(
    boot: Boots, settings: str = "ttl_s: 60", *, cached: str = "true"
) -> AsyncIterator[tuple[Running, FakeEngine]]:
    """Yield a gateway with a cache, and its engine, which has computed the reference texts only."""
    config = CONFIG.replace("SETTINGS", settings).replace("CACHED", cached)
    for name in (*TENANTS, "operator"):
        config = config.replace(name.upper(), hashlib.sha256(f"key-of-{name}".encode()).hexdigest())
    engine = FakeEngine()
    async with boot({}, config, engines={"only": engine}) as gateway:
        engine.texts.clear()
        yield gateway, engine


async def embed(
    gateway: Running, texts: list[str], tenant: str = "acme", control: str = "", **body: Any
) -> Any:
    """Return the reply to texts of a tenant."""
    headers = {"authorization": f"Bearer key-of-{tenant}"} | ({"cache_control": control} if control else {})
    return await gateway.post("/v1/embeddings", {"model": "m", "input": texts} | body, **headers)


async def test_only_texts_that_are_not_found_are_computed(boot: Boots) -> None:
    async with gateway_of(boot) as (gateway, engine):
        first = await embed(gateway, ["a", "b", "a"])
        engine.texts.clear()
        second = await embed(gateway, ["b", "c", "a"])
        again = await embed(gateway, ["b", "c", "a"])

    assert "hit=0, miss=3" == first.headers["x-cache"]
    assert ["c"] == engine.texts
    assert ("hit=2, miss=1", "hit=3, miss=0") == (second.headers["x-cache"], again.headers["x-cache"])
    vectors = {text: item["embedding"] for text, item in zip("aba", first.json()["data"], strict=True)}
    assert [vectors["b"], vectors["a"]] == [second.json()["data"][place]["embedding"] for place in (0, 2)]
    assert second.json()["data"] == again.json()["data"]
    assert tokens_of("b") + tokens_of("a") == second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first.json()["usage"]["prompt_tokens"] == second.json()["usage"]["prompt_tokens"]
    assert "cache;dur=" in second.headers["server-timing"]


@pytest.mark.parametrize(("shared", "found"), [("false", "hit=0, miss=1"), ("true", "hit=1, miss=0")])
async def test_a_tenant_finds_entries_of_others_only_if_they_are_shared(
    boot: Boots, shared: str, found: str
) -> None:
    async with gateway_of(boot, f"shared: {shared}") as (gateway, _):
        await embed(gateway, ["a"], "acme")
        reply = await embed(gateway, ["a"], "zeta")

    assert found == reply.headers["x-cache"]


async def test_texts_that_are_found_need_no_replica_that_responds(
    boot: Boots, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> NoReturn:
        raise ReplicaUnavailable("the engine is gone")

    async with gateway_of(boot) as (gateway, engine):
        await embed(gateway, ["a", "b"])
        monkeypatch.setattr(engine, "describe", refuse)
        monkeypatch.setattr(engine, "run", refuse)
        pool = gateway.application.gateway.upstreams["only"].pool
        pool.transition(pool.replicas[0], ReplicaEvent.LOST, "it is gone")
        assert [] == pool.usable()
        found = await embed(gateway, ["b", "a"])

    assert (200, "hit=2, miss=0") == (found.status_code, found.headers["x-cache"])


@pytest.mark.parametrize("charge", ["full", "none"])
async def test_texts_that_are_found_cost_what_the_configuration_says(boot: Boots, charge: str) -> None:
    async with gateway_of(boot, f"charge: {charge}") as (gateway, _):
        await embed(gateway, ["aa", "bb"])
        second = await embed(gateway, ["aa", "c"])
        # A reply shows the limits after its reserve, and the next one after its settlement.
        last = await embed(gateway, ["d"])

    computed = tokens_of("aa") + tokens_of("bb") + tokens_of("c") + tokens_of("d")
    is_charged = charge == "full"
    assert 200 == second.status_code
    assert str(1000 - computed - is_charged * tokens_of("aa")) == last.headers["x-ratelimit-remaining-tokens"]
    assert str(100 - 4 - is_charged) == last.headers["x-ratelimit-remaining-inputs"]


async def test_a_call_may_refresh_or_bypass_the_cache(boot: Boots) -> None:
    async with gateway_of(boot) as (gateway, engine):
        bypassed = await embed(gateway, ["a"], control="no-store")
        refreshed = await embed(gateway, ["a"], control="no-cache")
        found = await embed(gateway, ["a"])

    expected = ("bypass", "hit=0, miss=1", "hit=1, miss=0")
    assert expected == tuple(reply.headers["x-cache"] for reply in (bypassed, refreshed, found))
    assert ["a", "a"] == engine.texts
    assert "prompt_tokens_details" not in bypassed.json()["usage"]


async def test_an_error_names_the_input_among_all(boot: Boots) -> None:
    async with gateway_of(boot) as (gateway, _):
        await embed(gateway, ["a", "b"])
        reply = await embed(gateway, ["a", "b", "0123456789abcdef"], truncate="NONE")

    assert 400 == reply.status_code
    assert "2" in reply.json()["error"]["message"]


async def test_options_of_a_vector_are_part_of_its_key(boot: Boots) -> None:
    text = ["0123456789abcdef"]
    async with gateway_of(boot) as (gateway, _):
        replies = [
            await embed(gateway, text, **options)
            for options in (
                {},
                {"truncate": "START"},
                {"normalized": False},
                {"dimensions": 3},
                {"truncate": "START"},
            )
        ]

    hits = [reply.headers["x-cache"].startswith("hit=1") for reply in replies]
    assert [False, False, False, True, True] == hits
    assert 3 == len(replies[3].json()["data"][0]["embedding"])
    assert replies[1].json()["data"] == replies[4].json()["data"]


async def test_a_model_without_a_fingerprint_is_not_cached(boot: Boots) -> None:
    async with gateway_of(boot) as (gateway, _):
        upstream = gateway.application.gateway.upstreams["only"]
        reference, upstream.space.reference = upstream.space.reference, None
        reply = await embed(gateway, ["a"])
        bypassed = await gateway.client.get("/admin/status", headers=ADMIN)
        upstream.space.reference = reference
        cached = await gateway.client.get("/admin/status", headers=ADMIN)

    assert "bypass" == reply.headers["x-cache"]
    assert "no fingerprint" in bypassed.json()["models"][0]["cache"]
    assert "on" == cached.json()["models"][0]["cache"]


async def test_a_model_that_does_not_ask_for_it_has_no_cache(boot: Boots) -> None:
    async with gateway_of(boot, cached="false") as (gateway, engine):
        for _ in range(2):
            reply = await embed(gateway, ["a"])

    assert "x-cache" not in reply.headers
    assert "prompt_tokens_details" not in reply.json()["usage"]
    assert ["a", "a"] == engine.texts


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        ("", "models.m.cache: needs the section `cache`"),
        ("cache: {store: redis}", "cache.store: needs a Redis in `quotas.store`"),
        ("cache: {store: 'http://x'}", "cache.store: "),
        ("cache: {bytes: 0}", "cache.bytes"),
    ],
)
def test_settings_that_cannot_work_are_refused(cache: str, reason: str) -> None:
    config = "upstreams: {one: {backend: torch, model: org/m}}\nmodels: {m: {upstream: one, cache: true}}\n"

    with pytest.raises(ConfigError, match=reason):
        parse_config(config + cache, {}, Path.cwd())


def test_workers_divide_the_bytes_in_memory_and_share_those_in_redis() -> None:
    workers = Config(upstreams={}, models={}, workers=4, cache=CacheSettings(bytes=1000))
    shared = msgspec.structs.replace(workers, cache=CacheSettings(bytes=1000, store="redis"))

    assert [250, 1000] == [share.bytes for share in map(cache_share, (workers, shared)) if share]


async def test_single_texts_of_a_server_without_a_tokenizer_are_cached(boot: Boots) -> None:
    server = FakeTei()
    config = 'upstreams: {one: {backend: tei, replicas: ["http://one"]}}\n'
    config += "models: {m: {upstream: one, cache: true}}\ncache: {ttl_s: 60}\n"
    async with boot({"one": server}, config) as gateway:
        bodies: list[Any] = ["a b", "a b", ["c", "d"], ["c", "d", "a b"]]
        replies = [await gateway.post("/v1/embeddings", {"input": texts}) for texts in bodies]
        [model] = (await gateway.client.get("/admin/status", headers={"host": "localhost"})).json()["models"]

    assert "on, only for single texts: the upstream has no `tokenizer`" == model["cache"]
    expected = ["hit=0, miss=1", "hit=1, miss=0", "hit=0, miss=2", "hit=1, miss=2"]
    assert expected == [reply.headers["x-cache"] for reply in replies]
    assert replies[0].json()["data"] == replies[1].json()["data"]
    assert replies[0].json()["usage"]["prompt_tokens"] == replies[1].json()["usage"]["prompt_tokens"]
