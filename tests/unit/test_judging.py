"""Calls that a canary gets, and the canary that would get none."""

import pytest

from backends.contract import Capabilities, Embed, Encode, Operation, Output, Rerank, Tokenize
from gateway.calls import Call, Similarity, Work
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
SPARSE = Encode(("a",), frozenset({Output.SPARSE}))
DENSE_ONLY = Capabilities(
    "m", frozenset({Operation.EMBED, Operation.ENCODE}), outputs=frozenset({Output.DENSE})
)


@pytest.mark.parametrize(
    ("work", "canary", "is_sent"),
    [
        (Embed(("a",)), EMBEDDER, True),
        (Similarity("a", ("b",)), EMBEDDER, True),
        # Ranked by cosine, as the model ranks.
        (Rerank("q", ("a",)), EMBEDDER, True),
        (Tokenize(("a",)), EMBEDDER, False),
        (Embed(("a",), late_chunking=True), EMBEDDER, False),
        (SPARSE, DENSE_ONLY, False),
        (SPARSE, MODEL, True),
    ],
)
def test_a_canary_gets_what_it_offers(work: Work, canary: Capabilities, *, is_sent: bool) -> None:
    assert is_sent is serves_alike(canary, MODEL, Call(work))


def test_a_canary_ranks_as_the_model_does() -> None:
    call = Call(Rerank("q", ("a",)))

    assert not serves_alike(EMBEDDER, RERANKER, call)
    assert serves_alike(Capabilities("r", frozenset({Operation.RERANK})), RERANKER, call)


def test_a_canary_without_instructions_gets_no_call_with_one() -> None:
    call = Call(Rerank("q", ("a",)), instruction="find answers")

    assert not serves_alike(Capabilities("r", frozenset({Operation.RERANK})), RERANKER, call)


def test_a_canary_that_shares_no_operation_is_refused() -> None:
    images = Capabilities("m", frozenset({Operation.EMBED_IMAGE}) | FREE)

    assert "it offers nothing of what the model does: embed, encode" == nothing_shared(MODEL, images)
    assert nothing_shared(MODEL, EMBEDDER) is None
    assert nothing_shared(Capabilities("t", FREE), images) is None
