"""Fuzz tests: for any body, an adapter returns finite numbers of the right shape or raises ReplicaFailed."""

import json
import os
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.contract import (
    Classify,
    ClassifyReply,
    Embed,
    EmbedReply,
    Encode,
    EncodeReply,
    Output,
    Reply,
    Rerank,
    RerankReply,
    Score,
    ScoreKind,
)
from backends.contract.errors import BackendError, ReplicaFailed
from backends.http.client import UpstreamResponse
from backends.infinity import wire as infinity_wire
from backends.openai import api as openai_api
from backends.openai.shapes import SHAPES
from backends.tei import adapter as tei
from backends.tokens.tokenizer import TokenCount
from backends.vllm import adapter as vllm
from backends.vllm import probe as vllm_probe
from backends.vllm import wire as vllm_wire
from tests.backends.invalid_replies import packed

# `make fuzz` sends more.
CASES = int(os.environ.get("FUZZ_CASES", "100"))
EMBED, RERANK = Embed(("a", "b")), Rerank("q", ("a", "b"))
COUNTED = TokenCount(6, ())
VLLM = vllm_probe.VllmProfile("m", 16, "0.32.0", 2, "use_activation", "on_request")
OPENAI = openai_api.OpenAIProfile("m", 16, 2)
TEI = tei.TeiInfo("m", {"embedding": {"pooling": "cls"}}, 16)

EMBEDDINGS = json.dumps(packed([0.6, 0.8], [1.0, 0.0])).encode()
TYPED = b'{"embeddings":{"float":[[0.6,0.8],[1.0,0.0]]},"meta":{"billed_units":{"input_tokens":6}}}'
ROWS = b"[[0.6,0.8],[1.0,0.0]]"
RANKS = {
    "tei": b'[{"index":1,"score":0.5},{"index":0,"score":0.25}]',
    "infinity": b'{"results":[{"index":1,"relevance_score":0.5},{"index":0,"relevance_score":0.25}]}',
    "cohere": b'{"results":[{"index":1,"relevance_score":0.5},{"index":0,"relevance_score":0.25}],'
    b'"meta":{"billed_units":{"search_units":1},"tokens":{"input_tokens":9.0}}}',
    "voyage": b'{"data":[{"index":0,"relevance_score":0.5},{"index":1,"relevance_score":-1}],'
    b'"usage":{"total_tokens":9}}',
    "vllm": b'{"data":[{"index":0,"score":0.5},{"index":1,"score":-2}],"usage":{"prompt_tokens":9}}',
}

CLASSIFIER = tei.TeiInfo("m", {"classifier": {"id2label": {"0": "x", "1": "y"}}}, 16)
VLLM_CLASSES = vllm_probe.VllmProfile("m", 16, "0.32.0", classes=2, raw_classes=True)
CLASSIFY, SCORE = Classify(("a", "b")), Score((("q", "a"), ("q", "b")))
LABELS = {
    "tei": b'[[{"score":0.5,"label":"x"},{"score":0.25,"label":"y"}],'
    b'[{"score":1,"label":"y"},{"score":0,"label":"x"}]]',
    "vllm": b'{"data":[{"index":1,"probs":[0.5,0.5]},{"index":0,"probs":[0.25,0.75]}],'
    b'"usage":{"prompt_tokens":9}}',
}
PAIRS = b'[[{"score":0.5,"label":"x"}],[{"score":0.25,"label":"x"}]]'

