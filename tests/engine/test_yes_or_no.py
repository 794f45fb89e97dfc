"""Causal language models that rerank by their next word, against transformers and sentence-transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.contract import Operation, Rerank, RerankReply, Score, ScoreKind, Truncate
from backends.errors import InvalidWork, ModelUnavailable
from backends.torch.loader import DTypeName
from backends.torch.options import TaskSettings
from backends.torch.template import QWEN3
from tests.engine.checkpoints import DECODERS, ENCODERS, make_encoder, make_language_model
from tests.engine.engines import TEXTS, engine_on, load_tiny, run_work

QUERY, DOCUMENTS = "how to parse json", tuple(TEXTS[:10])
RERANK = TaskSettings(task="rerank")
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}Task {{ message['content'] }} "
    "{% elif message['role'] == 'query' %}Query {{ message['content'] }} "
    "{% elif message['role'] == 'document' %}Document {{ message['content'] }} {% endif %}{% endfor %}"
    "Answer :"
)


@pytest.fixture
def checkpoint(minilm: Path, tmp_path: Path) -> Path:
    config = DECODERS["qwen3"]()
    config.max_position_embeddings = 400
    folder = make_language_model(config, minilm, tmp_path / "plain", AutoModelForCausalLM)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 400}))
    return folder


def score_by_card(folder: Path, query: str, document: str) -> float:
    """Score as in the model card of Qwen3-Reranker: log-odds of yes over no after the last token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = QWEN3.before + query + QWEN3.between + document + QWEN3.after
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        logits = model(input_ids=inputs["input_ids"]).logits[0, -1]
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    return float(logits[yes] - logits[no])


async def test_ignores_a_template_without_query_roles(checkpoint: Path) -> None:
    before = (
        await run_work(engine_on(load_tiny(checkpoint, settings=RERANK)), Rerank("q", ("d",)), RerankReply)
    ).scores
    for other in (
        "{{ raise_exception('no such role') }}",
        "{% for m in messages %}{{ m['role'] }}{% endfor %}",
    ):
        (checkpoint / "chat_template.jinja").write_text(other)

        reply = await run_work(
            engine_on(load_tiny(checkpoint, settings=RERANK)), Rerank("q", ("d",)), RerankReply
        )

        np.testing.assert_allclose(reply.scores, before, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_scores_without_a_template_follow_the_model_card(dtype: DTypeName, checkpoint: Path) -> None:
    model = load_tiny(checkpoint, dtype, RERANK)
    engine = engine_on(model)

    raw = await run_work(engine, Rerank(QUERY, DOCUMENTS, raw_scores=True), RerankReply)
    squeezed = await run_work(engine, Rerank(QUERY, DOCUMENTS), RerankReply)

    expected = np.array([score_by_card(checkpoint, QUERY, document) for document in DOCUMENTS])
    close = 1e-4 if dtype == "float32" else 0.1
    np.testing.assert_allclose(raw.scores, expected, atol=close)
    np.testing.assert_allclose(squeezed.scores, 1 / (1 + np.exp(-raw.scores)), atol=1e-6)
    assert model.packed
    assert expected.std() > 0.2
    assert model.capabilities.score_kind is ScoreKind.SIGMOID


async def test_uses_template_and_words_of_a_sentence_transformers_checkpoint(
    checkpoint: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(checkpoint)
    stock = CrossEncoder(
        str(checkpoint), device="cpu", prompts={"web": "find passages"}, default_prompt_name="web"
    )
    stock.save(str(tmp_path / "stock"))
    model = load_tiny(tmp_path / "stock")
    pairs = tuple(zip(TEXTS[:8], TEXTS[8:16], strict=True))

    scored = await run_work(engine_on(model), Score(pairs), RerankReply)

    np.testing.assert_allclose(scored.scores, stock.predict(list(pairs)), atol=1e-4)
    assert scored.scores.std() > 0.01
    assert {Operation.RERANK, Operation.TOKENIZE, Operation.DETOKENIZE} == model.capabilities.operations


async def test_truncation_cuts_only_the_document(checkpoint: Path) -> None:
    model = load_tiny(checkpoint, settings=RERANK)
    engine = engine_on(model)
    long = "apple " * 500 + "stone " * 500
    room = model.recipe.max_tokens

    right = await run_work(engine, Rerank("q", ("short", long)), RerankReply)
    left = await run_work(engine, Rerank("q", ("short", long), truncate=Truncate.LEFT), RerankReply)
    pieces = [
        model.preparer.prepare(Rerank("q", (long,), truncate=side)).sequences[0].ids
        for side in (Truncate.RIGHT, Truncate.LEFT)
    ]

    first, last = (model.preparer.tokenizer.token_id(name) for name in ("apple", "stone"))
    (closing,) = model.preparer.tokenizer.ids([QWEN3.after])
    assert right.truncated == left.truncated == (1,)
    assert [room, room] == [len(ids) for ids in pieces]
    assert all(ids[-len(closing) :] == closing for ids in pieces)
    assert (first in pieces[0], last in pieces[0]) == (True, False)
    assert (first in pieces[1], last in pieces[1]) == (False, True)
    with pytest.raises(InvalidWork, match="maximum context length"):
        await engine.run(Rerank("q", ("short", long), truncate=Truncate.ERROR))


async def test_counted_tokens_stay_within_the_reserved_bound(checkpoint: Path) -> None:
    model = load_tiny(checkpoint, settings=RERANK)

    reply = await run_work(engine_on(model), Rerank(QUERY, ("a", "b c")), RerankReply)

    counted = model.preparer.tokenizer.encode([(QUERY, "a"), (QUERY, "b c")], Truncate.RIGHT).lengths
    most = sum(counted) + 2 * model.capabilities.overhead_tokens
    assert sum(counted) < reply.tokens <= most


def test_rejects_a_model_that_cannot_rerank(minilm: Path, tmp_path: Path) -> None:
    make_encoder(ENCODERS["bert"][0](), minilm, tmp_path)

    with pytest.raises(ModelUnavailable, match="is no reranker"):
        load_tiny(tmp_path, settings=RERANK)
