"""Tests of splitting and merging several kinds of output, and of their strict decoding."""

import numpy as np
import pytest

from backends.contract import Embed, EmbedReply, Encode, EncodeReply, Output, RerankReply, TermWeights
from backends.contract.errors import ReplicaFailed, UnsupportedWork
from backends.http.adapters import check_outputs, merge_replies, split_outputs
from backends.http.replies import label_scores, term_weights, token_matrices

ROWS = np.ones((1, 2), np.float32)
TERMS = TermWeights(np.array([3], np.int32), np.array([0.5], np.float32))


def test_splits_work_into_an_embed_and_one_part_per_other_output() -> None:
    work = Encode(("a",), frozenset(Output), normalize=False, dimensions=4, prompt_name="query")
    first, *rest = split_outputs(work)

    assert Embed(("a",), normalize=False, dimensions=4, prompt_name="query") == first
    assert [{Output.SPARSE}, {Output.MULTIVECTOR}, {Output.TOKENS}] == [part.outputs for part in rest]  # type: ignore[union-attr]


def test_counts_the_tokens_of_an_input_once() -> None:
    parts = [EmbedReply(ROWS, 7), EncodeReply(7, sparse=(TERMS,)), EncodeReply(7, token_vectors=(ROWS,))]
    merged = merge_replies(parts)

    assert (7, (), (TERMS,), None) == (merged.tokens, merged.truncated, merged.sparse, merged.multivector)
    np.testing.assert_array_equal(ROWS, merged.dense)
    np.testing.assert_array_equal(ROWS, merged.token_vectors[0])  # type: ignore[index]


@pytest.mark.parametrize(
    ("truncated", "expected"), [(((), (1,)), (1,)), (((0,), (1, 0)), (0, 1)), ((None, ()), None)]
)
def test_merges_truncated_inputs_of_all_parts(
    truncated: tuple[tuple[int, ...] | None, ...], expected: tuple[int, ...] | None
) -> None:
    assert (
        expected
        == merge_replies([EncodeReply(1, sparse=(), truncated=indices) for indices in truncated]).truncated
    )


def test_reply_of_another_operation_fails() -> None:
    with pytest.raises(ReplicaFailed):
        merge_replies([RerankReply(ROWS[0], 1)])


def test_names_the_missing_output() -> None:
    with pytest.raises(UnsupportedWork, match="sparse"):
        check_outputs(Encode(("a",), frozenset({Output.DENSE, Output.SPARSE})), frozenset({Output.DENSE}))


def test_terms_are_ascending_and_nonzero() -> None:
    terms = term_weights([(7, 0.5), (2, 1.5), (4, 0.0)])

    assert ([2, 7], [1.5, 0.5]) == (terms.indices.tolist(), terms.values.tolist())
    assert (np.int32, np.float32) == (terms.indices.dtype, terms.values.dtype)
    assert 0 == len(term_weights([]).indices)


@pytest.mark.parametrize(
    "entries", [[(1, 0.5), (1, 0.25)], [(-1, 0.5)], [(2**31, 0.5)], [(1, float("nan"))], [(1, 1e39)]]
)
def test_invalid_terms_fail(entries: list[tuple[int, float]]) -> None:
    with pytest.raises(ReplicaFailed):
        term_weights(entries)


@pytest.mark.parametrize(
    "lists",
    [
        [],
        [[[1.0]], [[1.0]]],
        [[]],
        [[[]]],
        [[[1.0], [2.0], [3.0]]],
        [[[float("nan")]]],
        [[[1e39]]],
    ],
    ids=["none", "too_many", "no_tokens", "no_width", "longer_than_the_model", "nan", "past_float32"],
)
def test_invalid_token_vectors_fail(lists: list[list[list[float]]]) -> None:
    with pytest.raises(ReplicaFailed):
        token_matrices(lists, 1, 2)


def test_token_vectors_of_different_widths_fail() -> None:
    with pytest.raises(ReplicaFailed):
        token_matrices([[[1.0]], [[1.0, 2.0]]], 2, 2)


def test_label_scores_follow_the_models_order() -> None:
    rows = [[("b", 0.7), ("a", 0.3)], [("a", 0.9), ("b", 0.1)]]

    np.testing.assert_allclose([[0.3, 0.7], [0.9, 0.1]], label_scores(rows, ("a", "b"), 2), rtol=1e-6)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[("a", 0.5)]],
        [[("a", 0.5), ("a", 0.5)]],
        [[("a", 0.5), ("c", 0.5)]],
        [[("a", 0.5), ("b", 0.25), ("b", 0.25)]],
        [[("a", 0.5), ("b", float("inf"))]],
    ],
    ids=["none", "one_missing", "one_twice", "another", "one_too_many", "infinite"],
)
def test_labels_of_another_model_fail(rows: list[list[tuple[str, float]]]) -> None:
    with pytest.raises(ReplicaFailed):
        label_scores(rows, ("a", "b"), 1)