Decode = Callable[[UpstreamResponse], Reply]
# Adapter and operation → a valid body and the function that decodes it.
DECODERS: dict[str, tuple[bytes, Decode]] = {
    "tei": (EMBEDDINGS, lambda response: tei.decode(EMBED, "/v1/embeddings", response, TEI)),
    "tei_native": (ROWS, lambda response: tei.decode(EMBED, "/embed", response, TEI)),
    "tei_ranks": (RANKS["tei"], lambda response: tei.decode(RERANK, "/rerank", response, TEI)),
    "infinity": (EMBEDDINGS, lambda response: infinity_wire.decode(EMBED, response, COUNTED)),
    "infinity_ranks": (RANKS["infinity"], lambda response: infinity_wire.decode(RERANK, response, COUNTED)),
    "vllm": (EMBEDDINGS, lambda response: vllm.decode(EMBED, response, VLLM)),
    "vllm_ranks": (RANKS["vllm"], lambda response: vllm.decode(RERANK, response, VLLM)),
    "tei_labels": (LABELS["tei"], lambda response: tei.decode(CLASSIFY, "/predict", response, CLASSIFIER)),
    "tei_pairs": (PAIRS, lambda response: tei.decode(SCORE, "/predict", response, TEI)),
    "infinity_labels": (
        b'{"data":' + LABELS["tei"] + b"}",
        lambda response: infinity_wire.decode(CLASSIFY, response, COUNTED, ("x", "y")),
    ),
    "vllm_labels": (
        LABELS["vllm"],
        lambda response: vllm.decode(CLASSIFY, response, VLLM_CLASSES, ("x", "y")),
    ),
    "openai": (EMBEDDINGS, lambda response: openai_api.decode(EMBED, response, OPENAI, None)),
    "cohere": (
        TYPED,
        lambda response: openai_api.decode(EMBED, response, OPENAI, None, SHAPES["cohere"]),
    ),
    "cohere_ranks": (
        RANKS["cohere"],
        lambda response: openai_api.decode_rerank(RERANK, response, ScoreKind.SIGMOID, None, 8),
    ),
    "voyage_ranks": (
        RANKS["voyage"],
        lambda response: openai_api.decode_rerank(RERANK, response, ScoreKind.LOGIT, None, 8),
    ),
}
FAILURES = {
    "tei": tei.failure,
    "infinity": infinity_wire.failure,
    "vllm": vllm_wire.failure,
    "openai": openai_api.failure,
}


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draw a damaged body: cut off, with other bytes inserted, or with a part repeated."""
    at = draw(st.integers(0, len(whole)))
    until = draw(st.integers(at, len(whole)))
    return whole[:at] + draw(st.binary(max_size=6)) + whole[until if draw(st.booleans()) else at :]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["data", "results", "usage", "error", "index", "code"]), inner)
    ),
    max_leaves=8,
)
json_bodies = json_values.map(lambda value: json.dumps(value).encode())


# Hypothesis validates each new strategy, which takes longer than drawing from it.
@cache
def damaged_or_other(whole: bytes) -> st.SearchStrategy[bytes]:
    """Return damaged forms of a body, and bodies of any other JSON."""
    return damaged(whole) | json_bodies


@pytest.mark.parametrize("decoder", DECODERS)
@settings(max_examples=CASES, deadline=None)
@given(data=st.data())
def test_no_damaged_body_becomes_a_vector(decoder: str, data: st.DataObject) -> None:
    whole, decode = DECODERS[decoder]
    body = data.draw(damaged_or_other(whole))
    try:
        reply = decode(UpstreamResponse(200, {"x-compute-tokens": "6"}, body))
    except ReplicaFailed:
        return
    numbers = reply.vectors if isinstance(reply, EmbedReply) else reply.scores  # type: ignore[union-attr]
    assert isinstance(reply, EmbedReply | RerankReply | ClassifyReply)
    assert (2, np.float32) == (len(numbers), numbers.dtype)
    assert np.isfinite(numbers).all()
    assert 0 <= reply.tokens <= 32


@pytest.mark.parametrize("adapter", FAILURES)
@settings(max_examples=CASES, deadline=None)
@given(status=st.integers(201, 599), body=st.binary() | json_bodies)
def test_every_error_status_becomes_a_backend_error(adapter: str, status: int, body: bytes) -> None:
    assert isinstance(FAILURES[adapter](UpstreamResponse(status, {}, body)), BackendError)


@settings(max_examples=CASES, deadline=None)
@given(body=st.binary() | json_bodies)
def test_restores_a_valid_status_for_any_body(body: bytes) -> None:
    assert vllm_wire.restore_status(UpstreamResponse(200, {}, body)).status in {200, *range(400, 600)}


@pytest.mark.parametrize(
    ("whole", "decode"),
    [
        (
            b'[[{"index":3,"value":0.5}],[]]',
            lambda response: tei.decode(
                Encode(("a", "b"), frozenset({Output.SPARSE})), "/embed_sparse", response, TEI
            ),
        ),
        (
            b"[[[0.5,1.0]],[[0.5,1.0],[1.0,0.0]]]",
            lambda response: tei.decode(
                Encode(("a", "b"), frozenset({Output.TOKENS})), "/embed_all", response, TEI
            ),
        ),
    ],
    ids=["sparse", "tokens"],
)
@settings(max_examples=CASES, deadline=None)
@given(data=st.data())
def test_no_damaged_body_becomes_terms_or_token_vectors(
    whole: bytes, decode: Decode, data: st.DataObject
) -> None:
    body = data.draw(damaged_or_other(whole))
    try:
        reply = decode(UpstreamResponse(200, {"x-compute-tokens": "6"}, body))
    except ReplicaFailed:
        return
    assert isinstance(reply, EncodeReply)
    for terms in reply.sparse or ():
        assert len(terms.indices) == len(terms.values)
        assert (np.diff(terms.indices) > 0).all()
        assert (terms.values != 0).all()
        assert np.isfinite(terms.values).all()
    assert 2 == len(reply.sparse or reply.token_vectors or ())
    for matrix in reply.token_vectors or ():
        assert 2 == matrix.ndim
        assert np.isfinite(matrix).all()
