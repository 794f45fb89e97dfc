"""Token ids of checkpoints whose small files say something else than their tokenizer.json."""

import base64
import json
import struct
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from backends.contract import Embed, EmbedReply, TokenizerSettings, Truncate
from backends.contract.errors import ModelUnavailable
from backends.tokens.tokenizer import TextTokenizer, open_counter, open_tokenizer
from tests.engine.engines import cosines, engine_on, load_tiny, run_work
from tests.engine.families import decoders
from tests.engine.families.checkpoint import write_checkpoint
from tests.engine.families.references import TEXTS as PLAIN
from tests.engine.families.vocabularies import (
    BERT,
    BERT_CASED,
    DEBERTA,
    GEMMA,
    LLAMA_2,
    LLAMA_3,
    MODERNBERT,
    MPNET,
    QWEN,
    QWEN_EMBEDDING,
    ROBERTA,
    T5,
    XLM_ROBERTA,
    Vocabulary,
    tokenizer_json,
)

TEXTS = [
    "Hello World, it's   a test.",
    "  leading and trailing  ",
    "ÀÉÎ naïve Café",
    "中文字符 mixed 漢字",
    "line\nbreak\ttab",
    "a <s> b </s> [MASK]<mask> c [CLS]x",
    "hello old-word new-word oldworld",
    "",
    "a",
]
PAIRS = list(pairwise(TEXTS[:7]))
WORD: dict[str, Any] = {"lstrip": False, "rstrip": False, "single_word": False, "special": False}
CUTS = (Truncate.LEFT, Truncate.RIGHT)
BERT_TYPE = {"model_type": "bert"}


def write(folder: Path, vocabulary: Vocabulary, model: dict[str, Any], **config: Any) -> Path:
    """Write the files of a tokenizer. config: of tokenizer_config.json, besides the roles of tokens."""
    document = json.loads(tokenizer_json(vocabulary))
    if "metaspace" in vocabulary.algorithm:
        # Published files have the template alone; a byte-level part is a sign of another kind.
        document["post_processor"] = document["post_processor"]["processors"][-1]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(vocabulary.roles) | config))
    return folder


def assert_cuts_like_its_own_truncation(
    folder: Path, settings: TokenizerSettings, tokenizer: TextTokenizer
) -> None:
    """Check that a length of a request cuts as the tokenizer's own truncation at this length does."""
    for most in (6, 8, 9):
        own = open_tokenizer(folder, most, settings)
        for items, side in product(([*TEXTS, TEXTS[0] * 50], [*PAIRS, ("a", TEXTS[0])]), CUTS):
            expected, cut = own.encode(items, side), tokenizer.encode(items, side, most)
            assert (expected.ids, expected.type_ids) == (cut.ids, cut.type_ids)
            assert set(cut.truncated) <= set(expected.truncated)
            assert max(cut.lengths) <= most


def ids_of(folder: Path, **settings: bool) -> list[list[int]]:
    """Return the ids of the texts, after checking that counts agree with them."""
    chosen = TokenizerSettings(**settings)
    tokenizer, counter = open_tokenizer(folder, 512, chosen), open_counter(folder, chosen)
    singles, pairs = (tokenizer.encode(items, Truncate.RIGHT).ids for items in (TEXTS, PAIRS))

    assert list(map(len, singles)) == [n + counter.special_tokens for n in counter.count(TEXTS)]
    pair_tokens = [sum(counter.count(pair)) + counter.pair_special_tokens for pair in PAIRS]
    assert list(map(len, pairs)) == pair_tokens
    assert sum(map(len, singles)) == tokenizer.measure(TEXTS, Truncate.RIGHT).tokens
    assert_cuts_like_its_own_truncation(folder, chosen, tokenizer)
    explained = tokenizer.explain(TEXTS, add_special_tokens=True)
    assert singles == [[token.id for token in tokens] for tokens in explained]
    return singles + pairs


