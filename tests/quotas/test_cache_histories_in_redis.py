"""Random histories of two gateways, of which one has a cache in Redis, which stops and continues.

Histories come from seeds and not from Hypothesis, which repeats short ones that find nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any, ClassVar

import pytest

from gateway.cache.redis_store import PREFIX
from tests.api.test_cache_histories import TENANTS, TEXTS, TwoGateways
from tests.quotas.redis_server import RedisServer

HISTORIES, STEPS = 10, 40
# Most steps are calls. While Redis is frozen nothing is found.
WEIGHTS = {
    "embed": 60,
    "embed_at_once": 15,
    "expire": 4,
    "reload": 8,
    "distrust": 3,
    "freeze": 4,
    "thaw": 30,
}
SMALL, LARGE = 3000, 200_000


class TwoGatewaysWithRedis(TwoGateways):
    """The same with a cache in Redis, which may be frozen."""

    is_frozen = False
    totals: ClassVar[Counter[str]] = Counter()

    async def _embed(self, call: dict[str, Any]) -> None:
        await super()._embed(call)
        if not self.is_frozen:
            # The next call finds what this one has written in the background.
            await asyncio.gather(*self.cached_store._writes)

    def step(self, dice: Random) -> None:
        """Do one step by chance."""
        match dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]:
            case "embed":
                self.embed(call=call_of(dice))
            case "embed_at_once":
                self.embed_at_once(calls=[call_of(dice) for _ in range(dice.randint(2, 4))])
            case "reload":
                self.reload(revision=dice.choice("12"))
            case "distrust":
                self.distrust(happens=True)
            case "expire" if not self.is_frozen:
                self.expire()
            case "freeze" | "thaw" as kind if self.is_frozen is (kind == "thaw"):
                self.toggle_redis()

    def toggle_redis(self) -> None:
        """Freeze Redis, or let it continue and ask it again at once."""
        if self.is_frozen:
            self.server.thaw()
            self.cached_store._breaker.record_success()
        else:
            self.server.freeze()
        self.is_frozen = not self.is_frozen

    def expire(self) -> None:
        """Let all entries in Redis expire."""
        names = [name for name in self.server.command("KEYS", f"{PREFIX}*").split() if len(name) > 64]
        for name in names:
            assert self.server.command("PEXPIRE", name, "0").strip() == ":1"
        # The bytes of an entry count for as long as it may live.
        self.server.command("DEL", f"{PREFIX}written")
        self.totals["expired"] += len(names)

    def teardown(self) -> None:
        if self.is_frozen:
            self.server.thaw()
        super().teardown()


def call_of(dice: Random) -> dict[str, Any]:
    """Return a call that differs from most others in its texts only."""

    def mostly(value: Any, *others: Any) -> Any:
        return dice.choice([value] * 10 * len(others) + list(others))

    return {
        "texts": dice.choices(TEXTS, k=dice.randint(3, 9)),
        "tenant": mostly(*TENANTS),
        "model": mostly("m", "alias"),
        "dimensions": dice.choice([None, 1, 3, 8, None, 1, 3, 8, 9]),
        "form": dice.choice(["float", "base64", "int8", "binary"]),
        "truncate": mostly(None, "START", "END"),
        "normalized": mostly(None, False),
        "cache_control": mostly("", "no-cache", "no-store"),
    }


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Start a server that histories freeze."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_replies_are_the_same_with_redis(redis_server: RedisServer, size: int) -> None:
    class Machine(TwoGatewaysWithRedis):
        url = redis_server.url
        server = redis_server
        totals: ClassVar[Counter[str]] = Counter()

    for seed in range(HISTORIES):
        machine = Machine()
        try:
            machine.start(size=size)
            dice = Random(seed)
            for _ in range(STEPS):
                machine.step(dice)
        finally:
            machine.teardown()
    totals = Machine.totals

    # Histories that find nothing, or from which nothing leaves, would show nothing.
    assert totals["expired"], totals
    if size == LARGE:
        assert totals["hit"] >= (totals["hit"] + totals["miss"]) / 3, totals
    else:
        assert totals["hit"], totals
        assert totals["evicted"] > 100, totals
