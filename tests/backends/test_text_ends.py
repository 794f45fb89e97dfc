"""Tokens around a text, as the checkpoint's files and the operator ask for them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from backends.contract import Embed, TokenizerSettings, TokenizerSource, Truncate
from backends.contract.errors import ModelUnavailable
from backends.tokens.counting import open_token_counter
from backends.tokens.tokenizer import open_counter, open_tokenizer

WORDS = ("[UNK]", "<s>", "</s>", "<|endoftext|>", "a", "b")
BOS, EOS, END, A, B = 1, 2, 3, 4, 5
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
QWEN_CODE = ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]
GTE = {
    "tokenizer_class": "Qwen2Tokenizer",
    "bos_token": None,
    "eos_token": "<|endoftext|>",
    "auto_map": {"AutoTokenizer": QWEN_CODE},
}


def template(single: str, pair: str) -> processors.PostProcessor:
    specials = [(word, WORDS.index(word)) for word in WORDS[1:4]]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=specials)


POST_PROCESSORS = {
    "none": None,
    "byte-level": processors.ByteLevel(trim_offsets=False),
    "begin": template("<s> $A", "<s> $A <s>:1 $B:1"),
    "begin after byte-level": processors.Sequence(
        [processors.ByteLevel(), template("<s> $A", "<s> $A <s>:1 $B:1")]
    ),
    "both": template("<s> $A </s>", "<s> $A </s> <s>:1 $B:1 </s>:1"),
    "end": template("$A <|endoftext|>", "$A <|endoftext|> $B:1 <|endoftext|>:1"),
    "roberta": processors.RobertaProcessing(("</s>", EOS), ("<s>", BOS)),
}


def write(folder: Path, post_processor: str, config: dict[str, Any]) -> Path:
    tokenizer = Tokenizer(WordLevel({word: id_ for id_, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    if POST_PROCESSORS[post_processor] is not None:
        tokenizer.post_processor = POST_PROCESSORS[post_processor]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in WORDS[1:4]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8}))
    return folder


def single_and_pair(folder: Path, **settings: bool) -> tuple[list[int], list[int]]:
    """Return the ids of "a" and of the pair of "a" and "b"; counts must agree with them."""
    chosen = TokenizerSettings(**settings)
    single, pair = open_tokenizer(folder, 8, chosen).encode(["a", ("a", "b")], Truncate.RIGHT).ids
    counter = open_counter(folder, chosen)

    assert (len(single) - 1, len(pair) - 2) == (counter.special_tokens, counter.pair_special_tokens)
    return single, pair


@pytest.mark.parametrize(
    ("post_processor", "config", "expected", "notes"),
    [
        ("begin", LLAMA, ([BOS, A], [BOS, A, BOS, B]), 0),
        ("begin", LLAMA | {"add_bos_token": True, "add_eos_token": False}, ([BOS, A], [BOS, A, BOS, B]), 0),
        ("begin", LLAMA | {"add_eos_token": True}, ([BOS, A, EOS], [BOS, A, EOS, BOS, B, EOS]), 1),
        ("none", LLAMA | {"add_bos_token": True}, ([BOS, A], [BOS, A, BOS, B]), 1),
        ("both", LLAMA | {"add_eos_token": True}, ([BOS, A, EOS], [BOS, A, EOS, BOS, B, EOS]), 0),
        ("both", LLAMA | {"add_bos_token": False, "add_eos_token": False}, ([A], [A, B]), 2),
        (
            "begin after byte-level",
            LLAMA | {"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True},
            ([BOS, A, EOS], [BOS, A, EOS, BOS, B, EOS]),
            1,
        ),
        # These classes never followed the keys.
        ("none", {**LLAMA, "tokenizer_class": "Qwen2Tokenizer", "add_eos_token": True}, ([A], [A, B]), 0),
        ("begin", {**LLAMA, "tokenizer_class": "PreTrainedTokenizerFast", "add_eos_token": True},
         ([BOS, A], [BOS, A, BOS, B]), 0),
        ("byte-level", GTE | {"add_eos_token": True}, ([A, END], [A, END, B, END]), 1),
        ("byte-level", GTE, ([A, END], [A, END, B, END]), 1),
        ("byte-level", GTE | {"auto_map": QWEN_CODE}, ([A, END], [A, END, B, END]), 1),
        ("byte-level", GTE | {"add_eos_token": False}, ([A], [A, B]), 1),
        ("end", GTE | {"add_eos_token": True}, ([A, END], [A, END, B, END]), 1),
        ("byte-level", GTE | {"auto_map": {"AutoTokenizer": ["x/y--own.Own", None]}}, ([A], [A, B]), 1),
    ],
)  # fmt: skip
def test_files_decide(
    tmp_path: Path,
    post_processor: str,
    config: dict[str, Any],
    expected: tuple[list[int], list[int]],
    notes: int,
) -> None:
    write(tmp_path, post_processor, config)

    assert expected == single_and_pair(tmp_path)
    assert notes == len(open_tokenizer(tmp_path, 8).traits.notes)


def test_guess_is_noted_with_the_key_that_decides_otherwise(tmp_path: Path) -> None:
    write(tmp_path, "byte-level", GTE)

    (note,) = open_tokenizer(tmp_path, 8).traits.notes
    assert note == (
        "guess: texts end in <|endoftext|>, as the tokenizer's own code "
        "(tokenization_qwen.Qwen2TokenizerFast) is known to do; it is not run. "
        "`add_eos_token` of the upstream decides otherwise"
    )
    assert () == open_tokenizer(tmp_path, 8, TokenizerSettings(add_eos_token=False)).traits.notes


@pytest.mark.parametrize(
    ("post_processor", "config", "settings", "expected"),
    [
        ("byte-level", GTE, {"add_eos_token": False}, [A]),
        ("begin", LLAMA | {"add_eos_token": True}, {"add_eos_token": False}, [BOS, A]),
        ("begin", LLAMA, {"add_bos_token": False, "add_eos_token": True}, [A, EOS]),
        ("roberta", {"bos_token": "<s>", "eos_token": "</s>"}, {"add_eos_token": True}, [BOS, A, EOS]),
        ("roberta", {"bos_token": "<s>", "eos_token": "</s>"}, {"add_eos_token": False}, [BOS, A]),
        ("end", {"eos_token": {"content": "</s>"}}, {"add_eos_token": False}, [A, END]),
    ],
)
def test_operator_decides_otherwise(
    tmp_path: Path,
    post_processor: str,
    config: dict[str, Any],
    settings: dict[str, bool],
    expected: list[int],
) -> None:
    write(tmp_path, post_processor, config)

    assert expected == single_and_pair(tmp_path, **settings)[0]


@pytest.mark.parametrize(
    ("post_processor", "config", "settings", "reason"),
    [
        ("none", {}, {"add_eos_token": True}, "needs `eos_token` in tokenizer_config.json; it has none"),
        ("end", {"eos_token": "</s>"}, {"add_eos_token": True}, "texts end in <|endoftext|>, and"),
        ("none", {"bos_token": "<x>"}, {"add_bos_token": True}, "the token <x> .* is not in the vocabulary"),
        ("none", {**LLAMA, "eos_token": None, "add_eos_token": True}, {}, "needs `eos_token`"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(
    tmp_path: Path, post_processor: str, config: dict[str, Any], settings: dict[str, bool], reason: str
) -> None:
    write(tmp_path, post_processor, config)

    with pytest.raises(ModelUnavailable, match=reason.replace("|", r"\|")):
        open_tokenizer(tmp_path, 8, TokenizerSettings(**settings))


def test_truncation_keeps_the_added_tokens(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write(tmp_path, "begin", LLAMA | {"add_eos_token": True}), 5)
    items = ["a b a b a b", ("a b a", "b a b")]

    for side in (Truncate.LEFT, Truncate.RIGHT):
        single, pair = tokenizer.encode(items, side).ids
        assert (5, BOS, EOS) == (len(single), single[0], single[-1])
        assert (5, [BOS, EOS, BOS, EOS]) == (len(pair), [id_ for id_ in pair if id_ not in (A, B)])
    assert 10 == tokenizer.measure(items, Truncate.RIGHT).tokens


async def test_gateway_counts_remote_texts_as_its_settings_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(write(tmp_path, "byte-level", GTE))
    guessed = await open_token_counter(TokenizerSource(folder), 5.0)
    plain = await open_token_counter(TokenizerSource(folder, TokenizerSettings(add_eos_token=False)), 5.0)

    assert 2 == (await guessed.count(Embed(("a",)), 5.0)).tokens
    assert 1 == (await plain.count(Embed(("a",)), 5.0)).tokens
    assert 1 == sum("guess: texts end in <|endoftext|>" in record.message for record in caplog.records)


@pytest.mark.parametrize("content", ["[]", "{", '{"model": 3, "post_processor": []}', "null", '"a"'])
def test_broken_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(ModelUnavailable):
        open_tokenizer(tmp_path, 8)
