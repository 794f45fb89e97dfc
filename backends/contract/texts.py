"""Bounds on the length of texts that are valid without a tokenizer."""

import unicodedata
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from backends.contract.capabilities import Truncate

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


def surely_fits(items: Sequence[ModelInput], max_tokens: int) -> bool:
    """Return True if every input is short enough to fit with any tokenizer."""
    return all(sum(map(token_upper_bound, texts_of(item))) <= max_tokens for item in items)


def texts_of(item: ModelInput) -> tuple[str, ...]:
    """Return the one text of an input, or both texts of a pair."""
    return (item,) if isinstance(item, str) else item
