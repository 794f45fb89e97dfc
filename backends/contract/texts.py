"""Texts of a piece of work, and the length bounds that are valid without a tokenizer."""

import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from backends.contract import (
    Chat,
    Classify,
    Detokenize,
    Embed,
    Encode,
    Rerank,
    Score,
    Tokenize,
    Truncate,
    Work,
)
from backends.contract.errors import UnsupportedWork

# The most bytes of each code point, by `_most_bytes`; 0 until it is needed. Ideographs, private characters
# and those of higher planes are known: a text of all characters must not cost seconds. Syllables of Hangul
# become two or three letters.
MOST_BYTES: npt.NDArray[np.uint8] = np.zeros(0x110000, np.uint8)
for _start, _end, _bytes in (
    (0x3400, 0x4DC0, 3),
    (0x4E00, 0xA000, 3),
    (0xAC00, 0xD7A4, 9),
    (0xE000, 0xF900, 3),
    (0x20000, 0x2F800, 4),
    (0x30000, 0x110000, 4),
):
    MOST_BYTES[_start:_end] = _bytes
MOST_BYTES[0xAC00:0xD7A4:28] = 6

# Text that a model reads as one sequence: a text, or two texts with a separator between them.
ModelInput: TypeAlias = str | tuple[str, str]
# Work that is computed by the model and costs tokens.
ModelWork: TypeAlias = Embed | Encode | Rerank | Score | Classify
WorkT = TypeVar("WorkT", bound=ModelWork)

# Tokenizing this many characters takes less time than waking a thread, and half of that on busy cores.
INLINE_CHARACTERS_MAX = 400
# TEI reads no more characters than this per token of the model's maximum length, so that a book costs no more
# than a page. Of a text that is mostly blank, words are lost that the model had room for: it counts as cut.
CHARACTERS_PER_TOKEN = 250
# Tokenizers represent token ids in 32 bits.
TOKEN_ID_LIMIT = 2**32
# A text has no more tokens than normalized bytes. Tokenizing this many takes tens of megabytes, and a reply
# with the text and place of each token is at most 18 MB of JSON.
TOKENIZE_BYTES_MAX = 256 * 1024
# As many ids are a text of about 1 MB; the longest tokens of common vocabularies make it 30 MB.
DETOKENIZE_IDS_MAX = 256 * 1024
# The most special tokens that a tokenizer adds to an input: [CLS] a [SEP] b [SEP], plus a reserve of one.
SPECIAL_TOKENS = 4


def clip_text(text: str, max_tokens: int, truncate: Truncate) -> str:
    """Return the part of a text that can contain its first (or last) max_tokens tokens."""
    characters = max_tokens * CHARACTERS_PER_TOKEN
    if truncate is Truncate.ERROR or len(text) <= characters:
        return text
    return text[-characters:] if truncate is Truncate.LEFT else text[:characters]


def token_upper_bound(text: str) -> int:
    """Return an upper bound of a text's tokens: its bytes however it is normalized, plus special tokens."""
    return normalized_bytes(text) + SPECIAL_TOKENS


def normalized_bytes(text: str) -> int:
    """Return the most UTF-8 bytes of a text, as it is or normalized by any tokenizer.

    A token has a byte at least, but of the normalized text: NFKC turns the three bytes of U+FDFA into 33.
    """
    return len(text) if text.isascii() else int(_most_bytes_each(text).sum(dtype=np.int64))


def token_upper_bounds(texts: Sequence[str]) -> list[int]:
    """Return `token_upper_bound` of each text, at a fraction of the cost for many."""
    if all(map(str.isascii, texts)):
        return [len(text) + SPECIAL_TOKENS for text in texts]
    most = _most_bytes_each("".join(texts))
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    sums = np.concatenate((np.zeros(1, np.int64), np.cumsum(most, dtype=np.int64)))[ends]
    bounds: list[int] = (np.diff(sums, prepend=0) + SPECIAL_TOKENS).tolist()
    return bounds


def _most_bytes_each(text: str) -> npt.NDArray[np.uint8]:
    """Return the most bytes of each character."""
    code_points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    most = np.take(MOST_BYTES, code_points)
    if most.all():
        return most
    for code_point in np.unique(code_points[most == 0]).tolist():
        MOST_BYTES[code_point] = _most_bytes(chr(code_point))
    return np.take(MOST_BYTES, code_points)


def _most_bytes(character: str) -> int:
    """Return the most UTF-8 bytes of a character in any normal form, with letters of any case.

    Composition only shortens a text, so that the forms of single characters bound those of texts.
    """
    decomposed_once = unicodedata.normalize("NFKD", character)
    if decomposed_once == character == character.lower() == character.casefold():
        return len(character.encode())
    forms = {character, character.lower(), character.casefold()}
    for _ in range(2):
        decomposed = {unicodedata.normalize(form, each) for form in ("NFD", "NFKD") for each in forms}
        forms |= decomposed | {each.casefold() for each in decomposed}
    return max(len(form.encode()) for form in forms)


