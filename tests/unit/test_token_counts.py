"""Count of a call's tokens: equal to the tokenizer's own, in chunks, and stopped in time."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from backends.checkpoints.locations import DEFAULT_MODEL, locate_tokenizer
from backends.contract import ModelInput, Truncate
from backends.tokens.tokenizer import TextCounter, open_counter, open_tokenizer
from gateway.upstreams.fair_threads import CHUNK_CHARACTERS, Claim, FairThreads
from gateway.upstreams.model_inputs import CHUNK_INPUTS, TokenCount, count_here
from tests.fakes.checkpoint import write_small_files

CHECKPOINT = locate_tokenizer(DEFAULT_MODEL)
COUNTER = open_counter(CHECKPOINT)
REFERENCES = {most: open_tokenizer(CHECKPOINT, most) for most in (8, 512)}
CLAIM = Claim("a")
TEXTS = st.one_of(
    st.text(max_size=30),
    st.text("ab é中\u0301\u200b\t.-", max_size=40),
    st.integers(1, 120).map(lambda length: "x" * length),
    st.integers(1, 700).map(lambda length: "a " * length),
)


class RecordingCounter(TextCounter):
    """Counter that records the texts it was given."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Tokenizer.from_file(str(folder / "tokenizer.json")))
        self.texts: list[list[str]] = []

    def count(self, texts: Sequence[str]) -> list[int]:
        self.texts.append(list(texts))
        return super().count(texts)


async def pass_all(_: int) -> None:
    """Let every count go on."""


async def counted(counter: TextCounter, inputs: Sequence[ModelInput], prompt: str, most: int) -> list[int]:
    return await TokenCount(counter, inputs, prompt, most).run(FairThreads(), CLAIM, pass_all)


@pytest.mark.parametrize("most", REFERENCES)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6), prompt=st.sampled_from(["", "query: ", "qu"]))
@settings(max_examples=25, deadline=None)
async def test_counts_texts_as_the_tokenizer_does(texts: list[str], prompt: str, most: int) -> None:
    expected = REFERENCES[most].encode([prompt + text for text in texts], Truncate.RIGHT).lengths

    assert expected == count_here(COUNTER, texts, prompt, most)
    assert expected == await counted(COUNTER, texts, prompt, most)


@pytest.mark.parametrize("most", REFERENCES)
@given(pairs=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
async def test_counts_pairs_as_the_tokenizer_does(pairs: list[tuple[str, str]], most: int) -> None:
    expected = REFERENCES[most].encode(pairs, Truncate.RIGHT).lengths

    assert expected == await counted(COUNTER, pairs, "", most)


async def test_counts_in_chunks_in_the_order_of_the_inputs(tmp_path: Path) -> None:
    counter = RecordingCounter(write_small_files(tmp_path))
    long = "d " * (CHUNK_CHARACTERS // 2 + 1)

    assert [4, 3, 512, 2, 4] == await counted(counter, ["a b", "c", long, "", "j k"], "", 512)
    assert [["a b", "c"], [long], ["", "j k"]] == counter.texts


async def test_tokenizes_the_query_of_a_rerank_once(tmp_path: Path) -> None:
    counter = RecordingCounter(write_small_files(tmp_path))
    query = "long query"
    pairs = [(query, f"document {number}") for number in range(2 * CHUNK_INPUTS + 1)]

    assert [7] * len(pairs) == await counted(counter, pairs, "", 16)
    assert 3 == len(counter.texts)
    assert 1 == sum(texts.count(query) for texts in counter.texts)


async def test_reads_no_more_of_a_text_than_the_model_can(tmp_path: Path) -> None:
    counter = RecordingCounter(write_small_files(tmp_path))
    text = "a" * 100_000

    count = TokenCount(counter, [text], "", 16)
    assert [3] == await count.run(FairThreads(), CLAIM, pass_all)
    assert 16 * 250 == count.characters == len(counter.texts[0][0])


async def test_stops_as_soon_as_the_call_cannot_pass(tmp_path: Path) -> None:
    counter, bounds = RecordingCounter(write_small_files(tmp_path)), list[int]()

    async def at_most_twelve(tokens: int) -> None:
        bounds.append(tokens)
        if tokens > 12:
            raise OverflowError

    texts = ["a b " + "c" * CHUNK_CHARACTERS] * 5
    with pytest.raises(OverflowError):
        await TokenCount(counter, texts, "", 512).run(FairThreads(), CLAIM, at_most_twelve)

    # Two special tokens for each of five texts, then three words of the first.
    assert [10, 13] == bounds
    assert 1 == len(counter.texts)