def reference_ids(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [tokenizer(*pair)["input_ids"] for pair in PAIRS]
    return [*tokenizer(TEXTS)["input_ids"], *pairs]


CASES: dict[str, tuple[Vocabulary, str, dict[str, Any]]] = {
    "bert": (BERT, "bert", {"tokenizer_class": "BertTokenizer", "do_lower_case": True}),
    "bert, cased by config": (BERT, "bert", {"tokenizer_class": "BertTokenizer", "do_lower_case": False}),
    "bert, cased by file": (BERT_CASED, "bert", {"tokenizer_class": "BertTokenizer"}),
    "bert, accents": (
        BERT,
        "bert",
        {"tokenizer_class": "BertTokenizer", "strip_accents": False, "tokenize_chinese_chars": False},
    ),
    "bert, no class": (BERT_CASED, "bert", {}),
    "bert, plain class": (BERT_CASED, "bert", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "distilbert": (BERT, "distilbert", {"tokenizer_class": "DistilBertTokenizer", "do_lower_case": False}),
    "mpnet": (MPNET, "mpnet", {"tokenizer_class": "MPNetTokenizer", "do_lower_case": False}),
    "roberta": (ROBERTA, "roberta", {"tokenizer_class": "RobertaTokenizer"}),
    "roberta, space": (ROBERTA, "roberta", {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True}),
    "xlm-roberta": (XLM_ROBERTA, "xlm-roberta", {"tokenizer_class": "XLMRobertaTokenizer"}),
    "t5": (T5, "t5", {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}),
    "llama 2": (LLAMA_2, "mistral", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}),
    "llama 2, no space": (LLAMA_2, "llama", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
    "llama 3": (LLAMA_3, "llama", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "qwen 2": (QWEN, "qwen2", {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False}),
    "qwen 3": (QWEN_EMBEDDING, "qwen3", {"tokenizer_class": "Qwen2Tokenizer", "add_eos_token": False}),
    "gemma": (
        GEMMA,
        "gemma2",
        {"tokenizer_class": "GemmaTokenizer", "mask_token": "<pad>"},
    ),
    "modernbert": (MODERNBERT, "modernbert", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "words in config": (
        BERT,
        "bert",
        {
            "tokenizer_class": "BertTokenizer",
            "added_tokens_decoder": {
                "700": WORD | {"content": "new-word", "normalized": False},
                "10": WORD | {"content": "old-word", "normalized": False},
            },
        },
    ),
    "special words": (BERT, "bert", {"tokenizer_class": "BertTokenizer", "additional_special_tokens": ["a"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_ids_are_those_of_the_checkpoints_own_library(name: str, tmp_path: Path) -> None:
    vocabulary, model_type, config = CASES[name]
    write(tmp_path, vocabulary, {"model_type": model_type}, **config)
    words = config.get("added_tokens_decoder", {})
    if words:
        # The first word stands behind the vocabulary, and the second is a word of it.
        tokenizer = Tokenizer.from_str(tokenizer_json(vocabulary))
        size = tokenizer.get_vocab_size()
        known = words["10"] | {"content": tokenizer.id_to_token(size - 1)}
        listed = {str(size): words["700"], str(size - 1): known}
        write(tmp_path, vocabulary, {"model_type": model_type}, **config | {"added_tokens_decoder": listed})

    assert reference_ids(tmp_path) == ids_of(tmp_path)
    assert () == open_tokenizer(tmp_path, 8).traits.notes


def test_words_of_older_files_are_added(tmp_path: Path) -> None:
    write(tmp_path, BERT, BERT_TYPE, tokenizer_class="BertTokenizer")
    size = Tokenizer.from_str(tokenizer_json(BERT)).get_vocab_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"new-word": size}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["[MASK]"]}))

    assert reference_ids(tmp_path) == ids_of(tmp_path)
    assert size in open_tokenizer(tmp_path, 8).encode(["new-word"], Truncate.RIGHT).ids[0]


def test_words_without_a_vector_are_not_used(tmp_path: Path) -> None:
    size = Tokenizer.from_str(tokenizer_json(BERT)).get_vocab_size()
    words = {str(size): WORD | {"content": "new-word", "normalized": False}}
    write(tmp_path, BERT, BERT_TYPE | {"vocab_size": size}, added_tokens_decoder=words)

    assert max(max(row) for row in ids_of(tmp_path)) < size
    (note,) = open_tokenizer(tmp_path, 8).traits.notes
    assert f"the token new-word is not used: the network has no vector for its id {size}" == note


def test_ids_that_the_vocabulary_does_not_reach_are_refused(tmp_path: Path) -> None:
    words = {"5000": WORD | {"content": "new-word", "normalized": False}}
    write(tmp_path, BERT, BERT_TYPE, added_tokens_decoder=words)

    with pytest.raises(ModelUnavailable, match="new-word the id 5000, and the vocabulary"):
        open_tokenizer(tmp_path, 8)


@pytest.mark.parametrize("lower", [True, False])
def test_vocab_txt_alone_gives_berts_tokenizer(tmp_path: Path, *, lower: bool) -> None:
    vocabulary = Tokenizer.from_str(tokenizer_json(BERT if lower else BERT_CASED)).get_vocab()
    lines = sorted(vocabulary, key=vocabulary.__getitem__)
    (tmp_path / "vocab.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(BERT_TYPE))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))

    assert reference_ids(tmp_path) == ids_of(tmp_path)


@pytest.mark.parametrize(
    ("file", "model_type", "reason"),
    [
        ("vocab.txt", "roformer", "vocab.txt is not plainly BERT's"),
        ("sentencepiece.bpe.model", "xlm-roberta", "pip install sentencepiece protobuf"),
    ],
)
def test_other_vocabularies_are_refused_with_the_remedy(
    tmp_path: Path, file: str, model_type: str, reason: str
) -> None:
    (tmp_path / file).write_text("[UNK]\n[CLS]\n[SEP]\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))

    with pytest.raises(ModelUnavailable, match=rf"no readable tokenizer\.json.*{reason}"):
        open_tokenizer(tmp_path, 8)


def variant_of(name: str, folder: Path, tokenizer: dict[str, Any], pooling: dict[str, Any]) -> Path:
    """Write a family's checkpoint with other keys for its tokenizer and pooling."""
    family = next(family for family in decoders.FAMILIES if family.name == name)
    files = dict(family.files)
    files["1_Pooling/config.json"] = {**files["1_Pooling/config.json"], **pooling}  # type: ignore[dict-item]
    changed = replace(family, tokenizer_config={**family.tokenizer_config, **tokenizer}, files=files)
    return write_checkpoint(changed, folder / name)


@pytest.mark.parametrize("name", ["kalm", "embeddinggemma"])
async def test_prompt_is_left_out_with_and_without_an_end_token(name: str, tmp_path: Path) -> None:
    folder = variant_of(name, tmp_path, {}, {"include_prompt": False})
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prompts": {"query": "what is:"}}))
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})

    reply = await run_work(engine_on(load_tiny(folder)), Embed(tuple(PLAIN), prompt_name="query"), EmbedReply)

    assert cosines(model.encode(PLAIN, prompt_name="query"), reply.vectors).min() > 0.99999


@pytest.mark.parametrize("name", ["kalm", "bge-multilingual-gemma2"])
async def test_padding_side_changes_no_vector(name: str, tmp_path: Path) -> None:
    pooling = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    folder = variant_of(name, tmp_path, {"padding_side": "left"}, pooling)
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    alone = np.concatenate([model.encode([text]) for text in PLAIN])

    reply = await run_work(engine_on(load_tiny(folder)), Embed(tuple(PLAIN)), EmbedReply)

    assert "left" == model.tokenizer.padding_side
    assert cosines(alone, reply.vectors).min() > 0.99999
    assert cosines(alone, model.encode(PLAIN)).min() > 0.99999


# A table of normalized characters that changes none: a trie of empty nodes.
NO_CHANGES = base64.b64encode(struct.pack("<I", 1024) + bytes(1024)).decode()


@pytest.mark.parametrize(
    ("name", "table", "noted"),
    [
        ("DebertaV2TokenizerFast", NO_CHANGES, True),
        ("BigBirdTokenizer", NO_CHANGES, True),
        ("DebertaV2Tokenizer", None, False),
        ("XLMRobertaTokenizer", NO_CHANGES, False),
    ],
)
def test_a_table_of_characters_that_the_library_leaves_out_is_a_note(
    name: str, table: str | None, noted: bool, tmp_path: Path
) -> None:
    write(tmp_path, DEBERTA, {"model_type": "other"}, tokenizer_class=name)
    if table is not None:
        document = json.loads((tmp_path / "tokenizer.json").read_text())
        document["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": table}
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))

    tokenizer = open_tokenizer(tmp_path, 100)

    assert noted == any("transformers 5 leaves its table out" in note for note in tokenizer.traits.notes)
    assert tokenizer.encode(["a fox"], Truncate.RIGHT).ids[0]
