"""Processes that read pictures: their bounds, their end, and the turns of those who wait."""

import asyncio
import os
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from backends.contract import EmbedParts, EmbedReply, Truncate
from backends.contract.errors import InvalidWork, ReplicaFailed
from backends.torch.media.reading import READ_S_MAX, ForkServer, ReadingProcess, ReadingThreads
from backends.torch.media.reading_wire import CPU_S_MAX, READING_BYTES_MAX, ReadRequest
from tests.engine.engines import engine_on, load_tiny, run_work

pytest.importorskip("PIL", reason="pictures need the extra `media`")

from PIL import Image

from tests.engine.dual_checkpoints import make_dual
from tests.pictures import encoded, noise, one_bit_png, part_of, progressive_jpeg

# Processes import the libraries, which takes long on a busy machine.
WAIT_S = 30


@pytest.fixture(scope="module")
def clip(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reading") / "clip"
    make_dual("clip", minilm, folder)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


def request_of(clip: Path, data: bytes) -> ReadRequest:
    return ReadRequest("image", str(clip), part_of(data), Truncate.ERROR)


def status_mb(number: int, field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{number}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def test_a_process_that_takes_too_long_is_killed_and_the_next_picture_is_read(
    server: ForkServer, clip: Path
) -> None:
    slow, other = ReadingProcess(server), ReadingProcess(server)
    slow.read(request_of(clip, encoded(noise(40, 30))))
    first = slow.number
    with pytest.raises(InvalidWork, match="not read within 0 s"):
        slow.read(request_of(clip, one_bit_png(3_000)), 0.0)

    assert not Path(f"/proc/{first}").exists()
    assert 17 == other.read(request_of(clip, encoded(noise(40, 30)))).sequence.tokens
    assert 17 == slow.read(request_of(clip, encoded(noise(40, 30)))).sequence.tokens
    assert first != slow.number


def test_a_picture_beyond_the_processor_time_is_its_callers_fault(server: ForkServer, clip: Path) -> None:
    process = ReadingProcess(server)
    process.read(request_of(clip, encoded(noise(40, 30))))
    soft, _ = resource.prlimit(process.number, resource.RLIMIT_CPU)
    memory, _ = resource.prlimit(process.number, resource.RLIMIT_DATA)
    assert CPU_S_MAX < soft < CPU_S_MAX + WAIT_S
    assert READING_BYTES_MAX < memory < 3 * READING_BYTES_MAX
    assert CPU_S_MAX < READ_S_MAX

    # As the system does at the bound.
    os.kill(process.number, signal.SIGXCPU)
    with pytest.raises(InvalidWork, match="processor time"):
        process.read(request_of(clip, encoded(noise(40, 30))))
    process.read(request_of(clip, encoded(noise(40, 30))))
    os.kill(process.number, signal.SIGKILL)
    with pytest.raises(ReplicaFailed, match="the process that read it ended"):
        process.read(request_of(clip, encoded(noise(40, 30))))


def test_scans_are_bounded_before_anything_is_decoded(server: ForkServer, clip: Path) -> None:
    process = ReadingProcess(server)
    assert 17 == process.read(request_of(clip, progressive_jpeg(400, 400, 90))).sequence.tokens
    for data in (progressive_jpeg(400, 400, 101), progressive_jpeg(9_400, 9_400, 400)):
        with pytest.raises(InvalidWork, match="scans for its size; encode it again"):
            process.read(request_of(clip, data))


def test_large_pictures_leave_no_memory_behind(server: ForkServer, clip: Path) -> None:
    process = ReadingProcess(server)
    process.read(request_of(clip, encoded(noise(40, 30))))
    before = status_mb(process.number, "VmRSS")
    for _ in range(3):
        process.read(request_of(clip, encoded(Image.new("RGB", (3_000, 3_000), (90, 120, 30)), "JPEG")))
    assert status_mb(process.number, "VmHWM") - before < 9 * 20
    # The answer comes before the memory is returned.
    process.read(request_of(clip, encoded(noise(40, 30))))
    assert status_mb(process.number, "VmRSS") - before < 9 * 4


def test_all_reading_processes_end_with_their_server(server: ForkServer, clip: Path) -> None:
    processes = [ReadingProcess(server) for _ in range(2)]
    for process in processes:
        process.read(request_of(clip, encoded(noise(40, 30))))
    server.close()
    assert not any(Path(f"/proc/{process.number}").exists() for process in processes)

    with pytest.raises(ReplicaFailed):
        processes[0].read(request_of(clip, encoded(noise(40, 30))))
    # Both are started again.
    assert 17 == processes[0].read(request_of(clip, encoded(noise(40, 30)))).sequence.tokens


def test_one_piece_of_work_has_half_of_the_threads_and_others_take_turns() -> None:
    threads, started, gate, order = ReadingThreads(2), Event(), Event(), list[str]()

    def hold() -> bool:
        started.set()
        return gate.wait(WAIT_S)

    blocked = [threads.submit("a", hold) for _ in range(3)]
    assert started.wait(WAIT_S)
    free = [threads.submit("b", order.append, f"b{place}") for place in range(2)]
    assert [None, None] == [future.result(WAIT_S) for future in free]
    # While one of "a" has its thread, the other two wait: the second thread is for others.
    assert [True, False, False] == [future.running() for future in blocked]
    blocked[2].cancel()
    gate.set()
    assert blocked[1].result(WAIT_S) is True
    assert blocked[2].cancelled()

    gate.clear()
    holding = [threads.submit(owner, gate.wait, WAIT_S) for owner in ("c", "d")]
    order.clear()
    last = [threads.submit(owner, order.append, owner) for owner in ("e", "e", "e", "f", "g")]
    gate.set()
    for future in (*holding, *last):
        future.result(WAIT_S)
    # The second of "e" comes after the first of "f" and of "g".
    assert order.index("f") < 3
    assert order.index("g") < 4


def test_large_pictures_leave_half_of_the_threads_to_small_ones() -> None:
    threads, started, gate, order = ReadingThreads(2), Event(), Event(), list[str]()

    def hold() -> bool:
        started.set()
        return gate.wait(WAIT_S)

    # Of two tenants, or of one in two calls.
    large = [threads.submit(owner, hold, is_large=True) for owner in ("a", "b")]
    assert started.wait(WAIT_S)
    small = [threads.submit(owner, order.append, owner) for owner in ("c", "d", "a")]
    assert [None, None] == [future.result(WAIT_S) for future in small[:2]]
    assert [True, False] == [future.running() for future in large]
    gate.set()
    assert [True, True] == [future.result(WAIT_S) for future in large]
    small[2].result(WAIT_S)


def test_an_engine_reads_a_picture_while_another_call_sends_many(clip: Path) -> None:
    engine = engine_on(load_tiny(clip))
    large, small = part_of(one_bit_png(2_000)), part_of(encoded(noise(40, 30)))

    async def send() -> tuple[EmbedReply, EmbedReply]:
        many = asyncio.create_task(run_work(engine, EmbedParts(((large,),) * 12), EmbedReply))
        await asyncio.sleep(0.05)
        reply = await run_work(engine, EmbedParts(((small,),)), EmbedReply)
        assert not many.done()
        return reply, await many

    reply, many = asyncio.run(send())
    assert (1, 12) == (len(reply.vectors), len(many.vectors))
    alone = asyncio.run(run_work(engine, EmbedParts(((small,),)), EmbedReply))
    np.testing.assert_allclose(alone.vectors, reply.vectors, atol=1e-6)
