"""Recognition of checkpoints, settings of the operator, and code that must not run."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from backends.contract import (
    Detokenize,
    DetokenizeReply,
    Embed,
    EmbedReply,
    Encode,
    EncodeReply,
    Operation,
    Output,
    TermWeights,
    Truncate,
)
from backends.contract.errors import InvalidWork, ModelUnavailable
from backends.recipe.checkpoint import read_recipe
from backends.recipe.files import CheckpointFiles
from backends.recipe.kinds import recognize
from backends.recipe.notes import pooling_notes
from backends.recipe.options import Pooling, TaskSettings
from backends.recipe.recipe import ModelKind
from backends.tokens.tokenizer import open_tokenizer
from backends.torch import wire
from tests.engine.checkpoints import ENCODERS, make_classifier, make_encoder, make_sentence_model
from tests.engine.engines import TEXTS, encode, engine_on, load_tiny, run_work

NO_SETTINGS = TaskSettings()


def modules(*kinds: str) -> str:
    return json.dumps(
        [
            {"type": f"sentence_transformers.models.{kind}", "path": kind if place else ""}
            for place, kind in enumerate(kinds)
        ]
    )


@pytest.mark.parametrize(
    ("architecture", "listed", "model_type", "settings", "kind"),
    [
        ("BertModel", [], None, NO_SETTINGS, "dense"),
        ("BertForMaskedLM", [], None, NO_SETTINGS, "dense"),
        ("BertForMaskedLM", [], None, TaskSettings(pooling="splade"), "sparse"),
        ("BertForMaskedLM", ["MLMTransformer", "SpladePooling"], "SparseEncoder", NO_SETTINGS, "sparse"),
        ("BertModel", ["Transformer", "Dense"], "ColBERT", NO_SETTINGS, "multivector"),
        ("HF_ColBERT", [], None, NO_SETTINGS, "multivector"),
        ("BertForSequenceClassification", [], None, NO_SETTINGS, "classifier"),
        ("BertForSequenceClassification", ["Transformer"], "CrossEncoder", NO_SETTINGS, "classifier"),
        ("BertForSequenceClassification", ["Transformer", "Pooling"], None, NO_SETTINGS, "dense"),
        ("BertForSequenceClassification", [], None, TaskSettings(task="embed"), "dense"),
        ("Qwen3ForCausalLM", [], None, TaskSettings(task="embed"), "dense"),
        ("Qwen3ForCausalLM", [], None, TaskSettings(pooling="last_token"), "dense"),
        ("Qwen2ForCausalLM", ["Transformer", "Pooling", "Normalize"], None, NO_SETTINGS, "dense"),
        ("Qwen3ForCausalLM", [], None, TaskSettings(task="rerank"), "language"),
        ("Qwen3ForCausalLM", [], None, TaskSettings(rerank_template="qwen3"), "language"),
        ("Qwen3ForCausalLM", [], None, TaskSettings(model="Qwen/Qwen3-Reranker-4B"), "language"),
        ("Qwen3ForCausalLM", ["Transformer", "LogitScore"], "CrossEncoder", NO_SETTINGS, "language"),
    ],
)
def test_recognizes_the_kind_of_a_model_from_its_files(
    architecture: str,
    listed: list[str],
    model_type: str | None,
    settings: TaskSettings,
    kind: ModelKind,
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    if listed:
        (tmp_path / "modules.json").write_text(modules(*listed))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"model_type": model_type}))

    assert kind == recognize(CheckpointFiles(tmp_path), settings)


def test_refuses_a_language_model_without_a_stated_purpose(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))

    with pytest.raises(ModelUnavailable, match=r"`task: embed` and `pooling`.*`rerank_template`"):
        recognize(CheckpointFiles(tmp_path), NO_SETTINGS)


def test_refuses_a_cross_encoder_that_pools(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(modules("Transformer", "Pooling", "Dense"))
    (tmp_path / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')

    with pytest.raises(ModelUnavailable, match="CrossEncoder without a classifier"):
        recognize(CheckpointFiles(tmp_path), NO_SETTINGS)


def test_error_names_an_unsupported_module(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(modules("Transformer", "SpladePooling", "CNN"))

    with pytest.raises(ModelUnavailable, match="module CNN"):
        recognize(CheckpointFiles(tmp_path), NO_SETTINGS)


async def test_operator_can_set_the_pooling(minilm: Path, tmp_path: Path) -> None:
    encoder = make_encoder(ENCODERS["bert"][0](), minilm, tmp_path / "encoder")
    stock = make_sentence_model(encoder, tmp_path / "sentence", "lasttoken")
    model = load_tiny(encoder, settings=TaskSettings(pooling="last_token"))

    reply = await run_work(engine_on(model), Embed(tuple(TEXTS[:8])), EmbedReply)

    expected = stock.encode(TEXTS[:8], normalize_embeddings=True)
    short = [i for i, n in enumerate(reply.input_tokens or ()) if n < 64]
    np.testing.assert_allclose(reply.vectors[short], expected[short], atol=1e-5)
    assert len(short) > 4
    assert model.capabilities.pooling == "lasttoken"


@pytest.mark.parametrize("document", ["document", "passage", "corpus"])
async def test_prompts_by_role_equal_those_of_sentence_transformers(
    document: str, minilm: Path, tmp_path: Path
) -> None:
    # The prompts of EmbeddingGemma.
    prompts = {"query": "task: search result | query: ", document: "title: none | text: "}
    encoder = make_encoder(ENCODERS["bert"][0](), minilm, tmp_path / "encoder")
    reference = make_sentence_model(encoder, tmp_path / "sentence", "mean")
    # Written by hand as in older checkpoints: the current library adds empty prompts for every role.
    (tmp_path / "sentence" / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    reference.prompts = prompts
    engine = engine_on(load_tiny(tmp_path / "sentence"))

    for role, encoded in (
        ("query", reference.encode_query(TEXTS, normalize_embeddings=True)),
        ("document", reference.encode_document(TEXTS, normalize_embeddings=True)),
    ):
        reply = await run_work(engine, Embed(tuple(TEXTS), prompt_name=role), EmbedReply)
        np.testing.assert_allclose(reply.vectors, encoded, atol=1e-5)


async def test_token_vectors_are_the_last_hidden_states(minilm: Path, tmp_path: Path) -> None:
    encoder = make_encoder(ENCODERS["mpnet"][0](), minilm, tmp_path / "encoder")
    stock = make_sentence_model(encoder, tmp_path / "sentence", "mean")
    model = load_tiny(tmp_path / "sentence")

    reply = await encode(engine_on(model), TEXTS, Output.TOKENS)

    expected = stock.encode(TEXTS, output_value="token_embeddings")
    for found, other in zip(reply.token_vectors or (), expected, strict=True):
        np.testing.assert_allclose(found, other, atol=1e-4)
    assert {Output.DENSE, Output.TOKENS} == model.capabilities.outputs
    assert not model.packed


async def test_detokenizes_ids(minilm: Path, tmp_path: Path) -> None:
    engine = engine_on(load_tiny(make_classifier(ENCODERS["bert"][0](), minilm, tmp_path)))
    ids = tuple(engine._loaded.preparer.tokenizer.encode(["Hello world"], "right").ids[0])

    kept = await run_work(engine, Detokenize((ids,), skip_special_tokens=False), DetokenizeReply)
    skipped = await run_work(engine, Detokenize((ids, ())), DetokenizeReply)

    assert kept.texts == ("[CLS] hello world [SEP]",)
    assert skipped.texts == ("hello world", "")
    for wrong in (-1, 10**6, 2**40):
        with pytest.raises(InvalidWork, match=str(wrong)):
            await engine.run(Detokenize(((7592, wrong),)))


def test_arrays_of_a_reply_survive_the_socket() -> None:
    floats = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((1, 3), dtype=np.float32)]
    terms = TermWeights(np.array([3, 70000], dtype=np.int32), np.array([0.5, 2], dtype=np.float32))
    empty = TermWeights(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32))
    sent = EncodeReply(5, floats[0], (terms, empty), tuple(floats), tuple(floats), (1,), (2, 3))

    got = wire.reply_decoder.decode(wire.encoder.encode(sent))

    assert isinstance(got, EncodeReply)
    assert got.sparse is not None
    np.testing.assert_array_equal(got.dense, floats[0])
    np.testing.assert_array_equal(got.sparse[0].indices, [3, 70000])
    assert (got.sparse[0].indices.dtype, got.sparse[1].values.dtype) == (np.int32, np.float32)
    assert [(2, 3), (1, 3)] == [vectors.shape for vectors in got.multivector or ()]
    assert (got.truncated, got.input_tokens) == ((1,), (2, 3))
    with pytest.raises(TypeError):
        wire.encoder.encode(np.zeros(2))


def test_work_survives_the_socket() -> None:
    work = Encode(("a",), frozenset({Output.SPARSE, Output.DENSE}), dimensions=3)

    assert work == wire.request_decoder.decode(wire.encoder.encode(wire.Request(work, 1.0))).work


async def test_reports_the_operations_of_a_dense_model(minilm: Path, tmp_path: Path) -> None:
    model = load_tiny(make_encoder(ENCODERS["bert"][0](), minilm, tmp_path))

    assert model.capabilities.operations == {
        Operation.EMBED,
        Operation.ENCODE,
        Operation.TOKENIZE,
        Operation.DETOKENIZE,
    }
    with pytest.raises(InvalidWork, match="no inputs"):
        await engine_on(model).run(Embed(()))


@pytest.mark.parametrize(
    ("name", "pooling", "notes"),
    [
        ("org/plain", None, ["no modules.json"]),
        ("cambridgeltl/SapBERT-from-PubMedBERT-fulltext", None, ["no modules.json", "`pooling: cls`"]),
        ("cambridgeltl/SapBERT-from-PubMedBERT-fulltext-mean-token", None, ["no modules.json"]),
        ("princeton-nlp/sup-simcse-bert-base-uncased", None, ["no modules.json", "does not apply"]),
        ("princeton-nlp/unsup-simcse-bert-base-uncased", None, ["no modules.json", "`pooling: cls`"]),
        ("ncbi/MedCPT-Query-Encoder", "cls", []),
    ],
)
def test_a_pooling_that_no_file_states_is_noted(
    name: str, pooling: Pooling | None, notes: list[str], minilm: Path, tmp_path: Path
) -> None:
    files = CheckpointFiles(make_encoder(ENCODERS["bert"][0](), minilm, tmp_path))
    settings = TaskSettings(model=name, pooling=pooling)

    found = [*pooling_notes(files, read_recipe(tmp_path, settings), settings)]

    assert len(notes) == len(found)
    assert all(part in note for part, note in zip(notes, found, strict=True))


def test_modules_without_pooling_need_a_setting(minilm: Path, tmp_path: Path) -> None:
    make_encoder(ENCODERS["bert"][0](), minilm, tmp_path)
    (tmp_path / "modules.json").write_text(modules("Transformer", "Normalize"))

    with pytest.raises(ModelUnavailable, match=r"lists no Pooling .* set `pooling`"):
        recognize(CheckpointFiles(tmp_path), NO_SETTINGS)
    assert recognize(CheckpointFiles(tmp_path), TaskSettings(pooling="cls")) == "dense"


def test_special_tokens_in_a_text_are_those_of_its_library(minilm: Path) -> None:
    text = "one [SEP] two [CLS][MASK]"

    ids = open_tokenizer(minilm, 64).encode([text], Truncate.RIGHT).ids[0]

    assert ids == AutoTokenizer.from_pretrained(minilm)(text).input_ids
    assert {101, 102, 103} < set(ids[1:-1])
