"""Tests of token counts, lengths and prompts from a checkpoint's small files."""

import asyncio
import json
from pathlib import Path

import pytest

from backends.contract import Detokenize, Embed, Rerank, Tokenize, TokenizerSource, Truncate, Work
from backends.contract.errors import AttemptTimedOut, InvalidWork, ModelUnavailable
from backends.contract.texts import DETOKENIZE_IDS_MAX, TOKENIZE_BYTES_MAX
from backends.recipe.checkpoint import read_input_rules
from backends.recipe.recipe import InputRules
from backends.tokens.counting import CHUNK_CHARACTERS, apply_prompt, open_token_counter
from backends.tokens.tokenizer import TokenCount
from tests.fakes.checkpoint import write_small_files

RULES = InputRules(16, {"query": "query: ", "passage": ""}, None)
LONG = "w " * 20


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (Embed(("a", "b c")), TokenCount(3 + 4, ())),
        (Embed(("a", LONG)), TokenCount(3 + 16, (1,))),
        (Embed((LONG, "a"), truncate=Truncate.LEFT), TokenCount(16 + 3, (0,))),
        (Rerank("q", ("a", "")), TokenCount(5 + 4, ())),
        (Rerank(LONG, ("a", "b")), TokenCount(16 + 16, (0, 1))),
    ],
    ids=str,
)
async def test_counts_tokens_after_truncation(
    small_files: str, work: Embed | Rerank, expected: TokenCount
) -> None:
    assert expected == await (await open_token_counter(TokenizerSource(small_files), 5.0)).count(work, 5.0)


async def test_refuses_inputs_that_must_not_be_truncated(small_files: str) -> None:
    counter = await open_token_counter(TokenizerSource(small_files), 5.0)
    with pytest.raises(
        InvalidWork, match=r"maximum context length is 16 tokens; this input has 22 tokens"
    ) as refused:
        await counter.count(Embed(("a", LONG), truncate=Truncate.ERROR), 5.0)
    assert 1 == refused.value.input_index


async def test_counts_in_chunks_as_at_once(small_files: str) -> None:
    counter = await open_token_counter(TokenizerSource(small_files), 5.0)
    # The second chunk has the long texts.
    short = CHUNK_CHARACTERS // len("b c") + 1
    texts = ("b c",) * short + (LONG, "", "d e f g", LONG)

    expected = TokenCount(4 * short + 16 + 2 + 6 + 16, (short, short + 3))
    assert expected == await counter.count(Embed(texts), 5.0)
    with pytest.raises(InvalidWork, match="22 tokens") as refused:
        await counter.count(Embed(texts, truncate=Truncate.ERROR), 5.0)
    assert short == refused.value.input_index


async def test_a_large_batch_does_not_hold_the_threads_from_a_small_one(small_files: str) -> None:
    counter = await open_token_counter(TokenizerSource(small_files), 5.0)
    # Of twenty chunks each.
    works = [Embed(("w " * 1024,) * (20 * CHUNK_CHARACTERS // 2048)) for _ in range(2)]
    large = [asyncio.create_task(counter.count(work, 60)) for work in works]
    await asyncio.sleep(0)

    assert TokenCount(3, ()) == await counter.count(Embed(("a",)), 60)
    assert not any(task.done() for task in large)
    assert [16 * 320] * 2 == [count.tokens for count in await asyncio.gather(*large)]


async def test_count_times_out(small_files: str) -> None:
    counter = await open_token_counter(TokenizerSource(small_files), 5.0)
    with pytest.raises(AttemptTimedOut):
        await counter.count(Embed(("a",)), 0.0)


async def test_missing_files_raise_model_unavailable(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable):
        await open_token_counter(TokenizerSource(str(tmp_path)), 5.0)


@pytest.mark.parametrize(
    ("work", "rules", "expected"),
    [
        (Embed(("a",), prompt_name="query"), RULES, Embed(("query: a",))),
        (Embed(("a",), prompt_name="passage"), RULES, Embed(("a",))),
        (Tokenize(("a",), prompt_name="query"), RULES, Tokenize(("query: a",))),
        (Embed(("a",)), RULES, Embed(("a",))),
        (Embed(("a",)), InputRules(16, {"query": "query: "}, "query"), Embed(("query: a",))),
        (
            Embed(("a",), prompt_name=""),
            InputRules(16, {"query": "query: "}, "query"),
            Embed(("a",), prompt_name=""),
        ),
        (Embed(("a",)), None, Embed(("a",))),
        (Rerank("q", ("a",)), RULES, Rerank("q", ("a",))),
    ],
    ids=str,
)
def test_prepends_the_prompt_to_each_input(work: Work, rules: InputRules | None, expected: Work) -> None:
    assert expected == apply_prompt(work, rules)


@pytest.mark.parametrize("rules", [RULES, None])
def test_unknown_prompt_is_invalid_work(rules: InputRules | None) -> None:
    with pytest.raises(InvalidWork, match="nowhere"):
        apply_prompt(Embed(("a",), prompt_name="nowhere"), rules)


def test_reads_input_rules_of_models_the_engine_does_not_support(tmp_path: Path) -> None:
    write_small_files(tmp_path)
    modules = [
        {"idx": 0, "name": "0", "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Odd", "type": "sentence_transformers.models.WordWeights"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "0_Transformer").mkdir()
    (tmp_path / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')

    assert InputRules(9, {"query": "query: "}, None) == read_input_rules(tmp_path)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Tokenize(("é" * TOKENIZE_BYTES_MAX,)), "bytes of text"),
        (Detokenize(((1,) * DETOKENIZE_IDS_MAX, (1,))), "ids in a request"),
    ],
)
async def test_refuses_work_with_a_huge_reply(
    small_files: str, work: Tokenize | Detokenize, message: str
) -> None:
    counter = await open_token_counter(TokenizerSource(small_files), 5.0)
    with pytest.raises(InvalidWork, match=message):
        await counter.run(work, 5.0)
