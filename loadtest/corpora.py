"""Seeded texts, each of them once: a load of repeated texts would measure caches. Pure.

The mixtures are word counts as they are met: a search query is a few words, a passage a paragraph.
"""

import random
from collections.abc import Iterator
from typing import Literal

import msgspec

Mixture = Literal["queries", "passages", "mixed"]
EncodingFormat = Literal["base64", "float"]

# Median words and spread of a log-normal, and the most there can be.
_QUERIES = (6.0, 0.5, 30)
_PASSAGES = (90.0, 0.6, 380)
# So many different texts are made before; a serial number in front makes each call's its own.
_POOL = 2000


def word_counts(mixture: Mixture, count: int, seed: int) -> list[int]:
    """How many words each of so many texts has."""
    dice = random.Random(seed)  # noqa: S311 - a seeded load
    kinds = {
        "queries": (_QUERIES,),
        "passages": (_PASSAGES,),
        "mixed": (_QUERIES, _QUERIES, _QUERIES, _PASSAGES),
    }
    found = []
    for _ in range(count):
        median, spread, most = dice.choice(kinds[mixture])
        found.append(max(1, min(most, round(median * dice.lognormvariate(0, spread)))))
    return found


def pool(mixture: Mixture, seed: int, count: int = _POOL) -> list[str]:
    """Texts of words that look like words: 2 to 11 letters."""
    dice = random.Random(seed)  # noqa: S311 - a seeded load
    letters = "eeeeaaaiiooutttnnssrrhhlldcmwfgypbvk"
    words = ["".join(dice.choices(letters, k=dice.randint(2, 11))) for _ in range(5000)]
    return [" ".join(dice.choices(words, k=length)) for length in word_counts(mixture, count, seed)]


def texts(mixture: Mixture, seed: int) -> Iterator[str]:
    """Endless, all different, and different for each seed below a million."""
    made = pool(mixture, seed)
    serial = seed * 10**9
    while True:
        for text in made:
            serial += 1
            yield f"{serial} {text}"


class Call(msgspec.Struct, frozen=True):
    """One request ready to be written, and the texts whose vectors must come back."""

    request: bytes
    inputs: tuple[str, ...]


class Calls:
    """OpenAI embedding calls to one server. headers: raw lines that each call carries."""

    def __init__(
        self, source: Iterator[str], *, inputs: int = 1, form: EncodingFormat = "base64", model: str = "stub"
    ) -> None:
        self._source = source
        self._inputs = inputs
        self._tail = f'],"model":"{model}","encoding_format":"{form}"}}'.encode()

    def next(self, head: bytes) -> Call:
        """The next call under a head that `head_of` made."""
        inputs = tuple([next(self._source) for _ in range(self._inputs)])
        # The corpus needs no escapes: letters, digits and spaces.
        body = b'{"input":["' + '","'.join(inputs).encode() + b'"' + self._tail
        return Call(head % len(body) + body, inputs)


def head_of(host: str, headers: dict[str, str]) -> bytes:
    """The head of POST /v1/embeddings, with %d where the body's length goes."""
    lines = [f"host: {host}", "content-type: application/json", *(f"{k}: {v}" for k, v in headers.items())]
    return (
        "POST /v1/embeddings HTTP/1.1\r\n" + "\r\n".join(lines)
    ).encode() + b"\r\ncontent-length: %d\r\n\r\n"
