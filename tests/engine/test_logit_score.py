"""Language models with the module LogitScore, as sentence-transformers writes them, against that library."""

import json
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import CrossEncoder
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.contract import Operation, Score, Truncate
from backends.contract import RerankReply as Reply
from backends.contract.errors import ModelUnavailable
from backends.recipe.options import RerankPrompt, TaskSettings
from tests.engine.checkpoints import DECODERS, ENCODERS, make_encoder, make_language_model
from tests.engine.engines import TEXTS, engine_on, load_tiny, run_work

PAIRS = tuple(zip(TEXTS[:8], TEXTS[8:16], strict=True))
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
    return make_language_model(config, minilm, tmp_path / "plain", AutoModelForCausalLM)


def with_template(checkpoint: Path, template: str) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(checkpoint)
    return checkpoint


def saved(stock: CrossEncoder, folder: Path) -> Path:
    stock.save(str(folder))
    return folder


async def test_uses_template_and_tokens_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    prompts = {"web": "find passages"}
    source = str(with_template(checkpoint, TEMPLATE))
    stock = CrossEncoder(source, device="cpu", prompts=prompts, default_prompt_name="web")
    model = load_tiny(saved(stock, tmp_path / "stock"))

    scored = await run_work(engine_on(model), Score(PAIRS), Reply)
    instructed = model.preparer._pairs.encode(PAIRS, Truncate.RIGHT, "seek news")

    np.testing.assert_allclose(scored.scores, stock.predict(list(PAIRS)), atol=1e-4)
    assert scored.scores.std() > 0.01
    expected = stock.preprocess(list(PAIRS), prompt="seek news")
    rows = zip(expected["input_ids"].tolist(), expected["attention_mask"].tolist(), strict=True)
    assert [[id_ for id_, read in zip(*row, strict=True) if read] for row in rows] == instructed.ids
    assert {Operation.RERANK, Operation.TOKENIZE, Operation.DETOKENIZE} == model.capabilities.operations


async def test_joins_the_texts_plainly_without_a_chat_template(checkpoint: Path, tmp_path: Path) -> None:
    prompts = {"web": "find the passage: "}
    stock = CrossEncoder(str(checkpoint), device="cpu", prompts=prompts, default_prompt_name="web")
    model = load_tiny(saved(stock, tmp_path / "stock"))

    scored = await run_work(engine_on(model), Score(PAIRS), Reply)

    np.testing.assert_allclose(scored.scores, stock.predict(list(PAIRS)), atol=1e-4)
    assert scored.scores.std() > 0.01
    # The prompt costs the tokens that the gateway reserves.
    counted = model.preparer.tokenizer.encode(PAIRS, Truncate.RIGHT).lengths
    assert sum(counted) < scored.tokens <= sum(counted) + len(PAIRS) * model.capabilities.overhead_tokens


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no such role') }}", "{% for m in messages %}{{ m['role'] }}{% endfor %}"],
)
async def test_refuses_a_chat_template_without_the_roles(
    template: str, checkpoint: Path, tmp_path: Path
) -> None:
    stock = CrossEncoder(str(with_template(checkpoint, template)), device="cpu")
    folder = saved(stock, tmp_path / "stock")

    with pytest.raises(ModelUnavailable, match="without the roles query and document; set `rerank_template`"):
        load_tiny(folder)

    written = RerankPrompt("{query} : {document}", "yes", "no")
    model = load_tiny(folder, settings=TaskSettings(rerank_template=written))
    (ids,) = model.preparer._pairs.encode([("a", "b")], Truncate.RIGHT).ids
    assert ids == model.preparer.tokenizer.ids(["a : b"])[0]


async def test_checkpoint_takes_precedence_over_its_published_name(checkpoint: Path, tmp_path: Path) -> None:
    stock = CrossEncoder(str(with_template(checkpoint, TEMPLATE)), device="cpu")
    folder = saved(stock, tmp_path / "stock")
    score = json.loads((folder / "1_LogitScore" / "config.json").read_text())
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(score | {"false_token_id": None}))
    stock[1].false_token_id = None

    model = load_tiny(folder, settings=TaskSettings(model="mixedbread-ai/mxbai-rerank-base-v2"))

    scored = await run_work(engine_on(model), Score(PAIRS), Reply)
    np.testing.assert_allclose(scored.scores, stock.predict(list(PAIRS)), atol=1e-4)


def test_rejects_a_model_that_cannot_rerank(minilm: Path, tmp_path: Path) -> None:
    make_encoder(ENCODERS["bert"][0](), minilm, tmp_path)

    with pytest.raises(ModelUnavailable, match="is no reranker"):
        load_tiny(tmp_path, settings=TaskSettings(task="rerank"))
    with pytest.raises(ModelUnavailable, match="no single score"):
        load_tiny(tmp_path, settings=TaskSettings(rerank_template="qwen3"))
