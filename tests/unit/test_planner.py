"""Grouping into batches: every sequence is in exactly one, and no batch exceeds the budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.torch.passes.jobs import RECTANGLE_BUDGETS, plan

lengths_of = st.lists(st.integers(1, 600), max_size=200)
BUDGET = 512


@given(lengths_of, st.booleans())
def test_every_sequence_is_in_exactly_one_batch_within_the_budget(lengths: list[int], packed: bool) -> None:
    batches = plan(lengths, BUDGET, packed=packed)

    assert list(range(len(lengths))) == sorted(index for batch in batches for index in batch)
    for batch in batches:
        own = [lengths[index] for index in batch]
        assert len(batch) == 1 or sum(own) <= BUDGET
        rectangle = len(batch) * max(own)
        assert len(batch) == 1 or rectangle <= BUDGET * (RECTANGLE_BUDGETS if packed else 1)


@given(lengths_of, st.booleans())
def test_batches_are_sorted_by_descending_length(lengths: list[int], packed: bool) -> None:
    order = [lengths[index] for batch in plan(lengths, BUDGET, packed=packed) for index in batch]

    assert sorted(lengths, reverse=True) == order


@pytest.mark.parametrize(("packed", "batches"), [(True, 2), (False, 3)])
def test_only_a_padded_batch_counts_padding(packed: bool, batches: int) -> None:
    # 960 tokens in rectangles of 300 or less.
    assert batches == len(plan([300, 200, 200, 160, 100], BUDGET, packed=packed)), packed
