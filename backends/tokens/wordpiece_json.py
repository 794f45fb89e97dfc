"""Construction of a tokenizer.json from BERT's vocab.txt.

Source: BertTokenizer of transformers, whose parts and defaults this follows.
"""

from typing import Any

import msgspec

from backends.contract.errors import ModelUnavailable
from backends.tokens.tokenizer_rules import TokenizerFiles

VOCABULARY_FILE = "vocab.txt"
# Classes whose tokenizer has the parts of BERT's.
BERT_CLASSES = frozenset(
    ("BertTokenizer", "ConvBertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
)
BERT_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


def wordpiece_json(vocabulary: bytes, files: TokenizerFiles) -> bytes:
    """Return the tokenizer.json of a checkpoint of BERT's kind that has only a vocab.txt.

    vocabulary: content of that file. Raises: ModelUnavailable, if the tokenizer is of another kind.
    """
    if files.class_name not in BERT_CLASSES or files.config.get("do_basic_tokenize") is False:
        raise ModelUnavailable(f"no readable tokenizer.json, and {VOCABULARY_FILE} is not plainly BERT's")
    # Other characters than a line feed end no line: they can be tokens.
    lines = vocabulary.decode("utf-8", "replace").replace("\r\n", "\n").removesuffix("\n").split("\n")
    return msgspec.json.encode(_document(files, {token: id_ for id_, token in enumerate(lines)}))


def _document(files: TokenizerFiles, vocabulary: dict[str, int]) -> dict[str, Any]:
    tokens = {key: files.token(key, default) or default for key, default in BERT_TOKENS.items()}
    start, end = tokens["cls_token"], tokens["sep_token"]
    missing = [token for token in (start, end, tokens["unk_token"]) if token not in vocabulary]
    if missing:
        raise ModelUnavailable(f"{VOCABULARY_FILE} has no token {', '.join(missing)}")
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = sorted((vocabulary[token], token) for token in set(tokens.values()) if token in vocabulary)
    return {
        "version": "1.0",
        "added_tokens": [{"id": id_, "content": token, **special} for id_, token in added],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_special(start, 0), _sequence("A", 0), _special(end, 0)],
            "pair": [
                *(_special(start, 0), _sequence("A", 0), _special(end, 0)),
                *(_sequence("B", 1), _special(end, 1)),
            ],
            "special_tokens": {
                token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in (start, end)
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": tokens["unk_token"],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
    }


def _special(token: str, type_id: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": type_id}}


def _sequence(name: str, type_id: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}