def model_inputs_of(work: ModelWork) -> Sequence[ModelInput]:
    """Return the text or pair that the model reads for each input; a rerank pairs its query with each."""
    match work:
        case Rerank():
            return [(work.query, document) for document in work.documents]
        case Score():
            return work.pairs
        case Embed() | Encode() | Classify():
            return work.inputs


def check_no_instruction(work: Work) -> None:
    """Check that a request for scores brings no instruction, for wires and models that take none.

    Raises: UnsupportedWork.
    """
    if isinstance(work, Rerank | Score) and work.instruction is not None:
        raise UnsupportedWork("this upstream's model takes no instruction")


def check_no_max_tokens(work: Work) -> None:
    """Check that a request does not state its own length, for wires that cut at the model's length only.

    Raises: UnsupportedWork.
    """
    if not isinstance(work, Tokenize | Detokenize) and work.max_tokens is not None:
        raise UnsupportedWork(
            f"this upstream cuts inputs at its model's length only, not at {work.max_tokens} tokens; "
            "send shorter texts"
        )


def group_by_query(work: Score) -> list[tuple[list[int], Rerank]]:
    """Convert pairs to one rerank per query, each with the indices of its pairs."""
    indices_by_query: dict[str, list[int]] = {}
    for index, (query, _) in enumerate(work.pairs):
        indices_by_query.setdefault(query, []).append(index)
    return [
        (indices, Rerank(query, tuple(work.pairs[i][1] for i in indices), work.raw_scores, work.truncate))
        for query, indices in indices_by_query.items()
    ]


def check_no_late_chunking(work: Work) -> None:
    """Check that a request for vectors asks for no late chunking, for wires that have none.

    Raises: UnsupportedWork.
    """
    if isinstance(work, Embed) and work.late_chunking:
        raise UnsupportedWork("this upstream's wire has no late chunking")


def chat_of(work: Work) -> Chat | None:
    """Return how the conversations of a piece of work are rendered, None for texts."""
    return work.chat if isinstance(work, Embed | Encode | Classify) else None


def is_written_plainly(work: Work) -> bool:
    """Return whether the model reads each text as it is, with its tokenizer's own special tokens."""
    return not isinstance(work, Embed | Encode | Classify) or (work.chat is None and work.special_tokens)


def check_plain_texts(work: Work, server: str) -> None:
    """Check that a request has neither conversations nor texts without special tokens.

    server: name of the wire that has neither. Raises: UnsupportedWork.
    """
    if is_written_plainly(work):
        return
    assert isinstance(work, Embed | Encode | Classify)
    if work.chat is not None:
        raise UnsupportedWork(
            f"`messages` needs a chat template, which vLLM and the built-in engine apply; {server} reads "
            "texts: send `input`"
        )
    raise UnsupportedWork(
        f"`add_special_tokens: false` needs vLLM or the built-in engine; {server} always adds them: "
        "leave it out"
    )


def refused_parts() -> UnsupportedWork:
    """Return the error of a wire that carries text only for a request with images or sound."""
    return UnsupportedWork("this upstream reads text only, neither images nor sound")


def map_texts(work: WorkT, change: Callable[[str], str]) -> WorkT:
    """Return the work with every text changed, including both texts of a pair."""
    return msgspec.structs.replace(work, **_map_fields(work, change))


def _map_fields(work: ModelWork, change: Callable[[str], str]) -> dict[str, Any]:
    match work:
        case Rerank():
            return {"query": change(work.query), "documents": tuple(map(change, work.documents))}
        case Score():
            return {"pairs": tuple(_map_input(pair, change) for pair in work.pairs)}
        case Embed() | Encode() | Classify():
            return {"inputs": tuple(_map_input(item, change) for item in work.inputs)}


def _map_input(item: ModelInput, change: Callable[[str], str]) -> ModelInput:
    return change(item) if isinstance(item, str) else (change(item[0]), change(item[1]))


def clip_texts(work: WorkT, max_tokens: int) -> WorkT:
    """Return the work without the text that a model of max_tokens tokens cannot read."""
    return map_texts(work, lambda text: clip_text(text, max_tokens, work.truncate))


def surely_fits(items: Sequence[ModelInput], max_tokens: int) -> bool:
    """Return True if every input is short enough to fit with any tokenizer."""
    return all(sum(map(token_upper_bound, _texts(item))) <= max_tokens for item in items)


def _texts(item: ModelInput) -> tuple[str, ...]:
    return (item,) if isinstance(item, str) else item
