"""Seeded texts and the calls that carry them; pure.

Every text occurs once, because a load of repeated texts would measure caches. The mixtures follow the word
counts of real traffic: a search query is a few words, a passage a paragraph.
"""

import random
from collections.abc import Iterator
from typing import Literal

import msgspec

from gateway.cli.bench_load import Arrivals

Mixture = Literal["queries", "passages", "mixed"]
EncodingFormat = Literal["base64", "float"]

# Median and spread of a log-normal distribution of word counts, and the maximum.
_QUERIES = (6.0, 0.5, 30)
_PASSAGES = (90.0, 0.6, 380)
# Number of texts generated in advance; a serial number in front makes each call's text unique.
_POOL_SIZE = 2000


def word_counts(mixture: Mixture, count: int, seed: int) -> list[int]:
    """Return the number of words of each of `count` texts."""
    dice = random.Random(seed)  # noqa: S311 - a seeded load
    kinds = {
        "queries": (_QUERIES,),
        "passages": (_PASSAGES,),
        "mixed": (_QUERIES, _QUERIES, _QUERIES, _PASSAGES),
    }
    counts = []
    for _ in range(count):
        median, spread, maximum = dice.choice(kinds[mixture])
        counts.append(max(1, min(maximum, round(median * dice.lognormvariate(0, spread)))))
    return counts


def text_pool(mixture: Mixture, seed: int, count: int = _POOL_SIZE) -> list[str]:
    """Return texts made of random words of 2 to 11 letters."""
    dice = random.Random(seed)  # noqa: S311 - a seeded load
    letters = "eeeeaaaiiooutttnnssrrhhlldcmwfgypbvk"
    words = ["".join(dice.choices(letters, k=dice.randint(2, 11))) for _ in range(5000)]
    return [" ".join(dice.choices(words, k=length)) for length in word_counts(mixture, count, seed)]


def texts(mixture: Mixture, seed: int) -> Iterator[str]:
    """Yield texts without end, all different, and different for each seed below a million."""
    pool = text_pool(mixture, seed)
    serial = seed * 10**9
    while True:
        for text in pool:
            serial += 1
            yield f"{serial} {text}"


class PreparedCall(msgspec.Struct, frozen=True):
    """One request ready to be written, and the texts whose vectors must come back."""

    request: bytes
    inputs: tuple[str, ...]


class CallShape(msgspec.Struct, frozen=True):
    """Shape of the calls of a load.

    query: makes the calls reranks of this query. word: prefix of each text.
    identical: number of consecutive calls with the same text. arrivals: of an open loop.
    """

    inputs: int = 1
    form: EncodingFormat = "base64"
    model: str = "stub"
    query: str = ""
    word: str = ""
    identical: int = 1
    arrivals: Arrivals = "poisson"


SINGLE, BATCH = CallShape(), CallShape(32)


class CallFactory:
    """Factory of OpenAI embedding requests, or of rerank requests."""

    def __init__(self, source: Iterator[str], shape: CallShape = SINGLE) -> None:
        self._source = source
        self._inputs = shape.inputs
        rest = {"query": shape.query} if shape.query else {"encoding_format": shape.form}
        self._start = b'{"documents":' if shape.query else b'{"input":'
        self._end = b"," + msgspec.json.encode({"model": shape.model} | rest)[1:]

    def next(self, head: bytes) -> PreparedCall:
        """Return the next call; `head` comes from `request_head`."""
        inputs = tuple([next(self._source) for _ in range(self._inputs)])
        body = self._start + msgspec.json.encode(inputs) + self._end
        return PreparedCall(head % len(body) + body, inputs)


def request_head(host: str, headers: dict[str, str], path: str = "/v1/embeddings") -> bytes:
    """Return the head of a POST, with %d in place of the body's length."""
    lines = [f"host: {host}", "content-type: application/json", *(f"{k}: {v}" for k, v in headers.items())]
    start = "\r\n".join([f"POST {path} HTTP/1.1", *lines])
    return start.encode() + b"\r\ncontent-length: %d\r\n\r\n"
