"""Small vocabularies of each kind of tokenizer, with the post-processors of published checkpoints.

They were trained once and are kept beside this module: a trainer decides ties differently in each process,
and then each run would test other networks. `python -m tests.engine.families.vocabularies` trains them again.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import processors as post

from tests.engine.texts import PHRASES, real_texts

TRAINED = Path(__file__).with_name("vocabularies.json")
SIZE = 700
# Words that a reranker's answer may be, on lines of their own so that each becomes one token.
WORDS = ("yes", "no", "Yes", "No", "0", "1")
# Splits of Qwen's and Llama 3's tokenizers.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CLIP_SPLIT = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class Vocabulary(msgspec.Struct, frozen=True):
    """Kind of a tokenizer with its special tokens, in the order of their ids.

    single, pair: template of the post-processor. options: tokens by their role, for tokenizer_config.json.
    """

    algorithm: str
    specials: tuple[str, ...]
    single: str
    pair: str
    roles: tuple[tuple[str, str], ...] = ()

    def token_id(self, token: str) -> int:
        """Return the id of a special token."""
        return self.specials.index(token)


def _corpus() -> list[str]:
    return [*PHRASES, *(text for text in real_texts()[40:110]), *(WORDS * 60)]


def _wordpiece(lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_level_nfc() -> Tokenizer:
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _qwen() -> Tokenizer:
    tokenizer = _byte_level_nfc()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def _unigram() -> Tokenizer:
    # Published files have a table of normalized characters too, which no library here can make.
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _unigram_with_spaces() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "),
            normalizers.NFC(),
            normalizers.Strip(left=False, right=True),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _metaspace(prefix: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _clip() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<|endoftext|>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CLIP_SPLIT), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


EMPTY: dict[str, Callable[[], Tokenizer]] = {
    "wordpiece": lambda: _wordpiece(lowercase=True),
    "cased wordpiece": lambda: _wordpiece(lowercase=False),
    "byte-level BPE": _byte_level,
    "byte-level BPE, NFC": _byte_level_nfc,
    "byte-level BPE, Qwen": _qwen,
    "byte-level BPE, CLIP": _clip,
    "unigram": _unigram,
    "unigram, DeBERTa": _unigram_with_spaces,
    "metaspace BPE": lambda: _metaspace(prefix=True),
    "metaspace BPE, Gemma": lambda: _metaspace(prefix=False),
}
TRAINERS: dict[str, Callable[..., trainers.Trainer]] = {
    "WordPiece": trainers.WordPieceTrainer,
    "BPE": trainers.BpeTrainer,
    "Unigram": trainers.UnigramTrainer,
}


@cache
def tokenizer_json(vocabulary: Vocabulary) -> str:
    """Return the tokenizer.json of a vocabulary."""
    document = json.loads(EMPTY[vocabulary.algorithm]().to_str())
    document["model"] = _with_specials(_trained()[vocabulary.algorithm], vocabulary.specials)
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in vocabulary.specials])
    tokenizer.post_processor = _post_processor(vocabulary)
    text: str = tokenizer.to_str()
    return text


def vocabulary_size(vocabulary: Vocabulary) -> int:
    """Return the rows that the network's table of embeddings needs."""
    size: int = Tokenizer.from_str(tokenizer_json(vocabulary)).get_vocab_size()
    return size


@cache
def _trained() -> dict[str, dict[str, Any]]:
    """Return the trained model of each algorithm, as in tokenizer.json and without special tokens."""
    models_: dict[str, dict[str, Any]] = json.loads(TRAINED.read_text(encoding="utf-8"))
    return models_


def _with_specials(model: dict[str, Any], specials: tuple[str, ...]) -> dict[str, Any]:
    """Return a model with special tokens first."""
    if model["type"] == "Unigram":
        unknown = specials.index("[UNK]" if "[UNK]" in specials else "<unk>")
        return model | {"vocab": [*([token, 0.0] for token in specials), *model["vocab"]], "unk_id": unknown}
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return model | {"vocab": {word: i for i, word in enumerate([*specials, *words])}}


def train() -> dict[str, dict[str, Any]]:
    """Train the model of each algorithm on a few texts, whose words depend on Python's version."""
    return {algorithm: _train(algorithm) for algorithm in EMPTY}


def _train(algorithm: str) -> dict[str, Any]:
    tokenizer = EMPTY[algorithm]()
    kind = type(tokenizer.model).__name__
    options: dict[str, Any] = {"vocab_size": SIZE, "show_progress": False}
    if kind == "Unigram":
        options["unk_token"] = None
    if "metaspace" in algorithm:
        options["special_tokens"] = [f"<0x{byte:02X}>" for byte in range(256)]
    if "byte-level" in algorithm:
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    if suffix := getattr(tokenizer.model, "end_of_word_suffix", None):
        options["end_of_word_suffix"] = suffix
    tokenizer.train_from_iterator(_corpus(), TRAINERS[kind](**options))
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def _post_processor(vocabulary: Vocabulary) -> post.PostProcessor:
    words = set(f"{vocabulary.single} {vocabulary.pair}".split())
    specials = [(token, i) for i, token in enumerate(vocabulary.specials) if words & {token, f"{token}:1"}]
    if not specials:
        return post.ByteLevel(trim_offsets=False)
    template = post.TemplateProcessing(
        single=vocabulary.single, pair=vocabulary.pair, special_tokens=specials
    )
    return post.Sequence([post.ByteLevel(trim_offsets=False), template])


