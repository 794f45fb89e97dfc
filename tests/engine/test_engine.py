"""Engine with options, long inputs, odd models and failures."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from backends.contract import Embed, EmbedReply, Output, Rerank, Tokenize, TokenizeReply, Truncate
from backends.contract.errors import (
    BackendError,
    InvalidWork,
    ReplicaFailed,
    ReplicaOverloaded,
    UnsupportedWork,
)
from backends.torch.inputs.sequences import InputSequence, Row
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.passes.engine import Engine
from backends.torch.passes.loaded_model import LoadedModel
from tests.engine.conftest import Engines

LONG = "word " * 1000


@pytest.fixture
def engine(minilm: Path, engine_of: Engines) -> Engine:
    return engine_of(minilm, "float32")


async def embed(engine: Engine, work: Embed) -> EmbedReply:
    reply = await engine.run(work)
    assert isinstance(reply, EmbedReply)
    return reply


async def test_vectors_are_cut_before_they_are_normalized(engine: Engine) -> None:
    whole = await embed(engine, Embed(("hello",), normalize=False))
    short = await embed(engine, Embed(("hello",), dimensions=10))

    expected = whole.vectors[0, :10] / np.linalg.norm(whole.vectors[0, :10])
    np.testing.assert_allclose(short.vectors[0], expected, rtol=1e-5)


async def test_vector_keeps_its_length_without_normalize(engine: Engine) -> None:
    reply = await embed(engine, Embed(("hello",), normalize=False))

    assert abs(np.linalg.norm(reply.vectors[0]) - 1) > 0.1


async def test_truncated_input_is_reported_and_counts_the_maximum_length(engine: Engine) -> None:
    reply = await embed(engine, Embed(("short", LONG)))

    assert reply.truncated == (1,)
    assert reply.tokens == 256 + 3


async def test_caller_chooses_the_side_that_is_cut(engine: Engine) -> None:
    text = "first " * 300 + "last " * 300
    right = await embed(engine, Embed((text, "first " * 254)))
    left = await embed(engine, Embed((text, "last " * 254), truncate=Truncate.LEFT))

    np.testing.assert_allclose(right.vectors[0], right.vectors[1], atol=1e-5)
    np.testing.assert_allclose(left.vectors[0], left.vectors[1], atol=1e-5)


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (Embed((LONG,), truncate=Truncate.ERROR), InvalidWork),
        (Embed(("a" * 200_000,), truncate=Truncate.ERROR), InvalidWork),
        (Embed(("a",), prompt_name="nope"), InvalidWork),
        (Embed(("a",), dimensions=385), InvalidWork),
        (Embed(("a",), dimensions=0), InvalidWork),
        (Rerank("a", ("b",)), UnsupportedWork),
    ],
)
async def test_unsupported_work_is_an_error_of_the_caller(
    engine: Engine, work: Embed | Rerank, error: type[BackendError]
) -> None:
    with pytest.raises(error) as caught:
        await engine.run(work)

    assert caught.value.source == "caller"


async def test_tokens_have_byte_offsets(engine: Engine) -> None:
    reply = await engine.run(Tokenize(("Größe 😀 x",)))

    assert isinstance(reply, TokenizeReply)
    text = "Größe 😀 x".encode()
    pieces = [text[token.start : token.stop].decode() for token in reply.inputs[0] if not token.special]
    assert "".join(pieces) == "Größe😀x"
    assert [token.start for token in reply.inputs[0] if token.special] == [None, None]


async def test_full_queue_refuses_more_work(minilm: Path, engine_of: Engines) -> None:
    loaded = engine_of(minilm, "float32")._loaded
    engine = Engine(loaded, batch_tokens=64, queue_tokens=300)
    replies = await asyncio.gather(*(engine.run(Embed((LONG,))) for _ in range(20)), return_exceptions=True)

    refused = [reply for reply in replies if isinstance(reply, ReplicaOverloaded)]
    served = [reply for reply in replies if isinstance(reply, EmbedReply)]
    assert refused
    assert served
    assert len(refused) + len(served) == 20


class BrokenHead:
    """Head that fails on a text of seven tokens and returns NaN for a text of eight."""

    def run(self, sequences: list[InputSequence], outputs: frozenset[Output]) -> list[Row]:
        assert outputs == {Output.DENSE}
        lengths = [len(sequence.ids) for sequence in sequences]
        if 7 in lengths:
            raise RuntimeError("boom")
        return [Row(np.full(384, np.nan if n == 8 else 1.0, dtype=np.float32)) for n in lengths]


def with_broken_head(minilm: Path, engine_of: Engines) -> Engine:
    whole = engine_of(minilm, "float32")._loaded
    loaded = LoadedModel(whole.recipe, whole.preparer, BrokenHead(), whole.capabilities)
    return Engine(loaded, batch_tokens=4096, queue_tokens=10**6)


async def test_engine_reports_a_failed_pass_and_continues(minilm: Path, engine_of: Engines) -> None:
    engine = with_broken_head(minilm, engine_of)

    with pytest.raises(ReplicaFailed):
        await engine.run(Embed(("x " * 5,)))
    with pytest.raises(InvalidWork, match="not finite"):
        await engine.run(Embed(("x " * 6,)))
    assert isinstance(await engine.run(Embed(("x",))), EmbedReply)


async def test_failing_text_does_not_fail_the_others_of_its_batch(minilm: Path, engine_of: Engines) -> None:
    engine = with_broken_head(minilm, engine_of)

    replies = await asyncio.gather(
        *(engine.run(Embed(("x " * words,))) for words in range(1, 12)), return_exceptions=True
    )

    assert [words for words, reply in enumerate(replies, 1) if isinstance(reply, BackendError)] == [5, 6]
    assert sum(isinstance(reply, EmbedReply) for reply in replies) == 9


def with_files(minilm: Path, folder: Path, **files: object) -> Path:
    """Copy the checkpoint and replace some of its files."""
    shutil.copytree(minilm, folder, dirs_exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", "/").replace("_json", ".json")).write_text(json.dumps(content))
    return folder


async def test_prompts_come_from_the_checkpoint(minilm: Path, tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    folder = with_files(minilm, tmp_path, config_sentence_transformers_json=prompts)
    loaded = load(folder, "m", LoadOptions("float32", "cpu"))
    engine = Engine(loaded, batch_tokens=4096, queue_tokens=10**6)

    default = await embed(engine, Embed(("hello",)))
    written_out = await embed(engine, Embed(("query: hello",), prompt_name="document"))

    bare = await embed(engine, Embed(("query: hello",), prompt_name=""))

    np.testing.assert_allclose(default.vectors, written_out.vectors, atol=1e-6)
    np.testing.assert_allclose(default.vectors, bare.vectors, atol=1e-6)
    assert default.tokens == written_out.tokens == bare.tokens
