"""Two lines of an engine's work: small jobs wait for no large one, and large ones are not starved."""

import asyncio
from pathlib import Path
from threading import Event

import msgspec
import numpy as np
import pytest
import torch

from backends.contract import Embed, EmbedReply, Output
from backends.torch.inputs.sequences import InputSequence, Row
from backends.torch.passes.backlog import SMALL_TOKENS
from backends.torch.passes.engine import MIXED_PARTS, Engine
from backends.torch.passes.threads import ForwardThreads
from tests.engine.conftest import Engines

LONG_S = 20.0
SMALL = Embed(("a b",))
LARGE = Embed(("word " * 58,) * 48)


class Recording:
    """Head that notes the tokens of each pass; the first pass waits until it is released."""

    def __init__(self) -> None:
        self.began, self.released = Event(), Event()
        self.passes: list[int] = []

    def run(self, sequences: list[InputSequence], outputs: frozenset[Output]) -> list[Row]:
        assert outputs == {Output.DENSE}
        self.began.set()
        assert self.released.wait(LONG_S)
        self.passes.append(sum(sequence.tokens for sequence in sequences))
        return [Row(np.full(384, len(sequence.ids), dtype=np.float32)) for sequence in sequences]


@pytest.fixture
def head() -> Recording:
    return Recording()


@pytest.fixture
def engine(minilm: Path, engine_of: Engines, head: Recording) -> Engine:
    loaded = msgspec.structs.replace(engine_of(minilm, "float32")._loaded, head=head)
    return Engine(
        loaded, batch_tokens=1024, queue_tokens=10**9, threads=ForwardThreads(torch.device("cpu"), cores=1)
    )


async def run_behind_a_pass(engine: Engine, head: Recording, works: list[Embed]) -> list[int]:
    """Queue works in order while a pass computes; return the tokens of the passes after it."""
    first = asyncio.create_task(engine.run(SMALL))
    assert await asyncio.to_thread(head.began.wait, LONG_S)
    running = []
    for number, work in enumerate(works, start=1):
        running.append(asyncio.create_task(engine.run(work)))
        async with asyncio.timeout(LONG_S):
            queued = sum(len(earlier.inputs) for earlier in works[:number])
            while engine.waiting_inputs < queued:  # noqa: ASYNC110 - the engine's queue has no event
                await asyncio.sleep(0.001)
    head.released.set()
    replies = await asyncio.gather(first, *running)

    for work, reply in zip([SMALL, *works], replies, strict=True):
        assert isinstance(reply, EmbedReply)
        assert len(work.inputs) == len(reply.vectors)
    return head.passes[1:]


async def test_a_small_job_waits_for_one_pass_of_a_large_one(engine: Engine, head: Recording) -> None:
    passes = await run_behind_a_pass(engine, head, [LARGE, LARGE, SMALL])

    assert 4 in passes[:2]


async def test_small_jobs_leave_every_second_pass_to_large_ones(engine: Engine, head: Recording) -> None:
    engine._runner.batch_tokens = 64
    large = Embed(("word " * 58,) * 9)
    assert 9 * 60 > SMALL_TOKENS

    passes = await run_behind_a_pass(engine, head, [*[Embed(("word " * 50,))] * 12, large])

    assert [60, 52, 60, 52] == passes[:4] or [52, 60, 52, 60] == passes[:4]
    assert 9 == passes.count(60)


async def test_passes_are_small_only_while_both_kinds_of_job_come(
    engine: Engine, head: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.torch.passes.backlog.RECENT_S", LONG_S)
    mixed = await run_behind_a_pass(engine, head, [LARGE, SMALL])
    assert 4 + 48 * 60 == sum(mixed)
    assert max(mixed) <= 1024 / MIXED_PARTS

    monkeypatch.setattr("backends.torch.passes.backlog.RECENT_S", 0.0)
    head.passes.clear()
    await engine.run(LARGE)

    assert max(head.passes) > 1024 / MIXED_PARTS