def _roles(**tokens: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{role}_token", token) for role, token in tokens.items())


_BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_BERT_ROLES = _roles(cls="[CLS]", sep="[SEP]", pad="[PAD]", unk="[UNK]", mask="[MASK]")
_BERT_TEMPLATE = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
_ROBERTA_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_ROBERTA_ROLES = _roles(bos="<s>", cls="<s>", eos="</s>", sep="</s>", pad="<pad>", unk="<unk>", mask="<mask>")
_ROBERTA_TEMPLATE = ("<s> $A </s>", "<s> $A </s> </s> $B </s>")

BERT = Vocabulary("wordpiece", _BERT_SPECIALS, *_BERT_TEMPLATE, _BERT_ROLES)
BERT_CASED = Vocabulary("cased wordpiece", _BERT_SPECIALS, *_BERT_TEMPLATE, _BERT_ROLES)
MODERNBERT = Vocabulary(
    "byte-level BPE, NFC", _BERT_SPECIALS, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", _BERT_ROLES
)
DEBERTA = Vocabulary(
    "unigram, DeBERTa", ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"), *_BERT_TEMPLATE, _BERT_ROLES
)
ROBERTA = Vocabulary("byte-level BPE", _ROBERTA_SPECIALS, *_ROBERTA_TEMPLATE, _ROBERTA_ROLES)
XLM_ROBERTA = Vocabulary("unigram", _ROBERTA_SPECIALS, *_ROBERTA_TEMPLATE, _ROBERTA_ROLES)
MPNET = Vocabulary(
    "wordpiece",
    ("<s>", "<pad>", "</s>", "[UNK]", "<mask>"),
    *_ROBERTA_TEMPLATE,
    _roles(bos="<s>", cls="<s>", eos="</s>", sep="</s>", pad="<pad>", unk="[UNK]", mask="<mask>"),
)
T5 = Vocabulary(
    "unigram",
    ("<pad>", "</s>", "<unk>"),
    "$A </s>",
    "$A </s> $B </s>",
    _roles(eos="</s>", pad="<pad>", unk="<unk>"),
)
LLAMA_2 = Vocabulary(
    "metaspace BPE",
    ("<unk>", "<s>", "</s>"),
    "<s> $A",
    "<s> $A <s>:1 $B:1",
    _roles(bos="<s>", eos="</s>", unk="<unk>", pad="</s>"),
)
LLAMA_3 = Vocabulary(
    "byte-level BPE, Qwen",
    ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
    "<|begin_of_text|> $A",
    "<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
    _roles(bos="<|begin_of_text|>", eos="<|eot_id|>", pad="<|eot_id|>"),
)
_QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN = Vocabulary(
    "byte-level BPE, Qwen",
    _QWEN_SPECIALS,
    "$A",
    "$A $B",
    _roles(eos="<|im_end|>", pad="<|endoftext|>"),
)
QWEN_EMBEDDING = Vocabulary(
    "byte-level BPE, Qwen",
    _QWEN_SPECIALS,
    "$A <|endoftext|>",
    "$A $B <|endoftext|>",
    _roles(eos="<|im_end|>", pad="<|endoftext|>"),
)
CLIP = Vocabulary(
    "byte-level BPE, CLIP",
    ("<|startoftext|>", "<|endoftext|>"),
    "<|startoftext|> $A <|endoftext|>",
    "<|startoftext|> $A <|endoftext|> $B:1 <|endoftext|>:1",
    _roles(bos="<|startoftext|>", eos="<|endoftext|>", unk="<|endoftext|>", pad="<|endoftext|>"),
)
SIGLIP = Vocabulary(
    "unigram", ("<unk>", "</s>"), "$A </s>", "$A </s> $B </s>", _roles(eos="</s>", pad="</s>", unk="<unk>")
)
COLQWEN2 = Vocabulary(
    "byte-level BPE, Qwen",
    (*_QWEN_SPECIALS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "$A",
    "$A $B",
    _roles(eos="<|im_end|>", pad="<|endoftext|>"),
)
_GEMMA_ROLES = _roles(bos="<bos>", eos="<eos>", pad="<pad>", unk="<unk>")
GEMMA = Vocabulary(
    "metaspace BPE, Gemma",
    ("<pad>", "<eos>", "<bos>", "<unk>"),
    "<bos> $A",
    "<bos> $A <bos>:1 $B:1",
    _GEMMA_ROLES,
)
SIGLIP2 = Vocabulary(
    "metaspace BPE, Gemma",
    ("<pad>", "<eos>", "<bos>", "<unk>"),
    "$A <eos>",
    "$A <eos> $B <eos>",
    _GEMMA_ROLES,
)
COLPALI = Vocabulary(
    "metaspace BPE, Gemma", ("<pad>", "<eos>", "<bos>", "<unk>", "<image>"), "$A", "$A $B", _GEMMA_ROLES
)
EMBEDDING_GEMMA = Vocabulary(
    "metaspace BPE, Gemma",
    ("<pad>", "<eos>", "<bos>", "<unk>"),
    "<bos> $A <eos>",
    "<bos> $A <eos> <bos>:1 $B:1 <eos>:1",
    _GEMMA_ROLES,
)

if __name__ == "__main__":
    TRAINED.write_text(json.dumps(train(), ensure_ascii=False), encoding="utf-8")
    print(f"wrote {TRAINED}")  # noqa: T201 - the result of a command
