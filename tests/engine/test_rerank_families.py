"""Rerankers with a template of their own, each against its model card computed by hand.

Published configuration keys, the published kind of tokenizer, a small vocabulary and random weights.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
)

from backends.contract import Lengths, Operation, Rerank, RerankReply, Score, ScoreKind, Truncate
from backends.contract.errors import InvalidWork, ModelUnavailable
from backends.recipe.options import DTypeName, RerankPrompt, TaskSettings
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import describe
from backends.torch.passes.loaded_model import LoadedModel
from tests.engine.checkpoints import DECODER
from tests.engine.engines import TEXTS, engine_on, load_tiny, run_work
from tests.engine.rerank_cards import Ids, bge_ids, encode_with, mxbai_ids, qwen3_ids, score_by_card
from tests.engine.vocabularies import write_gemma, write_qwen

QUERY = "how to parse json?"
# A line break after punctuation is where tokenizing in pieces differs from tokenizing the whole.
DOCUMENTS = (*TEXTS[:8], "what?", "does it end in a break?\n", "")
PAIRS = tuple((QUERY, document) for document in DOCUMENTS)
MOST = 900


def small(config: Callable[..., PretrainedConfig], size: int, **keys: Any) -> PretrainedConfig:
    """Return a small configuration with the published keys that matter."""
    common = DECODER | {"vocab_size": size, "max_position_embeddings": MOST, "head_dim": 8}
    return config(**common | keys)


def write_model(folder: Path, config: PretrainedConfig, kind: Any = AutoModelForCausalLM) -> Path:
    torch.manual_seed(0)
    kind.from_config(config, dtype=torch.float32).eval().save_pretrained(folder)
    return folder


def qwen3(folder: Path) -> Path:
    size = write_qwen(folder, TEXTS)
    keys = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": True}
    return write_model(folder, small(transformers.Qwen3Config, size, **keys))


def mxbai(folder: Path) -> Path:
    size = write_qwen(folder, TEXTS)
    keys = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": True}
    return write_model(folder, small(transformers.Qwen2Config, size, **keys))


def bge_gemma(folder: Path) -> Path:
    size = write_gemma(folder, TEXTS)
    keys = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "num_key_value_heads": 1}
    return write_model(folder, small(transformers.GemmaConfig, size, **keys))


# family → (published id, writer of a checkpoint, ids by its card, answers that count for and against).
CAUSAL: dict[str, tuple[str, Callable[[Path], Path], Callable[..., Ids], tuple[str, ...]]] = {
    "qwen3": ("Qwen/Qwen3-Reranker-0.6B", qwen3, qwen3_ids, ("yes", "no")),
    "mxbai-v2": ("mixedbread-ai/mxbai-rerank-large-v2", mxbai, mxbai_ids, ("1", "0")),
    "bge-gemma": ("BAAI/bge-reranker-v2-gemma", bge_gemma, bge_ids, ("Yes",)),
}


async def scores_of(model: LoadedModel, *, raw: bool = True) -> np.ndarray:
    reply = await run_work(engine_on(model), Score(PAIRS, raw_scores=raw), RerankReply)
    return reply.scores


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", CAUSAL)
async def test_scores_equal_those_of_the_model_card(family: str, dtype: DTypeName, tmp_path: Path) -> None:
    model_id, write, ids_by_card, answers = CAUSAL[family]
    folder = write(tmp_path / "model")
    rows = [ids_by_card(folder, query, document) for query, document in PAIRS]
    model = load_tiny(folder, dtype, TaskSettings(model=model_id))

    prepared = model.preparer.prepare(Score(PAIRS))
    raw, squeezed = await scores_of(model), await scores_of(model, raw=False)

    expected = score_by_card(folder, rows, answers)
    assert rows == [sequence.ids for sequence in prepared.sequences]
    np.testing.assert_allclose(raw, expected, atol=1e-4 if dtype == "float32" else 0.3)
    assert np.corrcoef(raw, expected)[0, 1] > 0.995
    np.testing.assert_allclose(squeezed, 1 / (1 + np.exp(-raw)), atol=1e-6)
    assert expected.std() > 0.1
    assert model.packed
    assert model.capabilities.score_kind is ScoreKind.SIGMOID
    assert Operation.RERANK in model.capabilities.operations


@pytest.mark.parametrize("family", CAUSAL)
def test_family_is_set_by_the_operator_or_by_the_published_name(family: str, tmp_path: Path) -> None:
    model_id, write, ids_by_card, _ = CAUSAL[family]
    folder = write(tmp_path / model_id.partition("/")[2])
    expected = [ids_by_card(folder, QUERY, "a b")]

    for settings in (
        TaskSettings(rerank_template=family),
        TaskSettings(task="rerank", model=model_id),
        TaskSettings(task="rerank", model=str(folder)),
    ):
        model = load_tiny(folder, settings=settings)
        assert expected == [
            sequence.ids for sequence in model.preparer.prepare(Rerank(QUERY, ("a b",))).sequences
        ]
    for unknown in ("someone/" + folder.name, str(folder) + "-mine", "", "Qwen3-Reranker"):
        with pytest.raises(ModelUnavailable, match=r"set `rerank_template`.*mxbai-v2.*`positive`"):
            load_tiny(folder, settings=TaskSettings(task="rerank", model=unknown))
    with pytest.raises(ModelUnavailable, match="`task: embed`"):
        load_tiny(folder)


@pytest.mark.parametrize("family", CAUSAL)
def test_instruction_takes_the_place_of_the_own_one(family: str, tmp_path: Path) -> None:
    model_id, write, ids_by_card, _ = CAUSAL[family]
    folder = write(tmp_path / "model")
    model = load_tiny(folder, settings=TaskSettings(model=model_id))
    task = "prefer {query} to news"

    assert model.capabilities.takes_instruction
    for work in (Rerank(QUERY, ("a b",), instruction=task), Score(((QUERY, "a b"),), instruction=task)):
        (sequence,) = model.preparer.prepare(work).sequences
        assert ids_by_card(folder, QUERY, "a b", task) == sequence.ids
        (bound,) = work.token_bounds(Lengths(None, pair_overhead=model.capabilities.overhead_tokens))
        assert len(sequence.ids) <= bound


@pytest.mark.parametrize("family", CAUSAL)
def test_truncation_keeps_the_prompt(family: str, tmp_path: Path) -> None:
    model_id, write, ids_by_card, _ = CAUSAL[family]
    folder = write(tmp_path / "model")
    prepare = load_tiny(folder, settings=TaskSettings(model=model_id)).preparer.prepare
    long = "apple " * 600 + "stone " * 600
    encode = encode_with(folder)
    empty = ids_by_card(folder, "q", "")

    right, left = (
        prepare(Rerank("q", ("short", long), truncate=side)) for side in (Truncate.RIGHT, Truncate.LEFT)
    )
    asked = prepare(Rerank(long, ("the document",)))

    for prepared in (right, left):
        cut = prepared.sequences[1].ids
        assert (1,) == prepared.truncated
        assert len(cut) == MOST
        assert empty[-12:] == cut[-12:]
        assert empty[:6] == cut[:6]
    assert set(encode(" stone")) & set(left.sequences[1].ids) > set(encode(" stone")) & set(
        right.sequences[1].ids
    )
    short = prepare(Rerank("q", ("short", long), max_tokens=MOST - 9))
    assert [len(right.sequences[0].ids), MOST - 9] == [len(sequence.ids) for sequence in short.sequences]
    assert empty[-12:] == short.sequences[1].ids[-12:]
    with pytest.raises(InvalidWork, match="leave no room"):
        prepare(Rerank("q", ("short", long), max_tokens=4))
    assert len(asked.sequences[0].ids) == MOST
    assert (0,) == asked.truncated
    assert empty[-12:] == asked.sequences[0].ids[-12:]
    with pytest.raises(InvalidWork, match="maximum context length"):
        prepare(Rerank("q", ("short", long), truncate=Truncate.ERROR))


async def test_counted_tokens_stay_within_the_reserved_bound(tmp_path: Path) -> None:
    for family, (model_id, write, _, _) in CAUSAL.items():
        model = load_tiny(write(tmp_path / family), settings=TaskSettings(model=model_id))
        counted = model.preparer.tokenizer.encode(PAIRS, Truncate.RIGHT).lengths

        reply = await run_work(engine_on(model), Score(PAIRS), RerankReply)

        assert sum(counted) < reply.tokens <= sum(counted) + len(PAIRS) * model.capabilities.overhead_tokens


def seq_cls(folder: Path, **keys: Any) -> Path:
    """Write Qwen3-Reranker as a classifier with one label, as its converted checkpoints are."""
    size = write_qwen(folder, TEXTS)
    keys = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 1} | keys
    return write_model(
        folder, small(transformers.Qwen3Config, size, **keys), AutoModelForSequenceClassification
    )


def classify_rows(folder: Path, rows: list[Ids]) -> np.ndarray:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return np.array([float(model(input_ids=torch.tensor([row])).logits[0, 0]) for row in rows])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_converted_classifier_reads_the_prompt_of_its_origin(dtype: DTypeName, tmp_path: Path) -> None:
    folder = seq_cls(tmp_path / "model")
    rows = [qwen3_ids(folder, query, document) for query, document in PAIRS]

    model = load_tiny(folder, dtype, TaskSettings(model="tomaarsen/Qwen3-Reranker-0.6B-seq-cls"))

    expected = classify_rows(folder, rows)
    scores = await scores_of(model)
    np.testing.assert_allclose(scores, expected, atol=1e-4 if dtype == "float32" else 0.3)
    assert np.corrcoef(scores, expected)[0, 1] > 0.995
    assert expected.std() > 0.1
    # A single text without the prompt has no score.
    assert Operation.CLASSIFY not in model.capabilities.operations


async def test_classifier_of_a_language_model_needs_a_prompt(tmp_path: Path) -> None:
    folder = seq_cls(tmp_path / "model")
    with pytest.raises(ModelUnavailable, match="do not state the prompt"):
        load_tiny(folder)
    with pytest.raises(ModelUnavailable, match="leave `positive`"):
        load_tiny(folder, settings=TaskSettings(rerank_template=RerankPrompt("{query}{document}", "yes")))

    plain = load_tiny(folder, settings=TaskSettings(rerank_template="pair"))

    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = classify_rows(folder, [tokenizer(*pair)["input_ids"] or [0] for pair in PAIRS])
    np.testing.assert_allclose(await scores_of(plain), expected, atol=1e-4)
    assert {Operation.CLASSIFY, Operation.RERANK} < plain.capabilities.operations
    # A classifier with several labels scores no pairs.
    several = seq_cls(tmp_path / "several", num_labels=2)
    assert Operation.RERANK not in load_tiny(several).capabilities.operations
    with pytest.raises(ModelUnavailable, match="no single score"):
        load_tiny(several, settings=TaskSettings(rerank_template="qwen3"))


async def test_operator_writes_the_template(tmp_path: Path) -> None:
    folder = mxbai(tmp_path / "model")
    written = RerankPrompt(
        "{instruction} | {query}\n{document} {x}?", "Yes", "No", instruction="Find {document}"
    )
    encode = encode_with(folder)

    model = load_tiny(folder, settings=TaskSettings(rerank_template=written))

    rows = [encode(f"Find {{document}} | {query}\n{document} {{x}}?") for query, document in PAIRS]
    np.testing.assert_allclose(await scores_of(model), score_by_card(folder, rows, ("Yes", "No")), atol=1e-4)
    other = model.preparer._pairs.encode([("q", "d")], Truncate.RIGHT, "Seek")
    assert [encode("Seek | q\nd {x}?")] == other.ids


@pytest.mark.parametrize(
    ("written", "error"),
    [
        (RerankPrompt("{query}", "yes"), "{document} once"),
        (RerankPrompt("{query}{document}{query}", "yes"), "{query} and"),
        (RerankPrompt("{query}{document}{instruction}", "yes"), "{instruction} if"),
        (
            RerankPrompt("{query}{document}", "yes", instruction="find"),
            "{instruction} if",
        ),
        (RerankPrompt("{query}{document}", "yes, it is"), "'yes, it is' is not one token"),
        (RerankPrompt("{query}{document}", "yes", ""), "'' is not one token"),
        (RerankPrompt("{query}{document}"), "needs a `positive` token"),
        ("pair", "needs a `positive` token"),
        ("bge-gemma", "special token, and"),
        ("mxbai-v2", None),
    ],
)
def test_refuses_templates_that_do_not_fit(written: Any, error: str | None, tmp_path: Path) -> None:
    folder = qwen3(tmp_path / "model")
    settings = TaskSettings(rerank_template=written)
    if error is None:
        load_tiny(folder, settings=settings)
        return

    with pytest.raises(ModelUnavailable, match=re.escape(error)):
        load_tiny(folder, settings=settings)
    with pytest.raises(ModelUnavailable, match=re.escape(error)):
        describe(folder, "tiny", LoadOptions("float32", "cpu", settings=settings))


ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}Task: {{ m.content }}\n{% elif m.role == 'query' %}"
    "Q: {{ m.content }}\n{% elif m.role == 'document' %}D: {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "Answer:"
)


def with_chat(folder: Path, template: str) -> Path:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder


async def test_options_of_vllm_in_the_config_name_the_answers(tmp_path: Path) -> None:
    folder = with_chat(mxbai(tmp_path / "model"), ROLES)
    path = folder / "config.json"
    plain = json.loads(path.read_text())
    rerank = TaskSettings(task="rerank")
    encode = encode_with(folder)

    for answers in (("0", "1"), ("Yes",)):
        path.write_text(json.dumps(plain | {"classifier_from_token": answers}))
        model = load_tiny(folder, settings=rerank)
        rows = [encode(f"Q: {query}\nD: {document}<|im_end|>Answer:") for query, document in PAIRS]
        np.testing.assert_allclose(
            await scores_of(model), score_by_card(folder, rows, answers[::-1]), atol=1e-4
        )
    path.write_text(json.dumps(plain | {"is_original_qwen3_reranker": True}))
    prepared = load_tiny(folder, settings=rerank).preparer.prepare(Rerank("q", ("d",)))
    assert [qwen3_ids(folder, "q", "d")] == [sequence.ids for sequence in prepared.sequences]
    # A chat alone does not name the answers.
    path.write_text(json.dumps(plain))
    with pytest.raises(ModelUnavailable, match="how it scores"):
        load_tiny(folder, settings=rerank)


async def test_classifier_with_a_chat_of_query_and_document_uses_it(tmp_path: Path) -> None:
    folder = with_chat(seq_cls(tmp_path / "model"), ROLES)
    stock = CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Identity())
    instructed = [encode_with(folder)("Task: find\nQ: q\nD: d<|im_end|>Answer:")]

    model = load_tiny(folder)

    np.testing.assert_allclose(await scores_of(model), stock.predict(list(PAIRS)), atol=1e-4)
    assert instructed == model.preparer._pairs.encode([("q", "d")], Truncate.RIGHT, "find").ids


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("JinaForRanking", "all documents of a query in one pass"),
        ("JinaVLForRanking", "images"),
        ("LayerWiseMiniCPMForCausalLM", "scoring head in each of its upper layers"),
        ("CostWiseGemmaForCausalLM", "drops tokens"),
    ],
)
@pytest.mark.parametrize("task", [None, "rerank"])
def test_refuses_rerankers_with_a_network_of_their_own(
    architecture: str, reason: str, task: Any, tmp_path: Path
) -> None:
    folder = qwen3(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))

    with pytest.raises(ModelUnavailable, match=reason):
        load_tiny(folder, settings=TaskSettings(task=task), trust_remote_code=True)


def test_refuses_a_vocabulary_without_the_first_token_of_the_prompt(tmp_path: Path) -> None:
    folder = bge_gemma(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))

    with pytest.raises(ModelUnavailable, match="special token, and"):
        load_tiny(folder, settings=TaskSettings(rerank_template="bge-gemma"))


CHATS = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "llama3": "{% for m in messages %}<|s|>{{ m['role'] }}<|e|>\n{{ m['content'] | trim }}{% endfor %}",
    "roles": ROLES,
}


@pytest.mark.parametrize("chat", CHATS)
def test_the_published_prompt_comes_before_a_chat_template(chat: str, tmp_path: Path) -> None:
    folder = with_chat(seq_cls(tmp_path / "model"), CHATS[chat])
    published = load_tiny(folder, settings=TaskSettings(model="tomaarsen/Qwen3-Reranker-0.6B-seq-cls"))
    unknown = load_tiny(folder, settings=TaskSettings(model="someone/reranker"))
    work = Rerank("q", ("d",))

    assert [qwen3_ids(folder, "q", "d")] == [
        found.ids for found in published.preparer.prepare(work).sequences
    ]
    assert not any("chat template" in note for note in published.capabilities.notes)
    # Any other is read as sentence-transformers reads it, which may be wrong.
    assert [qwen3_ids(folder, "q", "d")] != [found.ids for found in unknown.preparer.prepare(work).sequences]
    noted = [note for note in unknown.capabilities.notes if "does not name the roles query" in note]
    assert (chat != "roles") == bool(noted)
