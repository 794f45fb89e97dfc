"""Random histories of two gateways, of which one has a cache: their replies are the same.

Calls mix texts that were seen with new ones and repeat texts inside a call. Between calls entries expire or
are evicted, and a reload replaces the model's revision.
"""

import asyncio
import base64
import hashlib
import re
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
)

from gateway.cache.memory_store import MemoryStore
from gateway.config.load import parse_config
from tests.conftest import Running, running_gateway
from tests.fakes.engines import FakeEngine
from tests.waiting import PATIENCE_S

TENANTS = ("acme", "zeta")
CONFIG = """
upstreams: {{only: {{backend: torch, model: org/model, revision: "{revision}"}}}}
models:
  m: {{upstream: only, cache: {cached}}}
  alias: {{upstream: only, cache: {cached}, truncate: error}}
tenants:
  acme: {{keys: ["sha256:{acme}"]}}
  zeta: {{keys: ["sha256:{zeta}"]}}
{cache}
"""
TTL_S = 60.0
CACHE_USE = re.compile(r"(hit|miss)=(\d+)")
# The last one is cut, and refused by the alias.
TEXTS = ("a", "b", "c", "d", "ab", "ä b", "0123456789abcdef")


def mostly(value: Any, *others: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for a value that is usually the same, so that calls repeat each other."""
    return st.sampled_from([value] * 12 * len(others) + list(others))


calls = st.fixed_dictionaries(
    {
        "texts": st.lists(st.sampled_from(TEXTS), min_size=3, max_size=9),
        "tenant": mostly(*TENANTS),
        "model": mostly("m", "alias"),
        "dimensions": st.sampled_from([None, 1, 3, 8, None, 1, 3, 8, 9]),
        "form": st.sampled_from(["float", "base64", "int8", "binary"]),
        "truncate": mostly(None, "START", "END"),
        "normalized": mostly(None, False),
        "cache_control": mostly("", "no-cache", "no-store"),
    }
)


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}"


def body_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a call; an option that is not set is absent."""
    body = {"model": call["model"], "input": call["texts"], "dimensions": call["dimensions"]}
    if call["form"] == "base64":
        body["encoding_format"] = "base64"
    elif call["form"] != "float":
        body["output_dtype"] = call["form"]
    body |= {"truncate": call["truncate"], "normalized": call["normalized"]}
    return {name: value for name, value in body.items() if value is not None}


def numbers_of(embedding: Any) -> Any:
    """Return the numbers of an embedding in a reply, a list or base64."""
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), "<f4")
    return np.array(embedding, np.float64)


