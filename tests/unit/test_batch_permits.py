"""Permits of lines: all while no interactive call comes, one next to one."""

import asyncio

from gateway.batches.shares import BUSY_S, OVERTAKEN_S, RESULT_BYTES_MAX, LinePermits, Permit


class Scene:
    """Lines that hold their permits until they are released."""

    def __init__(self, most: int) -> None:
        self.calls = 0
        self.now_s = 0.0
        self.running = 0
        self.permits = LinePermits(most, lambda: self.calls, lambda: self.now_s)
        self.order: list[str] = []
        self.release = asyncio.Semaphore(0)

    async def line(self, tenant: str = "acme", result_bytes: int = 0) -> None:
        async with self.permits.one(tenant, "job", result_bytes):
            self.running += 1
            self.order.append(tenant)
            await self.release.acquire()
            self.running -= 1

    def start(self, count: int, tenant: str = "acme", result_bytes: int = 0) -> "list[asyncio.Task[None]]":
        """Start lines of a tenant."""
        return [asyncio.create_task(self.line(tenant, result_bytes)) for _ in range(count)]

    async def finish(self, lines: "list[asyncio.Task[None]]") -> None:
        """Release as many lines as were started, and wait for their end."""
        for _ in lines:
            self.release.release()
        await asyncio.gather(*lines)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_gives_one_permit_next_to_calls_and_all_afterwards() -> None:
    scene = Scene(16)
    lines = scene.start(60)
    await settle()
    assert scene.running == 16

    scene.calls += 1
    for _ in range(15):
        scene.release.release()
    await settle()
    assert scene.running == 1
    # Until the last of them has paused for as long as it ran.
    scene.now_s += 0.02
    scene.release.release()
    await settle()
    assert scene.running == 0
    await asyncio.sleep(0.03)
    assert scene.running == 1

    scene.now_s += BUSY_S
    scene.release.release()
    await settle()
    assert scene.running == 16
    await scene.finish(lines)
    assert scene.running == 0


async def test_a_cancelled_line_loses_no_permit() -> None:
    scene = Scene(1)
    first, second, third = scene.start(3)
    await settle()
    second.cancel()
    scene.release.release()
    await settle()
    assert second.cancelled()
    assert scene.running == 1
    # Cancelled after its permit was given, and before it could run.
    fourth = asyncio.create_task(scene.line())
    await settle()
    scene.release.release()
    await asyncio.sleep(0)
    fourth.cancel()
    await settle()
    scene.release.release()
    fifth = asyncio.create_task(scene.line())
    await settle()
    scene.release.release()
    await asyncio.gather(first, third, fifth)
    assert scene.running == 0


async def test_the_tenant_that_runs_the_fewest_lines_is_next() -> None:
    scene = Scene(4)
    lines = scene.start(100, "large")
    await settle()
    lines += scene.start(2, "small")
    await settle()
    for _ in range(2):
        scene.release.release()
    await settle()
    assert scene.order == ["large"] * 4 + ["small"] * 2
    await scene.finish(lines)


async def test_bounds_the_bytes_of_results_and_runs_a_larger_one_alone() -> None:
    scene = Scene(16)
    lines = scene.start(10, "acme", RESULT_BYTES_MAX // 4)
    lines += scene.start(2, "acme", 2 * RESULT_BYTES_MAX)
    await settle()
    most = scene.running
    while not all(task.done() for task in lines):
        scene.release.release()
        await settle()
        most = max(most, scene.running)
        assert scene.running <= 1 or sum(task.done() for task in lines) < 10

    assert most == 4


async def test_the_size_of_a_result_replaces_its_estimate() -> None:
    scene = Scene(16)
    async with scene.permits.one("acme", "job", RESULT_BYTES_MAX) as permit:
        waiting = asyncio.create_task(scene.line("acme", 1000))
        await settle()
        assert scene.running == 0
        assert permit is not None
        scene.permits.resize(permit, 1000)
        await settle()
        assert scene.running == 1
        scene.release.release()
        await waiting


async def test_lines_of_a_stopped_job_wait_no_longer() -> None:
    scene = Scene(1)

    async def stopped() -> Permit | None:
        async with scene.permits.one("acme", "stopped", 1000) as permit:
            return permit

    async with scene.permits.one("acme", "job", 1000):
        waiting = [asyncio.create_task(stopped()) for _ in range(3)]
        other = asyncio.create_task(scene.line("acme", 1000))
        await settle()
        scene.permits.stop("stopped")
        assert [None] * 3 == await asyncio.gather(*waiting)
        assert scene.running == 0
    await settle()
    assert scene.running == 1
    scene.release.release()
    await other


async def test_tenants_take_turns_where_one_line_runs_at_a_time() -> None:
    scene = Scene(1)
    lines = scene.start(20)
    await settle()
    lines += scene.start(5, "beta")
    for _ in lines:
        scene.release.release()
        await settle()
        scene.now_s += 1
    await asyncio.gather(*lines)

    assert scene.order[:11] == ["acme", *["beta", "acme"] * 5]


async def test_lines_overtake_one_that_does_not_fit_but_not_for_ever() -> None:
    scene = Scene(16)
    lines = scene.start(2, "acme", 2 * RESULT_BYTES_MAX)
    await settle()
    lines += scene.start(40, "beta", 1000)
    await settle()
    assert scene.order == ["acme"]
    scene.release.release()
    await settle()
    # The next of the large ones waits, and all others may run.
    assert scene.order == ["acme", *["beta"] * 16]
    scene.now_s += OVERTAKEN_S
    for _ in range(16):
        scene.release.release()
        await settle()
    assert scene.order == ["acme", *["beta"] * 16, "acme"]
    await scene.finish(lines)
