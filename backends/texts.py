"""What can be said of a text without a tokenizer, and the texts of a piece of work. Pure."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from backends.contract import Classify, Embed, Encode, Rerank, Score, Truncate

# What a model reads as one sequence: a text, or two with a separator between them.
ModelInput: TypeAlias = str | tuple[str, str]
# Work whose inputs a model reads, and which costs tokens.
ModelWork: TypeAlias = Embed | Encode | Rerank | Score | Classify
WorkT = TypeVar("WorkT", bound=ModelWork)

# So many are tokenized in less time than a thread takes to be woken, twice over on busy cores.
INLINE_CHARACTERS_MAX = 400
# TEI looks at no more characters than this for each token a model may use: so that a book costs what a
# page does. Nothing that a model would have seen is lost.
CHARACTERS_PER_TOKEN = 250
# Tokenizers number tokens in 32 bits.
TOKEN_ID_LIMIT = 2**32
# Specials that a tokenizer adds to an input, at most: [CLS] a [SEP] b [SEP], and one to spare.
SPECIAL_TOKENS = 4


def clip_text(text: str, max_tokens: int, truncate: Truncate) -> str:
    """The part of a text that its first (or last) max_tokens tokens can come from."""
    most = max_tokens * CHARACTERS_PER_TOKEN
    if truncate is Truncate.ERROR or len(text) <= most:
        return text
    return text[-most:] if truncate is Truncate.LEFT else text[:most]


def token_upper_bound(text: str) -> int:
    """An upper bound: no tokenizer makes more tokens of a text than its UTF-8 bytes, and specials."""
    return len(text.encode()) + SPECIAL_TOKENS


def model_inputs_of(work: ModelWork) -> Sequence[ModelInput]:
    """What the model reads for each input; a rerank's query stands before each document."""
    match work:
        case Rerank():
            return [(work.query, document) for document in work.documents]
        case Score():
            return work.pairs
        case Embed() | Encode() | Classify():
            return work.inputs


def map_texts(work: WorkT, change: Callable[[str], str]) -> WorkT:
    """The work with every text of it changed, both halves of a pair too."""
    return msgspec.structs.replace(work, **_changed_fields(work, change))


def _changed_fields(work: ModelWork, change: Callable[[str], str]) -> dict[str, Any]:
    match work:
        case Rerank():
            return {"query": change(work.query), "documents": tuple(map(change, work.documents))}
        case Score():
            return {"pairs": tuple(_changed(one, change) for one in work.pairs)}
        case Embed() | Encode() | Classify():
            return {"inputs": tuple(_changed(one, change) for one in work.inputs)}


def _changed(item: ModelInput, change: Callable[[str], str]) -> ModelInput:
    return change(item) if isinstance(item, str) else (change(item[0]), change(item[1]))


def clip_texts(work: WorkT, max_tokens: int) -> WorkT:
    """The work without what no model of so many tokens would see."""
    return map_texts(work, lambda text: clip_text(text, max_tokens, work.truncate))


def surely_fits(items: Sequence[ModelInput], max_tokens: int) -> bool:
    """Whether every input is so short that no tokenizer could make it too long."""
    return all(sum(map(token_upper_bound, _halves(item))) <= max_tokens for item in items)


def _halves(item: ModelInput) -> tuple[str, ...]:
    return (item,) if isinstance(item, str) else item
