"""Threads that tenants share: turns, long chunks, callers who leave, and bounds."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import pytest

from gateway.errors import Overloaded
from gateway.upstreams.fair_threads import (
    CHARACTERS_MAX,
    CHUNK_CHARACTERS,
    LONG_CHARACTERS,
    TENANT_CHARACTERS_MAX,
    Claim,
    FairThreads,
)
from tests.fakes.hooks import until
from tests.waiting import PATIENCE_S

A, B = Claim("a", 1), Claim("b", 2)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Return an event that chunks wait for; it is set at the end, so that no thread is left."""
    opened = threading.Event()
    yield opened
    opened.set()


async def tenants_in_order(gate: threading.Event, claims: Sequence[Claim]) -> list[str]:
    """Return the tenants of chunks that wait for one thread, in the order in which they run."""
    threads, order = FairThreads(1), list[str]()
    first = asyncio.create_task(threads.run(A, 1, gate.wait))
    await asyncio.sleep(0)
    waiting = [
        asyncio.create_task(threads.run(claim, CHUNK_CHARACTERS, partial(order.append, claim.tenant)))
        for claim in claims
    ]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *waiting)
    return order


async def test_tenants_take_turns(gate: threading.Event) -> None:
    assert (await tenants_in_order(gate, [A, A, A, A, B])).index("b") <= 1


async def test_weight_is_a_share_of_the_threads(gate: threading.Event) -> None:
    heavy, light = Claim("heavy", 1, weight=3), Claim("light", 2)
    order = await tenants_in_order(gate, [*[light] * 8, *[heavy] * 8])

    assert 5 <= order[:8].count("heavy") <= 7


async def test_long_chunks_leave_a_thread_to_ordinary_ones(gate: threading.Event) -> None:
    threads = FairThreads(2)
    claims = [Claim(f"tenant {number}", number) for number in range(3)]
    long = [asyncio.create_task(threads.run(claim, LONG_CHARACTERS + 1, gate.wait)) for claim in claims]
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        assert "done" == await threads.run(B, 1, lambda: "done")

    gate.set()
    assert [True] * 3 == await asyncio.gather(*long)


async def test_chunk_of_a_caller_who_leaves_never_runs(gate: threading.Event) -> None:
    threads, ran = FairThreads(1), list[str]()
    running = asyncio.create_task(threads.run(A, 1, gate.wait))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(threads.run(A, 1, lambda: ran.append("cancelled")))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    gate.set()
    await running
    await threads.run(A, 1, lambda: ran.append("later"))

    assert ["later"] == ran


async def test_chunk_that_runs_when_its_caller_leaves_frees_its_thread(gate: threading.Event) -> None:
    threads, started = FairThreads(1), threading.Event()

    def chunk() -> None:
        started.set()
        gate.wait()

    running = asyncio.create_task(threads.run(A, 1, chunk))
    await until(started.is_set)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    gate.set()

    async with asyncio.timeout(PATIENCE_S):
        assert "next" == await threads.run(B, 1, lambda: "next")


async def test_error_of_a_chunk_reaches_its_caller_and_frees_the_thread() -> None:
    threads = FairThreads(1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(A, 1, lambda: 1 // 0)

    assert 1 == await threads.run(A, 1, lambda: 1)


async def test_a_tenant_may_hold_only_so_much_and_hinders_no_other() -> None:
    threads, most = FairThreads(), TENANT_CHARACTERS_MAX
    with threads.hold("a", 2 * most):
        with pytest.raises(Overloaded, match="of your text") as refused, threads.hold("a", 1):
            pass
        with threads.hold("b", most // 2), threads.hold("b", most // 2):
            pass
    with threads.hold("a", most):
        pass

    assert refused.value.retry_after_s is not None
    assert 1 <= refused.value.retry_after_s <= 60


async def test_tenants_together_hold_only_so_much() -> None:
    threads, most = FairThreads(), TENANT_CHARACTERS_MAX
    assert 4 * most == CHARACTERS_MAX
    with ExitStack() as held:
        for tenant, characters in (("a", most), ("c", most), ("d", most), ("b", most - 2), ("e", most // 3)):
            held.enter_context(threads.hold(tenant, characters))
        with pytest.raises(Overloaded), threads.hold("b", 1):
            pass
        # Less than an equal part.
        with threads.hold("e", most // 3):
            pass
