"""Who no longer answers is killed; who never did, and a parent that was paused itself, is left alone."""

import asyncio
import time
from collections.abc import Callable

import msgspec
import pytest

from gateway import pipes
from gateway.watching import MISSES_MAX, Pings, watch

EVERY_S = 0.01


class Watched:
    """A child that is killed for hanging: another process takes its place."""

    name = "worker"

    def __init__(self) -> None:
        self.pid = 1
        self.killed: list[int] = []

    def kill_hung(self) -> None:
        """Take its place."""
        self.killed.append(self.pid)
        self.pid += 1


async def watched(answer: Callable[[int, Watched], bool], looks: int) -> list[int]:
    """Which processes were killed, given what each look found."""
    child, seen, over = Watched(), 0, asyncio.Event()

    async def answers() -> bool:
        nonlocal seen
        seen += 1
        if seen >= looks:
            over.set()
        return answer(seen, child)

    watching = asyncio.create_task(watch(child, answers, EVERY_S))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        await over.wait()
    watching.cancel()
    return child.killed


async def test_after_so_many_misses_in_a_row_it_is_killed_once() -> None:
    assert [1] == await watched(lambda seen, child: seen == 1 and child.pid == 1, 1 + 3 * MISSES_MAX)


async def test_what_has_not_answered_yet_is_still_being_started() -> None:
    assert [] == await watched(lambda _, __: False, 3 * MISSES_MAX)


async def test_a_few_misses_between_answers_are_a_busy_moment() -> None:
    assert [] == await watched(lambda seen, _: seen % MISSES_MAX == 1, 4 * MISSES_MAX)


async def test_one_that_ended_by_itself_meanwhile_begins_anew() -> None:
    def answer(seen: int, child: Watched) -> bool:
        if seen == MISSES_MAX:
            child.pid = 7
        return seen == 1

    assert [] == await watched(answer, 3 * MISSES_MAX)


async def test_a_pause_of_the_watcher_itself_counts_for_nothing() -> None:
    def answer(seen: int, _: Watched) -> bool:
        if seen == 1:
            return True
        # As long as a stopped process is: nothing else runs meanwhile.
        time.sleep(3 * EVERY_S)
        return False

    assert [] == await watched(answer, 2 * MISSES_MAX)


@pytest.mark.parametrize(("times", "heard"), [(0, False), (1, True)])
async def test_a_ping_is_answered_by_its_own_number(times: int, heard: bool) -> None:
    sent: list[pipes.Ping] = []

    def send(line: bytes) -> bool:
        sent.append(msgspec.json.decode(line, type=pipes.Ping))
        # That of the ping before is too late.
        asyncio.get_running_loop().call_soon(pings.heard, sent[-1].number - 1 + times)
        return True

    pings = Pings(send, EVERY_S)

    assert [heard, heard] == [await pings.answered() for _ in range(2)]
    assert [0, 1] == [one.number for one in sent]


async def test_what_says_that_it_is_ready_has_answered_once() -> None:
    pings = Pings(lambda _: True, EVERY_S)
    pings.heard_ready()

    assert [True, False] == [await pings.answered() for _ in range(2)]


async def test_without_a_process_nobody_answers() -> None:
    assert not await Pings(lambda _: False, 30).answered()