class TwoGateways(RuleBasedStateMachine):
    """Gateways with and without a cache, each with an engine of its own."""

    url = ""
    server: Any = None
    # Of all histories: texts found and not found, entries that expired, and entries that were evicted.
    totals: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.now_s = 1000.0
        self.gateways: list[Running] = []
        self.engines: list[dict[str, FakeEngine]] = []

    @initialize(size=st.sampled_from([100_000, 100_000, 100_000, 3000]))
    def start(self, size: int) -> None:
        """Boot both; a small cache evicts often."""
        if self.url:
            self.server.command("FLUSHALL")
        self.cache = f"cache: {{store: '{self.url or 'memory'}', bytes: {size}, ttl_s: {TTL_S}}}"
        self.runner.run(self._start())

    async def _start(self) -> None:
        for is_cached in (True, False):
            engines = {"only": FakeEngine("1")}
            context = running_gateway({}, self.config("1", is_cached=is_cached), engines=engines)
            self.gateways.append(await self.stack.enter_async_context(context))
            self.engines.append(engines)
        store = self.cached_store
        if isinstance(store, MemoryStore):
            store._clock = lambda: self.now_s
        else:
            await self.follow()

    @property
    def cached_store(self) -> Any:
        cache = self.gateways[0].application.gateway.cache
        assert cache is not None
        return cache.store

    def config(self, revision: str, *, is_cached: bool) -> str:
        digests = {name: hashlib.sha256(key_of(name).encode()).hexdigest() for name in TENANTS}
        cached = "true" if is_cached else "false"
        return CONFIG.format(
            revision=revision, cached=cached, cache=self.cache if is_cached else "", **digests
        )

    @rule(call=calls)
    def embed(self, call: dict[str, Any]) -> None:
        self.runner.run(self._embed(call))

    @rule(calls=st.lists(calls, min_size=2, max_size=4))
    def embed_at_once(self, calls: list[dict[str, Any]]) -> None:
        async def embed_all() -> None:
            await asyncio.gather(*(self._embed(call) for call in calls))

        self.runner.run(embed_all())

    async def _embed(self, call: dict[str, Any]) -> None:
        headers = {"authorization": f"Bearer {key_of(call['tenant'])}"}
        if call["cache_control"]:
            headers["cache_control"] = call["cache_control"]
        cached, plain = [
            await gateway.post("/v1/embeddings", body_of(call), **headers) for gateway in self.gateways
        ]
        assert plain.status_code == cached.status_code, cached.text
        if plain.status_code != 200:
            assert plain.json()["error"] == cached.json()["error"]
            return
        self._compare(cached.json(), plain.json(), call)
        self.totals.update(
            {kind: int(number) for kind, number in CACHE_USE.findall(cached.headers.get("x-cache", ""))}
        )
        name = "x-truncated-inputs"
        assert plain.headers.get(name) == cached.headers.get(name)
        assert "x-cache" not in plain.headers
        if call["cache_control"] == "no-store":
            assert "bypass" == cached.headers["x-cache"]
        if call["cache_control"] == "no-cache" and cached.headers["x-cache"] != "bypass":
            assert f"hit=0, miss={len(call['texts'])}" == cached.headers["x-cache"]

    def _compare(self, cached: dict[str, Any], plain: dict[str, Any], call: dict[str, Any]) -> None:
        assert [item["index"] for item in plain["data"]] == [item["index"] for item in cached["data"]]
        assert plain["usage"]["prompt_tokens"] == cached["usage"]["prompt_tokens"]
        # A vector that was normalized before it was cut and again afterwards differs in its last digit.
        allowed = 1.0 if call["form"] == "int8" else 1e-6
        for ours, theirs in zip(cached["data"], plain["data"], strict=True):
            expected, found = numbers_of(theirs["embedding"]), numbers_of(ours["embedding"])
            np.testing.assert_allclose(found, expected, rtol=0, atol=allowed)

    @rule(is_expiry=st.sampled_from([False, False, True]))
    def wait(self, *, is_expiry: bool) -> None:
        """Let time pass, after which all entries may have expired."""
        self.now_s += 1.0
        if is_expiry:
            self.expire()

    def expire(self) -> None:
        """Let all entries expire."""
        owned = self.cached_store._owned.values()
        self.totals["expired"] += sum(len(owner.entries) for owner in owned)
        self.now_s += TTL_S

    @rule(revision=st.sampled_from(["1", "2"]))
    def reload(self, revision: str) -> None:
        """Serve a revision of the model, maybe one that was served before."""
        self.runner.run(self._reload(revision))

    async def _reload(self, revision: str) -> None:
        for gateway, engines, is_cached in zip(self.gateways, self.engines, (True, False), strict=True):
            address = f"engine {revision}"
            engines.setdefault(address, FakeEngine(revision))
            parsed = parse_config(self.config(revision, is_cached=is_cached), {}, Path.cwd())
            await gateway.application.follow(parsed, {"only": {"": address}}, ())
            async with asyncio.timeout(PATIENCE_S):
                upstream = gateway.application.gateway.upstreams["only"]
                while not upstream.pool.usable():  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

    @rule(happens=mostly(False, True))
    def distrust(self, *, happens: bool) -> None:
        """Begin a new epoch, as a replica with other vectors does."""
        if happens:
            self.cached_store.distrust("only")

    async def follow(self) -> None:
        """Read the epochs, which a background task would do later."""
        await self.cached_store.follow()

    def teardown(self) -> None:
        if self.gateways:
            self.totals["evicted"] += self.cached_store.evictions
        self.runner.run(self.stack.aclose())
        self.runner.close()


TestWithMemory = TwoGateways.TestCase
TestWithMemory.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
