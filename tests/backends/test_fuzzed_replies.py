"""Whatever bytes come back, an adapter gives right-shaped finite numbers or Failed, and nothing else."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import infinity, openai, tei, vllm
from backends.contract import Embed, Embedded, Reply, Rerank, Reranked
from backends.counting import Counted
from backends.errors import BackendError, Failed
from backends.http import Answer
from tests.backends.wrong_replies import packed

EMBED, RERANK = Embed(("a", "b")), Rerank("q", ("a", "b"))
COUNTED = Counted(6, ())
VLLM = vllm.Facing("m", 16, "0.32.0", 2, "use_activation", "on_request")
OPENAI = openai.Facing("m", 16, 2)
TEI = tei.Info("m", {"embedding": {"pooling": "cls"}}, 16)

EMBEDDINGS = json.dumps(packed([0.6, 0.8], [1.0, 0.0])).encode()
ROWS = b"[[0.6,0.8],[1.0,0.0]]"
RANKS = {
    "tei": b'[{"index":1,"score":0.5},{"index":0,"score":0.25}]',
    "infinity": b'{"results":[{"index":1,"relevance_score":0.5},{"index":0,"relevance_score":0.25}]}',
    "vllm": b'{"data":[{"index":0,"score":0.5},{"index":1,"score":-2}],"usage":{"prompt_tokens":9}}',
}

Decode = Callable[[Answer], Reply]
# Adapter and operation: a right answer, and what reads it.
READERS: dict[str, tuple[bytes, Decode]] = {
    "tei": (EMBEDDINGS, lambda a: tei.decode(EMBED, "/v1/embeddings", a, TEI)),
    "tei_native": (ROWS, lambda a: tei.decode(EMBED, "/embed", a, TEI)),
    "tei_ranks": (RANKS["tei"], lambda a: tei.decode(RERANK, "/rerank", a, TEI)),
    "infinity": (EMBEDDINGS, lambda a: infinity.decode(EMBED, a, COUNTED)),
    "infinity_ranks": (RANKS["infinity"], lambda a: infinity.decode(RERANK, a, COUNTED)),
    "vllm": (EMBEDDINGS, lambda a: vllm.decode(EMBED, a, VLLM)),
    "vllm_ranks": (RANKS["vllm"], lambda a: vllm.decode(RERANK, a, VLLM)),
    "openai": (EMBEDDINGS, lambda a: openai.decode(EMBED, a, OPENAI, None)),
}
FAILURES = {"tei": tei.failure, "infinity": infinity.failure, "vllm": vllm.failure, "openai": openai.failure}


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """A body cut off, with other bytes in it, or with a part twice."""
    at = draw(st.integers(0, len(whole)))
    until = draw(st.integers(at, len(whole)))
    return whole[:at] + draw(st.binary(max_size=6)) + whole[until if draw(st.booleans()) else at :]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["data", "results", "usage", "error", "index", "code"]), inner)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_body_becomes_a_wrong_vector(reader: str, data: st.DataObject) -> None:
    whole, decode = READERS[reader]
    body = data.draw(damaged(whole) | plain.map(lambda value: json.dumps(value).encode()))
    try:
        reply = decode(Answer(200, {"x-compute-tokens": "6"}, body))
    except Failed:
        return
    numbers = reply.vectors if isinstance(reply, Embedded) else reply.scores  # type: ignore[union-attr]
    assert isinstance(reply, Embedded | Reranked)
    assert (2, np.float32) == (len(numbers), numbers.dtype)
    assert np.isfinite(numbers).all()
    assert 0 <= reply.tokens <= 32


@pytest.mark.parametrize("adapter", FAILURES)
@settings(max_examples=300, deadline=None)
@given(status=st.integers(201, 599), body=st.binary() | plain.map(lambda value: json.dumps(value).encode()))
def test_every_other_answer_is_some_failure(adapter: str, status: int, body: bytes) -> None:
    assert isinstance(FAILURES[adapter](Answer(status, {}, body)), BackendError)


@settings(max_examples=300, deadline=None)
@given(body=st.binary() | plain.map(lambda value: json.dumps(value).encode()))
def test_a_masked_error_is_looked_for_in_any_body(body: bytes) -> None:
    assert vllm.unmasked(Answer(200, {}, body)).status in {200, *range(400, 600)}
