"""Replies that take long to make: places of askers, queues, and replies that outlive their readers."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.api.operators import reply_cache
from gateway.api.operators.reply_cache import ASKERS_MAX, WAITING_MAX, ReplyCache
from gateway.errors import Overloaded
from tests.waiting import PATIENCE_S


class Maker:
    """Makes replies once it is let go. made: their keys, in order."""

    def __init__(self) -> None:
        self.may_go = asyncio.Event()
        self.begun: list[str] = []
        self.made: list[str] = []

    def make(self, key: str) -> Callable[[], Awaitable[str]]:
        async def make() -> str:
            self.begun.append(key)
            await self.may_go.wait()
            self.made.append(key)
            return key

        return make


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def read(cache: ReplyCache, maker: Maker, key: str, asker: str = "", queue: str = "") -> str:
    async with asyncio.timeout(PATIENCE_S):
        return await cache.reply(key, 60.0, maker.make(key), queue=queue, asker=asker)


async def test_many_reads_of_one_asker_make_only_itself_wait() -> None:
    cache, maker = ReplyCache("the history"), Maker()
    greedy = [asyncio.create_task(read(cache, maker, f"a{at}", "a")) for at in range(WAITING_MAX)]
    await settle()
    with pytest.raises(Overloaded, match="the history"):
        await read(cache, maker, "a-more", "a")
    other = asyncio.create_task(read(cache, maker, "b0", "b"))
    await settle()
    maker.may_go.set()
    assert "b0" == await other
    await asyncio.gather(*greedy)
    # Behind the one that was being made, and before the others of the first asker.
    assert ["a0", "b0", "a1"] == maker.made[:3]


async def test_the_number_of_askers_is_bounded() -> None:
    cache, maker = ReplyCache("x"), Maker()
    tasks = [asyncio.create_task(read(cache, maker, f"{at}", f"{at}")) for at in range(ASKERS_MAX)]
    await settle()
    with pytest.raises(Overloaded):
        await read(cache, maker, "more", "more")
    maker.may_go.set()
    await asyncio.gather(*tasks)
    assert "more" == await read(cache, maker, "more", "more")
    assert not any(queue.places for queue in cache._queues.values())
    assert not cache._making


async def test_a_reply_is_made_once_for_all_that_ask_for_it() -> None:
    cache, maker = ReplyCache("x"), Maker()
    tasks = [asyncio.create_task(read(cache, maker, "same")) for _ in range(WAITING_MAX * 2)]
    await settle()
    maker.may_go.set()
    await asyncio.gather(*tasks)
    assert ["same"] == maker.made


async def test_quick_replies_pass_slow_ones() -> None:
    cache, slow, quick = ReplyCache("x"), Maker(), Maker()
    quick.may_go.set()
    waiting = asyncio.create_task(read(cache, slow, "long", queue="long"))
    await settle()
    assert "short" == await read(cache, quick, "short", queue="short")
    slow.may_go.set()
    await waiting


async def test_what_a_reader_waited_for_in_vain_is_there_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reply_cache, "READ_S", 0.01)
    cache, maker = ReplyCache("the history"), Maker()
    with pytest.raises(Overloaded, match="in time"):
        await read(cache, maker, "slow")
    maker.may_go.set()
    await settle()
    assert ["slow"] == maker.made
    assert "slow" == await read(cache, maker, "slow")
    assert ["slow"] == maker.made


async def test_a_reply_that_nobody_waits_for_is_not_begun() -> None:
    cache, maker = ReplyCache("x"), Maker()
    first = asyncio.create_task(read(cache, maker, "first"))
    left = asyncio.create_task(read(cache, maker, "left"))
    await settle()
    left.cancel()
    # One that comes at once is not lost with it.
    back = asyncio.create_task(read(cache, maker, "left"))
    await settle()
    back.cancel()
    await settle()
    maker.may_go.set()
    await first
    await settle()
    assert ["first"] == maker.begun
    assert not cache._making


async def test_an_error_reaches_its_reader_and_the_next_one_tries_again() -> None:
    cache, maker = ReplyCache("x"), Maker()
    maker.may_go.set()

    async def fail() -> str:
        raise LookupError("gone")

    with pytest.raises(LookupError):
        await cache.reply("key", 60.0, fail)
    assert "key" == await read(cache, maker, "key")
