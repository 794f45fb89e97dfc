"""Descriptions of one replica: a smaller offer of the same model is accepted once it is confirmed."""

import pytest

from backends.contract import Capabilities, Operation, Output
from backends.contract.errors import ReplicaFailed
from backends.http.offers import CONFIRM_S, CONFIRMATIONS_MIN, OfferHistory, OfferLost

EMBED = frozenset({Operation.EMBED, Operation.TOKENIZE})
RERANK = frozenset({Operation.RERANK, Operation.TOKENIZE})


class Bench:
    """History with a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.history = OfferHistory(lambda: self.now_s)
        self.accept(EMBED, {Output.DENSE})

    def accept(
        self,
        operations: frozenset[Operation],
        outputs: set[Output] | None = None,
        model: str = "m",
        options: tuple[str, ...] = (),
    ) -> None:
        found = Capabilities(model, operations, version="1", outputs=frozenset(outputs or ()))
        self.history.accept(found, options)


def test_description_without_a_model_operation_is_never_accepted() -> None:
    free = Capabilities("m", frozenset({Operation.TOKENIZE, Operation.DETOKENIZE}))
    for _ in range(2):
        with pytest.raises(ReplicaFailed, match="none of the probes of m found an operation"):
            OfferHistory().accept(free)


@pytest.mark.parametrize(
    ("operations", "outputs", "lost"),
    [
        (RERANK, set(), "dense, embed"),
        (EMBED, set(), "dense"),
        (frozenset({Operation.EMBED}), {Output.DENSE}, "tokenize"),
    ],
)
def test_smaller_offer_of_the_same_model_is_not_accepted(
    operations: frozenset[Operation], outputs: set[Output], lost: str
) -> None:
    bench = Bench()
    with pytest.raises(OfferLost, match=f"no longer find {lost};"):
        bench.accept(operations, outputs)
    bench.accept(EMBED, {Output.DENSE})


def test_lost_option_is_a_smaller_offer() -> None:
    bench = Bench()
    bench.accept(EMBED, {Output.DENSE}, options=("raw vectors",))
    with pytest.raises(OfferLost, match="raw vectors"):
        bench.accept(EMBED, {Output.DENSE})


def test_smaller_offer_is_accepted_once_it_was_repeated_for_long_enough() -> None:
    bench = Bench()
    for _ in range(CONFIRMATIONS_MIN):
        with pytest.raises(OfferLost):
            bench.accept(RERANK)
    bench.now_s = CONFIRM_S
    bench.accept(RERANK)
    bench.accept(RERANK)


def test_another_answer_starts_the_confirmation_again() -> None:
    bench = Bench()
    with pytest.raises(OfferLost):
        bench.accept(RERANK)
    bench.now_s = CONFIRM_S
    bench.accept(EMBED, {Output.DENSE})
    for _ in range(CONFIRMATIONS_MIN):
        with pytest.raises(OfferLost):
            bench.accept(RERANK)


def test_another_model_or_a_larger_offer_is_accepted_at_once() -> None:
    bench = Bench()
    bench.accept(EMBED | RERANK, {Output.DENSE, Output.SPARSE})
    bench.accept(RERANK, model="other")
