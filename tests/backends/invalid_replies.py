"""Invalid bodies of status 200 for a request of two inputs, shared by all adapters."""

import base64
import json
from typing import Any

import numpy as np

USAGE = {"prompt_tokens": 4, "total_tokens": 4}


def packed(*rows: list[float], indices: list[int] | None = None, usage: Any = USAGE) -> dict[str, Any]:
    """Return a reply of /v1/embeddings in base64."""
    data = [
        {"object": "embedding", "index": index, "embedding": base64.b64encode(np.array(row, "<f4")).decode()}
        for index, row in zip(indices or range(len(rows)), rows, strict=True)
    ]
    return {"object": "list", "data": data, "model": "m", "usage": usage}


def numbers(*rows: Any) -> dict[str, Any]:
    """Return a reply of /v1/embeddings in numbers."""
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    return {"object": "list", "data": data, "model": "m", "usage": USAGE}


def body_of(reply: Any) -> bytes:
    """Encode a reply as JSON."""
    return reply if isinstance(reply, bytes) else json.dumps(reply).encode()


NOT_VECTORS: dict[str, Any] = {
    "html": b"<html>welcome</html>",
    "nothing": b"",
    "null": b"null",
    "cut_off": json.dumps(packed([1.0], [2.0])).encode()[:-20],
    "no_utf8": b'{"data":[{"index":0,"embedding":"\xff"}],"usage":{"prompt_tokens":1}}',
    "too_few": packed([1.0]),
    "too_many": packed([1.0], [1.0], [1.0]),
    "none": packed(),
    "empty_rows": packed([], []),
    "ragged": packed([1.0, 2.0], [3.0]),
    "ragged_numbers": numbers([1.0, 2.0], [3.0]),
    "index_twice": packed([1.0], [2.0], indices=[0, 0]),
    "index_missing": packed([1.0], [2.0], indices=[0, 2]),
    "index_from_one": packed([1.0], [2.0], indices=[1, 2]),
    "index_negative": packed([1.0], [2.0], indices=[-1, 0]),
    "nan": packed([1.0], [float("nan")]),
    "infinity": packed([1.0], [float("inf")]),
    "past_float32": numbers([1e39], [1.0]),
    "a_vector_for_each_token": numbers([[1.0], [2.0]], [[1.0], [2.0]]),
    "nulls": numbers([None], [1.0]),
    "not_base64": {"data": [{"index": i, "embedding": "!!!!"} for i in (0, 1)], "usage": USAGE},
    "half_a_float": {"data": [{"index": i, "embedding": "AAAA"} for i in (0, 1)], "usage": USAGE},
    "error_of_status_200": {"error": {"message": "no", "type": "x", "param": None, "code": 500}},
    "flat_error_of_status_200": {"object": "error", "message": "no", "type": "x", "code": 500},
    "deep": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}

# The key of the rankings in a reply of a kind (None: the reply is the list), and that of each score.
RANK_KEYS: dict[str, tuple[str | None, str]] = {
    "tei": (None, "score"),
    "infinity": ("results", "relevance_score"),
    "vllm": ("data", "score"),
    "cohere": ("results", "relevance_score"),
    "voyage": ("data", "relevance_score"),
}


def ranking(kind: str, *pairs: tuple[Any, ...]) -> Any:
    """Return a ranking as a server of a kind sends it. pairs: index and score of each document."""
    outer, score = RANK_KEYS[kind]
    ranks = [dict(zip(("index", score), pair, strict=False)) for pair in pairs]
    return ranks if outer is None else {outer: ranks, "usage": {"total_tokens": 9}}


NOT_RANKS: dict[str, Any] = {
    "html": b"<html>",
    "cut_off": b'[{"index":0,"score":0.5},{"ind',
    "none": [],
    "too_few": [(0, 0.5)],
    "too_many": [(0, 0.5), (1, 0.5), (2, 0.5)],
    "index_twice": [(0, 0.5), (0, 0.4)],
    "index_too_high": [(0, 0.5), (2, 0.4)],
    "index_negative": [(-1, 0.5), (0, 0.4)],
    "no_score": [(0,), (1,)],
    "null_score": [(0, None), (1, 0.5)],
    "words": [(0, "high"), (1, 0.5)],
    "nan": [(0, float("nan")), (1, 0.5)],
    "infinity": [(0, float("inf")), (1, 0.5)],
    "past_float32": [(0, 1e39), (1, 0.5)],
}
