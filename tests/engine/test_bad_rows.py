"""Inputs that the network cannot compute: each is refused by its index, and no other input of its batch."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from backends.contract import Embed, EmbedReply, Encode, Output, Rerank, Score, Vectors, Work
from backends.contract.errors import InvalidWork, ModelUnavailable
from backends.recipe.positions import DEFAULT_POSITIONS, POSITION_KEYS
from backends.reference_texts import embed_reference_texts
from backends.torch import wire
from backends.torch.inputs.sequences import InputSequence, PreparedSequences
from backends.torch.load.inspection import inspect_folder
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.networks.opening import padding_id
from backends.torch.passes.engine import Engine
from backends.torch.passes.loaded_model import LoadedModel
from backends.torch.stock.architectures import default_of
from tests.engine.checkpoints import ENCODERS, SMALL, make_classifier, make_encoder
from tests.engine.engines import EngineInProcess, cosines, load_tiny
from tests.engine.texts import PHRASES

BAD_WORD, BAD_ID = "artificial", 7976
FINE = [*PHRASES[:9], "a", "yes no", "word " * 40]
# A token that the tokenizer has and the network has not.
NEW_TOKEN = "[NEW]"


def spoil(folder: Path, *ids: int) -> Path:
    """Set the vectors of some words to numbers whose sums are infinite."""
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("word_embeddings.weight"))
    table = tensors[name].float().clone()
    table[list(ids)] = 3e38
    # The file may be a link to the installed one.
    (folder / "model.safetensors").unlink()
    save_file({**tensors, name: table}, folder / "model.safetensors", {"format": "pt"})
    return folder


def add_token(folder: Path, minilm: Path) -> Path:
    """Give a checkpoint the whole vocabulary of another, whose next id is that of a new token."""
    document = json.loads((minilm / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    document["added_tokens"].append({"id": 30522, "content": NEW_TOKEN, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="module")
def spoiled(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = shutil.copytree(minilm, tmp_path_factory.mktemp("spoiled"), dirs_exist_ok=True)
    return load(spoil(folder, BAD_ID), "m", LoadOptions("float32", "cpu"))


def engine_of(loaded: LoadedModel) -> Engine:
    return Engine(loaded, batch_tokens=4096, queue_tokens=10**6)


async def vectors_of(engine: Engine, *texts: str) -> Vectors:
    reply = await engine.run(Embed(texts))
    assert isinstance(reply, EmbedReply)
    return reply.vectors


@pytest.mark.parametrize("place", [0, 3, len(FINE)])
async def test_a_row_that_is_not_finite_is_an_error_of_its_input(spoiled: LoadedModel, place: int) -> None:
    texts = [*FINE]
    texts.insert(place, f"a {BAD_WORD} text")

    with pytest.raises(InvalidWork, match="not finite") as caught:
        await engine_of(spoiled).run(Embed(tuple(texts)))

    assert place == caught.value.input_index


async def test_of_several_bad_rows_the_first_is_named(spoiled: LoadedModel) -> None:
    texts = ["fine", BAD_WORD, "fine too", f"{BAD_WORD} again and again, a longer text than the others"]

    with pytest.raises(InvalidWork) as caught:
        await engine_of(spoiled).run(Embed(tuple(texts)))

    assert 1 == caught.value.input_index


async def test_calls_in_one_pass_with_a_bad_row_get_their_right_vectors(spoiled: LoadedModel) -> None:
    engine = engine_of(spoiled)
    expected = np.vstack([await vectors_of(engine, text) for text in FINE])
    calls = [text for fine in FINE for text in (fine, f"{BAD_WORD} {fine}"[:200])]

    replies = await asyncio.gather(*(engine.run(Embed((text,))) for text in calls), return_exceptions=True)

    good, bad = replies[::2], replies[1::2]
    assert all(isinstance(reply, InvalidWork) and reply.input_index == 0 for reply in bad)
    rows = np.vstack([reply.vectors for reply in good if isinstance(reply, EmbedReply)])
    assert cosines(rows, expected).min() > 0.99999


async def test_sparse_and_token_vectors_that_are_not_finite_are_refused_too(spoiled: LoadedModel) -> None:
    with pytest.raises(InvalidWork) as caught:
        await engine_of(spoiled).run(Encode(("fine", BAD_WORD), frozenset({Output.TOKENS})))

    assert 1 == caught.value.input_index


async def test_a_bad_document_is_named_among_the_pairs(minilm: Path, tmp_path: Path) -> None:
    folder = spoil(make_classifier(ENCODERS["bert"][0](), minilm, tmp_path), BAD_ID)
    engine = engine_of(load_tiny(folder))

    with pytest.raises(InvalidWork) as caught:
        await engine.run(Rerank("query", ("fine", "fine too", BAD_WORD)))

    assert 2 == caught.value.input_index


def sequence(*ids: int, chunks: tuple[tuple[int, int], ...] = ()) -> InputSequence:
    return InputSequence(list(ids), [0] * len(ids), chunks=chunks)


def prepared(count: int, compared: tuple[tuple[int, int], ...] = ()) -> PreparedSequences:
    return PreparedSequences([sequence(1)] * count, frozenset(), (), (1,) * count, compared)


def test_the_input_of_a_sequence_depends_on_the_work() -> None:
    joined = PreparedSequences([sequence(1, 2, chunks=((0, 1), (1, 2)))], frozenset(), (), (1, 1))
    rerank = prepared(4, ((0, 1), (0, 2), (0, 3)))
    pairs = prepared(5, ((0, 2), (1, 3), (1, 4)))

    assert [0, 1] == [prepared(2).input_of(place) for place in range(2)]
    assert joined.input_of(0) == 0
    # A query that all documents have is no fault of one of them.
    assert [None, 0, 1, 2] == [rerank.input_of(place) for place in range(4)]
    assert [0, 1, 0, 1, 2] == [pairs.input_of(place) for place in range(5)]
    assert 0 == prepared(2, ((0, 1),)).input_of(0)


Make = Callable[[Path, Path], Path]


@pytest.mark.parametrize(
    ("make", "work"),
    [
        (make_encoder, Embed(("fine", f"the {NEW_TOKEN} word"))),
        (make_encoder, Encode(("fine", NEW_TOKEN), frozenset({Output.DENSE}))),
        (make_classifier, Score((("fine", "text"), ("fine", NEW_TOKEN)))),
    ],
    ids=["embed", "encode", "score"],
)
async def test_a_token_beyond_the_table_is_refused_before_the_pass(
    make: Callable[..., Path], work: Work, minilm: Path, tmp_path: Path
) -> None:
    folder = add_token(make(ENCODERS["bert"][0](), minilm, tmp_path), minilm)
    engine = engine_of(load_tiny(folder))

    with pytest.raises(
        InvalidWork, match=r"the token '\[NEW\]', for which the network has no vector"
    ) as caught:
        await engine.run(work)

    assert 1 == caught.value.input_index


def test_tokens_beyond_the_table_are_a_note_of_load_and_inspection(minilm: Path, tmp_path: Path) -> None:
    folder = add_token(make_encoder(ENCODERS["bert"][0](), minilm, tmp_path), minilm)

    loaded = load_tiny(folder)
    found = inspect_folder(wire.ModelBoot("tiny", str(folder), dtype="float32"), folder)

    notes = [note for note in loaded.capabilities.notes if "vectors for 30522 tokens" in note]
    assert [True] == [NEW_TOKEN in note for note in notes]
    assert found.refusal is None
    assert set(notes) <= set(found.notes)


def test_a_whole_vocabulary_is_no_note(minilm: Path, tmp_path: Path) -> None:
    loaded = load_tiny(make_encoder(ENCODERS["bert"][0](), minilm, tmp_path))

    assert not [note for note in loaded.capabilities.notes if "vectors for" in note]


async def test_reference_texts_with_a_bad_word_are_left_out(minilm: Path, tmp_path: Path) -> None:
    shutil.copytree(minilm, tmp_path, dirs_exist_ok=True)
    # "fox" and "ok".
    spoil(tmp_path, 4419, 7929)
    backend = EngineInProcess(load(tmp_path, "m", LoadOptions("float32", "cpu")))

    reply, failure = await embed_reference_texts(backend, None, 30)

    assert isinstance(failure, InvalidWork)
    assert [True, True, False, False, False, False] == [bool(np.isnan(row).all()) for row in reply.vectors]


def test_a_network_without_a_finite_row_is_refused(minilm: Path, tmp_path: Path) -> None:
    folder = make_encoder(ENCODERS["bert"][0](), minilm, tmp_path)
    spoil(folder, *torch.arange(30522).tolist())

    with pytest.raises(ModelUnavailable, match="not finite"):
        load_tiny(folder)


def test_default_positions_are_those_of_transformers() -> None:
    found = {
        name: default_of(name, POSITION_KEYS.get(name, "max_position_embeddings"))
        for name in DEFAULT_POSITIONS
    }

    assert found == DEFAULT_POSITIONS


async def test_a_network_whose_file_states_no_positions_has_its_default(minilm: Path, tmp_path: Path) -> None:
    config = transformers.BertConfig(**SMALL | {"max_position_embeddings": 512})
    folder = make_encoder(config, minilm, tmp_path)
    stored = json.loads((folder / "config.json").read_text())
    del stored["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(stored))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"model_max_length": 1000}))

    reply = await engine_of(load_tiny(folder)).run(Embed(("word " * 800,)))

    assert isinstance(reply, EmbedReply)
    assert (512, (0,)) == (reply.tokens, reply.truncated)


@pytest.mark.parametrize(
    ("pad_id", "words", "expected"), [(1, 10, 1), (10, 10, 0), (-1, 10, 0), (None, 10, 0), (7, None, 7)]
)
def test_padding_has_a_vector(pad_id: int | None, words: int | None, expected: int) -> None:
    assert expected == padding_id(SimpleNamespace(pad_token_id=pad_id, vocab_size=words))
