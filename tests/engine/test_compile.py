"""`compile: true`: the same vectors, or a clear word on why not."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from backends.contract import Embed, Embedded
from backends.errors import ModelUnavailable
from backends.torch.engine import Engine
from backends.torch.loader import Loaded, load
from tests.engine.checkpoints import ENCODERS, make_encoder
from tests.engine.texts import real_texts


def loaded(folder: Path, *, compiled: bool) -> Loaded:
    return load(folder, "tiny", dtype="float32", device="cpu", report=lambda _: None, compiled=compiled)


@pytest.mark.timeout(180)
async def test_a_compiled_model_gives_the_same_vectors(minilm: Path, tmp_path: Path) -> None:
    make_encoder(ENCODERS["bert"][0](), minilm, tmp_path)
    texts = tuple(real_texts()[:40])
    both = []
    for compiled in (False, True):
        engine = Engine(loaded(tmp_path, compiled=compiled), batch_tokens=256, queue_tokens=10**9)
        reply = await engine.run(Embed(texts))
        assert isinstance(reply, Embedded)
        both.append(reply.vectors)

    np.testing.assert_allclose(both[0], both[1], atol=1e-4)


@pytest.mark.timeout(180)
async def test_a_compiled_model_is_compiled_once_for_all_lengths(minilm: Path, tmp_path: Path) -> None:
    make_encoder(ENCODERS["bert"][0](), minilm, tmp_path)
    # What other models were compiled for counts towards the compiler's bound too.
    torch.compiler.reset()
    counters.clear()
    engine = Engine(loaded(tmp_path, compiled=True), batch_tokens=256, queue_tokens=10**9)

    for words in range(2, 14):
        await engine.run(Embed(("word " * words, "word " * (words // 2))))

    # The first batch's shape, and then any.
    assert 1 <= counters["stats"]["unique_graphs"] <= 2


def test_without_a_compiler_the_engine_says_what_is_missing(
    minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_encoder(ENCODERS["bert"][0](), minilm, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ModelUnavailable, match=r"needs a C\+\+ compiler"):
        loaded(tmp_path, compiled=True)


def test_an_architecture_with_attention_of_its_own_is_not_compiled(minilm: Path, tmp_path: Path) -> None:
    make_encoder(ENCODERS["mpnet"][0](), minilm, tmp_path)

    with pytest.raises(ModelUnavailable, match="mpnet"):
        loaded(tmp_path, compiled=True)
