"""Offers of models: of several replicas, and of several upstreams."""

from typing import Any

import msgspec
import pytest

from backends.contract import Capabilities, Operation, Output, Truncate
from backends.contract.errors import ReplicaFailed
from backends.http.offers import CONFIRM_S, CONFIRMATIONS_MIN, OfferHistory, OfferLost
from gateway.routing.offers import Facts, common_capabilities, contradiction

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


EMBEDDER = Capabilities(
    "m",
    frozenset({Operation.EMBED, Operation.TOKENIZE}),
    max_input_tokens=512,
    dimensions=8,
    late_chunking=True,
)
RANKER = Capabilities("r", frozenset({Operation.RERANK}), score_kind="probability")
CLASSIFIER = Capabilities("c", frozenset({Operation.CLASSIFY}), labels=("good", "bad"))


def facts(capabilities: Capabilities = EMBEDDER, **other: Any) -> Facts:
    defaults = {"backend": "tei", "prompts": {}, "truncate": Truncate.RIGHT}
    return Facts(capabilities=capabilities, **(defaults | other))


def changed(capabilities: Capabilities, **fields: Any) -> Facts:
    return facts(msgspec.structs.replace(capabilities, **fields))


@pytest.mark.parametrize(
    ("first", "other", "reason"),
    [
        (facts(), facts(RANKER), "it is a reranker"),
        (facts(RANKER), facts(CLASSIFIER), "it is a classifier"),
        (facts(RANKER), changed(RANKER, score_kind="logit"), "scale of its scores is logit"),
        (facts(CLASSIFIER), changed(CLASSIFIER, labels=("x",)), "its labels are not the model's: x"),
        (facts(), facts(prompts={"query": "q: "}), "prompts differ from the model's: query"),
        (facts(), changed(EMBEDDER, typed_inputs=True), "type of an input"),
        (facts(), facts(truncate=Truncate.ERROR), "inputs that are too long differently: error, not right"),
        (facts(), changed(EMBEDDER, max_input_tokens=8192), "at most 8192 tokens"),
        (facts(), changed(EMBEDDER, max_input_tokens=128), "at most 128 tokens"),
        (
            facts(truncate=Truncate.ERROR),
            facts(msgspec.structs.replace(EMBEDDER, max_input_tokens=8192), truncate=Truncate.ERROR),
            "at most 8192 tokens",
        ),
    ],
)
def test_contradictions_are_named(first: Facts, other: Facts, reason: str) -> None:
    found = contradiction(first, other)

    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (facts(), facts(backend="torch")),
        (facts(), facts(prompts={"query": ""})),
        (facts(), facts(msgspec.structs.replace(EMBEDDER, max_input_tokens=8192), backend="torch")),
        (facts(backend="vllm"), changed(EMBEDDER, max_input_tokens=128)),
        (facts(), changed(EMBEDDER, max_input_tokens=None)),
    ],
)
def test_upstreams_that_can_be_one_model_do_not_contradict(first: Facts, other: Facts) -> None:
    assert contradiction(first, other) is None


def test_a_model_offers_what_all_its_upstreams_offer() -> None:
    other = msgspec.structs.replace(
        EMBEDDER,
        operations=frozenset({Operation.EMBED}),
        max_input_tokens=256,
        late_chunking=False,
        overhead_tokens=3,
    )
    common = common_capabilities([facts(), facts(other)])

    assert common is not None
    assert (frozenset({Operation.EMBED}), 256, False, 3) == (
        common.operations,
        common.max_input_tokens,
        common.late_chunking,
        common.overhead_tokens,
    )
    assert EMBEDDER is common_capabilities([facts()])
    assert common_capabilities([]) is None
