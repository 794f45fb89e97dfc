"""Opening an engine on a tiny checkpoint, and what its numbers are compared by."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from backends.contract import Encode, EncodeReply, Output, Reply, TermWeights, Vectors, Work
from backends.torch.engine import Engine
from backends.torch.kinds import Said
from backends.torch.loader import DTypeName, Loaded, describe, load
from tests.engine.texts import real_texts

Kind = TypeVar("Kind", bound=Reply)

TEXTS = [text for text in real_texts() if len(text) > 12][:24]


def loaded(folder: Path, dtype: DTypeName = "float32", said: Said | None = None, **options: bool) -> Loaded:
    """The checkpoint, opened; what its small files alone tell of it must be what it then is."""
    one = load(
        folder, "tiny", dtype=dtype, device="cpu", report=lambda _: None, said=said or Said(), **options
    )
    foretold = describe(folder, "tiny", dtype, "cpu", said or Said())
    assert foretold == replace(one.capabilities, loaded=False)
    return one


def engine_on(one: Loaded) -> Engine:
    return Engine(one, batch_tokens=256, queue_tokens=10**9)


async def ask(engine: Engine, work: Work, kind: type[Kind]) -> Kind:
    reply = await engine.run(work)
    assert isinstance(reply, kind)
    return reply


async def encode(
    engine: Engine, texts: Sequence[str], *outputs: Output, prompt_name: str | None = None
) -> EncodeReply:
    return await ask(engine, Encode(tuple(texts), frozenset(outputs), prompt_name=prompt_name), EncodeReply)


async def alone(
    engine: Engine, texts: Sequence[str], *outputs: Output, prompt_name: str | None = None
) -> list[EncodeReply]:
    """Each text in a call of its own, one after the other."""
    return [await encode(engine, [text], *outputs, prompt_name=prompt_name) for text in texts]


def dense_of(terms: TermWeights, vocabulary: int = 30522) -> Vectors:
    """Terms as one weight for each of the vocabulary, after a look at their form."""
    assert terms.indices.dtype == np.int32
    assert (np.diff(terms.indices) > 0).all()
    assert (terms.values > 0).all()
    weights = np.zeros(vocabulary, dtype=np.float32)
    weights[terms.indices] = terms.values
    return weights


def cosines(one: Vectors, other: Vectors) -> Vectors:
    """Of rows with rows: (n,)."""
    lengths = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
    return (one * other).sum(axis=-1) / np.maximum(lengths, 1e-9)


def gather(*works: Work, engine: Engine) -> "asyncio.Future[list[Reply]]":
    return asyncio.gather(*(engine.run(work) for work in works))
