"""Construction of a tokenizer.json from CLIP's vocab.json and merges.txt.

Source: CLIPTokenizer of transformers, whose parts and defaults this follows.
"""

from typing import Any

import msgspec

from backends.contract.errors import ModelUnavailable
from backends.tokens.tokenizer_rules import TokenizerFiles

CLIP_VOCABULARY, CLIP_MERGES = "vocab.json", "merges.txt"
CLIP_CLASS = "CLIPTokenizer"
START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def clip_json(vocabulary: bytes, merges: bytes, files: TokenizerFiles) -> bytes:
    """Return the tokenizer.json of a CLIP that has only a vocabulary and its merges.

    vocabulary, merges: content of those files. Raises: ModelUnavailable, if they are not CLIP's.
    """
    try:
        ids = msgspec.json.decode(vocabulary, type=dict[str, int])
    except msgspec.DecodeError as error:
        raise ModelUnavailable(f"{CLIP_VOCABULARY} is not a vocabulary: {error}") from error
    start, end = files.token("bos_token", START) or START, files.token("eos_token", END) or END
    missing = [token for token in (start, end) if token not in ids]
    if missing:
        raise ModelUnavailable(f"{CLIP_VOCABULARY} has no token {', '.join(missing)}")
    lines = merges.decode("utf-8", "replace").split("\n")
    pairs = [line.split() for line in lines if line.strip() and not line.startswith("#version")]
    return msgspec.json.encode(_document(ids, pairs, start, end))


def _document(ids: dict[str, int], pairs: list[list[str]], start: str, end: str) -> dict[str, Any]:
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    lowered = [
        {"type": "NFC"},
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        {"type": "Lowercase"},
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Removed", "invert": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": ids[token], "content": token, **special} for token in (start, end)],
        "normalizer": {"type": "Sequence", "normalizers": lowered},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_]},
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": [end, ids[end]],
            "cls": [start, ids[start]],
            "trim_offsets": False,
            "add_prefix_space": False,
        },
        "decoder": bytes_,
        "model": {
            "type": "BPE",
            "unk_token": end,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "</w>",
            "vocab": ids,
            "merges": pairs,
        },
    }
