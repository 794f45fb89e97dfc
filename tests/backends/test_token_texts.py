"""Texts of tokens: the part of the input that a token covers, as a recorded TEI returns it."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from backends.tokens.tokenizer import TextTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "resume", "play", "##ing", "!"]


@pytest.fixture
def tokenizer() -> TextTokenizer:
    """Return a tokenizer that lowers case and strips accents, as that of the recorded model."""
    opened = Tokenizer(WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    opened.normalizer = BertNormalizer(lowercase=True)
    opened.pre_tokenizer = BertPreTokenizer()
    opened.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return TextTokenizer(opened, 64)


def test_tokens_are_those_of_the_recorded_server(tokenizer: TextTokenizer) -> None:
    lines = Path("tests/golden/tei/http.jsonl").read_text(encoding="utf-8").splitlines()
    recorded = next(entry for entry in map(json.loads, lines) if entry["path"] == "/tokenize")
    (tokens,) = tokenizer.explain([recorded["request"]["inputs"]], add_special_tokens=True)

    assert [
        (token["text"], token["special"], token["start"], token["stop"]) for token in recorded["reply"][0]
    ] == [(token.text, token.special, token.start, token.stop) for token in tokens]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Playing", ["Play", "ing"]),
        # A letter and a combining accent, and the same as one character. A tokenizer that strips accents
        # leaves out the last one.
        ("re\u0301sume\u0301 r\xe9sum\xe9", ["re\u0301sume", "r\xe9sum\xe9"]),
        ("\U0001f642 W\xd6RLD!", ["\U0001f642", "W\xd6RLD", "!"]),
    ],
)
def test_text_is_the_slice_of_the_input(tokenizer: TextTokenizer, text: str, expected: list[str]) -> None:
    (tokens,) = tokenizer.explain([text], add_special_tokens=False)
    raw = text.encode()

    assert expected == [token.text for token in tokens]
    for token in tokens:
        assert token.text == raw[token.start : token.stop].decode()


def test_pieces_are_the_vocabularys(tokenizer: TextTokenizer) -> None:
    (tokens,) = tokenizer.explain(["Playing w\xf6rld"], add_special_tokens=True, pieces=True)

    assert ["[CLS]", "play", "##ing", "world", "[SEP]"] == [token.text for token in tokens]
