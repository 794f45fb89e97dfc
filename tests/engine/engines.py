"""Helpers to open an engine on a tiny checkpoint, run work on it and compare its numbers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from backends.contract import Capabilities, Encode, EncodeReply, Output, Reply, TermWeights, Vectors, Work
from backends.contract.errors import AttemptTimedOut
from backends.recipe.options import DTypeName, TaskSettings
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import describe, load
from backends.torch.passes.engine import Engine
from backends.torch.passes.loaded_model import LoadedModel
from tests.engine.texts import real_texts

Kind = TypeVar("Kind", bound=Reply)

TEXTS = [text for text in real_texts() if len(text) > 12][:24]


def load_tiny(
    folder: Path,
    dtype: DTypeName = "float32",
    settings: TaskSettings | None = None,
    *,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a checkpoint, and check that its description without weights is the same."""
    options = LoadOptions(
        dtype, "cpu", trust_remote_code=trust_remote_code, settings=settings or TaskSettings()
    )
    model = load(folder, "tiny", options)
    # A load may measure more.
    described = describe(folder, "tiny", options)
    known = model.capabilities.notes[: len(described.notes)]
    assert described == replace(model.capabilities, loaded=False, notes=known)
    return model


class EngineInProcess:
    """Engine as a backend, without a process of its own."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._capabilities = loaded.capabilities
        self._engine = Engine(loaded, batch_tokens=4096, queue_tokens=10**9)

    async def describe(self, timeout_s: float) -> Capabilities:
        assert timeout_s > 0
        return self._capabilities

    async def run(self, work: Work, timeout_s: float) -> Reply:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._engine.run(work)
        except TimeoutError as error:
            raise AttemptTimedOut("the engine did not finish in time") from error

    async def aclose(self) -> None:
        pass


def engine_on(model: LoadedModel) -> Engine:
    return Engine(model, batch_tokens=256, queue_tokens=10**9)


async def run_work(engine: Engine, work: Work, kind: type[Kind]) -> Kind:
    reply = await engine.run(work)
    assert isinstance(reply, kind)
    return reply


async def encode(
    engine: Engine, texts: Sequence[str], *outputs: Output, prompt_name: str | None = None
) -> EncodeReply:
    return await run_work(
        engine, Encode(tuple(texts), frozenset(outputs), prompt_name=prompt_name), EncodeReply
    )


async def encode_singly(
    engine: Engine, texts: Sequence[str], *outputs: Output, prompt_name: str | None = None
) -> list[EncodeReply]:
    """Encode each text with a call of its own, one after the other."""
    return [await encode(engine, [text], *outputs, prompt_name=prompt_name) for text in texts]


def dense_of(terms: TermWeights, vocabulary: int = 30522) -> Vectors:
    """Return terms as one weight per entry of the vocabulary, after checking their form."""
    assert terms.indices.dtype == np.int32
    assert (np.diff(terms.indices) > 0).all()
    assert (terms.values > 0).all()
    weights = np.zeros(vocabulary, dtype=np.float32)
    weights[terms.indices] = terms.values
    return weights


def cosines(first: Vectors, second: Vectors) -> Vectors:
    """Return the cosine of each pair of rows: (n,)."""
    lengths = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    return (first * second).sum(axis=-1) / np.maximum(lengths, 1e-9)


def gather(*works: Work, engine: Engine) -> "asyncio.Future[list[Reply]]":
    return asyncio.gather(*(engine.run(work) for work in works))
