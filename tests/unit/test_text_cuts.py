"""Cutting of texts to a number of tokens."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from backends.contract import Truncate
from backends.tokens.tokenizer import TextCounter, open_counter
from tests.fakes.checkpoint import write_small_files

many = settings(max_examples=200, deadline=None)


def byte_counter() -> TextCounter:
    """Return a counter with one token for each byte."""
    tokenizer = Tokenizer(BPE({character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return TextCounter(tokenizer)


BYTES = byte_counter()


@pytest.mark.parametrize(
    ("most", "side", "expected"),
    [
        (2, Truncate.RIGHT, "one two"),
        (2, Truncate.LEFT, "three  four"),
        (4, Truncate.RIGHT, "one two three  four"),
        (1, Truncate.RIGHT, "one"),
    ],
)
def test_the_first_or_last_tokens_stay(tmp_path: Path, most: int, side: Truncate, expected: str) -> None:
    counter = open_counter(write_small_files(tmp_path))

    assert [expected, "short"] == counter.cut(["one two three  four", "short"], most, side)


@many
@given(st.text(max_size=40), st.integers(1, 30), st.sampled_from([Truncate.LEFT, Truncate.RIGHT]))
def test_a_cut_text_is_an_end_of_the_text_with_no_more_tokens(text: str, most: int, side: Truncate) -> None:
    (part,) = BYTES.cut([text], most, side)

    assert text.endswith(part) if side is Truncate.LEFT else text.startswith(part)
    # Nothing is lost that would fit, and one character stays in any case.
    assert len(part.encode()) <= most or len(part) == 1
    assert len(part.encode()) > most - 4 or part == text
    assert bool(part) is bool(text)
