"""Offer of several upstreams as one model: what all have, and what contradicts."""

from typing import Any

import msgspec
import pytest

from backends.contract import Capabilities, Operation, Truncate
from gateway.routing.offers import Facts, common_capabilities, contradiction

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
