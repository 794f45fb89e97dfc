"""Sequence classifiers of one label and many, against transformers and sentence-transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from backends.contract import (
    Classify,
    ClassifyReply,
    Operation,
    Rerank,
    RerankReply,
    Score,
    ScoreKind,
    Truncate,
    Vectors,
)
from backends.contract.errors import UnsupportedWork
from backends.recipe.options import DTypeName, TaskSettings
from tests.engine.checkpoints import DECODERS, ENCODERS, make_classifier
from tests.engine.engines import TEXTS, engine_on, load_tiny, run_work

INPUTS = (*TEXTS[:8], *zip(TEXTS[8:16], TEXTS[16:24], strict=True))


def logits_of(folder: Path, max_tokens: int) -> Vectors:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for item in INPUTS:
        parts = (item,) if isinstance(item, str) else item
        inputs = tokenizer(*parts, truncation=True, max_length=max_tokens, return_tensors="pt")
        with torch.no_grad():
            rows.append(model(**inputs).logits[0].numpy())
    return np.stack(rows)


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
async def test_scores_of_texts_and_pairs_equal_those_of_transformers(
    problem: str, minilm: Path, tmp_path: Path
) -> None:
    config = ENCODERS["bert"][0]()
    config.problem_type = problem
    config.id2label = {0: "sad", 1: "glad", 2: "mad"}
    make_classifier(config, minilm, tmp_path, labels=3)
    model = load_tiny(tmp_path)
    engine = engine_on(model)

    raw = await run_work(engine, Classify(INPUTS, raw_scores=True), ClassifyReply)
    scores = await run_work(engine, Classify(INPUTS), ClassifyReply)

    short = await run_work(engine, Classify(INPUTS, raw_scores=True, max_tokens=7), ClassifyReply)
    np.testing.assert_allclose(short.scores, logits_of(tmp_path, 7), atol=1e-4)
    assert short.tokens <= 7 * len(INPUTS)
    logits = torch.tensor(logits_of(tmp_path, model.recipe.max_tokens))
    many = problem.startswith("multi")
    np.testing.assert_allclose(raw.scores, logits, atol=1e-4)
    np.testing.assert_allclose(scores.scores, logits.sigmoid() if many else logits.softmax(1), atol=1e-4)
    assert scores.labels == model.capabilities.labels
    assert len(scores.labels) == 3
    assert raw.scores.std(axis=0).max() > 0.05


async def test_labels_have_the_names_and_order_of_the_checkpoint(minilm: Path, tmp_path: Path) -> None:
    config = ENCODERS["bert"][0]()
    config.num_labels = 3
    config.id2label = {2: "mad", 0: "sad", 1: "glad"}
    make_classifier(config, minilm, tmp_path, labels=3)
    model = load_tiny(tmp_path)

    assert model.capabilities.labels == ("sad", "glad", "mad")
    assert Operation.RERANK not in model.capabilities.operations
    with pytest.raises(UnsupportedWork):
        await engine_on(model).run(Rerank("a", ("b",)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_model_with_one_label_reranks_and_classifies(
    dtype: DTypeName, minilm: Path, tmp_path: Path
) -> None:
    make_classifier(ENCODERS["bert"][0](), minilm, tmp_path)
    engine = engine_on(load_tiny(tmp_path, dtype))
    pairs = tuple(zip(TEXTS[:8], TEXTS[8:16], strict=True))

    classified = await run_work(engine, Classify(pairs), ClassifyReply)
    scored = await run_work(engine, Score(pairs), RerankReply)
    single = [await run_work(engine, Rerank(q, (d,), raw_scores=True), RerankReply) for q, d in pairs]
    raw = await run_work(engine, Score(pairs, raw_scores=True), RerankReply)

    stock = CrossEncoder(str(tmp_path), device="cpu")
    close = 1e-4 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(scored.scores, stock.predict(list(pairs)), atol=close)
    np.testing.assert_allclose(classified.scores[:, 0], scored.scores, atol=1e-6)
    np.testing.assert_allclose(raw.scores, [reply.scores[0] for reply in single], atol=close)
    assert engine._loaded.capabilities.score_kind is ScoreKind.SIGMOID


async def test_reply_reports_truncated_inputs(minilm: Path, tmp_path: Path) -> None:
    make_classifier(ENCODERS["bert"][0](), minilm, tmp_path, labels=2)

    reply = await run_work(
        engine_on(load_tiny(tmp_path)), Classify(("short", "word " * 300, ("a", "b " * 300))), ClassifyReply
    )

    assert reply.truncated == (1, 2)
    assert reply.tokens == 3 + 130 + 130


@pytest.mark.parametrize("labels", [1, 3])
async def test_default_prompt_is_put_before_texts_and_queries(
    labels: int, minilm: Path, tmp_path: Path
) -> None:
    make_classifier(ENCODERS["bert"][0](), minilm, tmp_path / "plain", labels=labels)
    stock = CrossEncoder(
        str(tmp_path / "plain"),
        device="cpu",
        prompts={"ask": "judge this: "},
        default_prompt_name="ask",
        activation_fn=torch.nn.Identity(),
    )
    stock.save(str(tmp_path / "stock"))
    model = load_tiny(tmp_path / "stock")
    engine, pairs = engine_on(model), INPUTS[8:]

    classified = await run_work(engine, Classify(pairs, raw_scores=True), ClassifyReply)

    expected = stock.predict(list(pairs)).reshape(len(pairs), labels)
    np.testing.assert_allclose(classified.scores, expected, atol=1e-4)
    if labels == 1:
        scored = await run_work(engine, Score(pairs, raw_scores=True), RerankReply)
        np.testing.assert_allclose(scored.scores, expected[:, 0], atol=1e-4)
        bare = model.preparer.tokenizer.encode(pairs, Truncate.RIGHT).lengths
        assert sum(bare) < scored.tokens <= sum(bare) + len(pairs) * model.capabilities.overhead_tokens


async def test_score_is_read_before_an_end_that_is_the_padding_token(minilm: Path, tmp_path: Path) -> None:
    config = DECODERS["qwen3"]()
    config.pad_token_id = 102
    make_classifier(config, minilm, tmp_path, labels=3)
    edit_limit(tmp_path)
    model = load_tiny(tmp_path)

    reply = await run_work(engine_on(model), Classify(TEXTS[:8], raw_scores=True), ClassifyReply)

    # Its tokenizer ends each text in 102.
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        rows = [
            network(**tokenizer(text, truncation=True, max_length=100, return_tensors="pt")).logits[0]
            for text in TEXTS[:8]
        ]
    np.testing.assert_allclose(reply.scores, torch.stack(rows), atol=1e-4)


async def test_number_of_labels_takes_precedence_over_their_names(minilm: Path, tmp_path: Path) -> None:
    make_classifier(ENCODERS["bert"][0](), minilm, tmp_path, labels=3)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_labels": 3, "id2label": {"0": "a"}}))

    capabilities = load_tiny(tmp_path).capabilities

    assert capabilities.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert Operation.RERANK not in capabilities.operations


def test_notes_name_what_differs_from_the_library(minilm: Path, tmp_path: Path) -> None:
    make_classifier(ENCODERS["bert"][0](), minilm, tmp_path)
    path = tmp_path / "config.json"
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sentence_transformers": identity}))

    (note,) = load_tiny(tmp_path).capabilities.notes
    pooled = load_tiny(tmp_path, settings=TaskSettings(pooling="cls")).capabilities.notes

    assert "`activation_fn` of the checkpoint is Identity" in note
    assert "has a classifier, which the settings of the upstream leave out" in pooled[0]


def edit_limit(folder: Path) -> None:
    """Let the tokenizer cut texts at 100 tokens."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 100}))
