"""Calls that a canary gets, and the canary that would get none."""

import pytest

from backends.contract import Capabilities, Embed, EmbedChunks, Encode, Operation, Output, Rerank, Tokenize
from gateway.calls import Call, Similarity
from gateway.upstreams.judging import nothing_shared, serves_alike

FREE = frozenset({Operation.TOKENIZE, Operation.DETOKENIZE})
MODEL = Capabilities(
    "m",
    frozenset({Operation.EMBED, Operation.ENCODE}) | FREE,
    outputs=frozenset({Output.DENSE, Output.SPARSE}),
    takes_instruction=True,
    late_chunking=True,
)
EMBEDDER = Capabilities("m", frozenset({Operation.EMBED}))
RERANKER = Capabilities("r", frozenset({Operation.RERANK}) | FREE, takes_instruction=True)
PLAIN_RERANKER = Capabilities("r", frozenset({Operation.RERANK}))
SPARSE = Encode(("a",), frozenset({Output.SPARSE}))
DENSE_ONLY = Capabilities(
    "m", frozenset({Operation.EMBED, Operation.ENCODE}), outputs=frozenset({Output.DENSE})
)


@pytest.mark.parametrize(
    ("call", "canary", "model", "is_sent"),
    [
        (Call(Embed(("a",))), EMBEDDER, MODEL, True),
        (Call(Similarity("a", ("b",))), EMBEDDER, MODEL, True),
        # Ranked by cosine, as the model ranks, or by its scores.
        (Call(Rerank("q", ("a",))), EMBEDDER, MODEL, True),
        (Call(Rerank("q", ("a",))), EMBEDDER, RERANKER, False),
        (Call(Rerank("q", ("a",))), PLAIN_RERANKER, RERANKER, True),
        (Call(Rerank("q", ("a",)), instruction="find answers"), PLAIN_RERANKER, RERANKER, False),
        (Call(Tokenize(("a",))), EMBEDDER, MODEL, False),
        (Call(EmbedChunks((("a",),))), EMBEDDER, MODEL, False),
        (Call(SPARSE), DENSE_ONLY, MODEL, False),
        (Call(SPARSE), MODEL, MODEL, True),
    ],
)
def test_a_canary_gets_what_it_offers(
    call: Call, canary: Capabilities, model: Capabilities, *, is_sent: bool
) -> None:
    assert is_sent is serves_alike(canary, model, call)


def test_a_canary_that_shares_no_operation_is_refused() -> None:
    images = Capabilities("m", frozenset({Operation.EMBED_IMAGE}) | FREE)

    assert "it offers nothing of what the model does: embed, encode" == nothing_shared(MODEL, images)
    assert nothing_shared(MODEL, EMBEDDER) is None
    assert nothing_shared(Capabilities("t", FREE), images) is None
