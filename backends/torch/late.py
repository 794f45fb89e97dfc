"""How a late-interaction model (ColBERT) prepares queries and documents: markers, lengths, expansion.

Three libraries write that down in three places. Pure. Sources: sentence-transformers 6.2,
`MultiVectorEncoder` and `Transformer`; PyLate 1.3, `ColBERT`; ColBERT 0.2, `artifact.metadata`.
"""

import string
from typing import Any

import msgspec

from backends.torch.files import Files, Json

# What the original and PyLate fill queries up to, where their files do not say.
QUERY_TOKENS = 32
PYLATE_SIGNS = (
    "query_prefix",
    "document_prefix",
    "query_length",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "skiplist_words",
)


class Expansion(msgspec.Struct, frozen=True):
    """Queries shorter than `length` tokens are filled up; each filler gets a vector that counts.

    cuts: whether longer queries are cut to it. attended: whether other tokens see the fillers. token: what
    they are; None is the mask token.
    """

    length: int
    cuts: bool = True
    attended: bool = False
    token: str | None = None


class LateInteraction(msgspec.Struct, frozen=True):
    """What is done to a text by its role; None is no limit but the network's own.

    prompts: what is put before it; markers: those of them that are one token. skipped: words of documents
    that get no vector.
    """

    query_tokens: int | None = None
    document_tokens: int | None = None
    expansion: Expansion | None = None
    prompts: dict[str, str] = {}
    markers: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    def lengths(self, most: int) -> tuple[int, int]:
        """The most tokens of a query and of a document, fillers not counted. most: what the network takes."""
        fill = self.expansion
        query = fill.length if fill is not None and fill.cuts else self.query_tokens
        return min(query or most, most), min(self.document_tokens or most, most)


def read_late_interaction(files: Files) -> LateInteraction:
    """What a checkpoint's files say, whoever wrote them."""
    if "HF_ColBERT" in (files.config.get("architectures") or []):
        return _original(files.json("artifact.metadata"))
    if files.sentence.get("model_type") == "ColBERT" or any(one in files.sentence for one in PYLATE_SIGNS):
        return _pylate(files.sentence)
    return _native(files)


def _native(files: Files) -> LateInteraction:
    network, mask = files.transformer, files.of_module("MultiVectorMask")
    told = network.get("query_expansion")
    return LateInteraction(
        network.get("query_length"),
        network.get("document_length"),
        None if told is None else _expansion(told),
        _given({role: files.sentence.get("prompts", {}).get(role) for role in ("query", "document")}),
        skipped=tuple(mask.get("skiplist_words") or ()),
    )


def _expansion(told: Json) -> Expansion:
    return Expansion(
        int(told["length"]),
        cuts=told.get("strategy") != "min",
        attended=bool(told.get("attend", False)),
        token=told.get("token"),
    )


def _pylate(sentence: Json) -> LateInteraction:
    prompts = {
        role: _before(sentence.get(f"{role}_prefix"), sentence.get("prompts", {}).get(role))
        for role in ("query", "document")
    }
    length = sentence.get("query_length")
    fills = sentence.get("do_query_expansion", True)
    skipped = sentence.get("skiplist_words")
    return LateInteraction(
        None if fills else length,
        sentence.get("document_length"),
        Expansion(length or QUERY_TOKENS, attended=bool(sentence.get("attend_to_expansion_tokens", False)))
        if fills
        else None,
        prompts=_given(prompts),
        markers=_markers(sentence.get("query_prefix"), sentence.get("document_prefix")),
        skipped=tuple(string.punctuation if skipped is None else skipped),
    )


def _original(metadata: Json) -> LateInteraction:
    query = metadata.get("query_token_id") or "[unused0]"
    document = metadata.get("doc_token_id") or "[unused1]"
    attended = bool(metadata.get("attend_to_mask_tokens", False))
    return LateInteraction(
        None,
        metadata.get("doc_maxlen"),
        Expansion(metadata.get("query_maxlen") or QUERY_TOKENS, attended=attended),
        {"query": f"{query} ", "document": f"{document} "},
        (query, document),
        tuple(string.punctuation) if metadata.get("mask_punctuation", True) else (),
    )


def _before(prefix: str | None, prompt: str | None) -> str:
    """PyLate's marker, then its prompt, which may begin with the same marker."""
    return (prefix or "") + (prompt or "").removeprefix(prefix or "")


def _markers(*prefixes: str | None) -> tuple[str, ...]:
    return tuple(prefix for prefix in prefixes if prefix and prefix.strip())


def _given(prompts: dict[str, Any]) -> dict[str, str]:
    return {role: text for role, text in prompts.items() if text is not None}
