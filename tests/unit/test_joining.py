"""Joined slices: each gets its own results and its own tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.contract import Chat, Embed, EmbedChunks, EmbedReply, Rerank, Truncate
from gateway.lane.joining import BatchTotals, join_slices, split_reply
from gateway.lane.slices import Bounds, Slice, cut

many = settings(max_examples=200, deadline=None)
SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 50)), min_size=1, max_size=8)


def pieces_of(sizes: list[tuple[int, int]], *, exact: bool = False) -> list[Slice]:
    """Return slices of these inputs and tokens; all texts differ."""
    return [
        Slice(0, Embed(tuple(f"{index}/{i}" for i in range(inputs))), inputs, tokens, exact=exact)
        for index, (inputs, tokens) in enumerate(sizes)
    ]


@many
@given(SIZES, st.data())
def test_split_reply_gives_each_slice_its_own_rows_and_counts(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    pieces = pieces_of(sizes)
    whole = join_slices(pieces)
    assert isinstance(whole.work, Embed)
    count = len(whole.work.inputs)
    each = data.draw(st.one_of(st.none(), st.tuples(*[st.integers(0, 30)] * count)))
    tokens = data.draw(st.integers(0, 500)) if each is None else sum(each)
    cut = data.draw(st.one_of(st.none(), st.sets(st.integers(0, count - 1))))
    truncated = None if cut is None else tuple(sorted(cut))
    vectors = np.arange(count, dtype=np.float32).reshape(count, 1)
    replies = split_reply(pieces, EmbedReply(vectors, tokens, truncated, each))

    rows = dict(zip(whole.work.inputs, vectors[:, 0], strict=True))
    assert tokens == sum(reply.tokens for reply in replies)
    for piece, reply in zip(pieces, replies, strict=True):
        assert isinstance(reply, EmbedReply)
        assert isinstance(piece.work, Embed)
        texts = piece.work.inputs
        assert [rows[text] for text in texts] == reply.vectors[:, 0].tolist()
        assert reply.tokens >= 0
        if truncated is None:
            assert reply.truncated is None
        else:
            expected = {whole.work.inputs[index] for index in truncated} & set(texts)
            assert expected == {texts[index] for index in reply.truncated or ()}
        if each is not None:
            own = [count for text, count in zip(whole.work.inputs, each, strict=True) if text in texts]
            assert (sum(own), tuple(own)) == (reply.tokens, reply.input_tokens)


@many
@given(SIZES)
def test_exact_tokens_stay_with_their_slices_if_the_sum_matches(sizes: list[tuple[int, int]]) -> None:
    pieces = pieces_of(sizes, exact=True)
    total = sum(tokens for _, tokens in sizes)
    rows = np.zeros((sum(inputs for inputs, _ in sizes), 1), np.float32)

    assert [tokens for _, tokens in sizes] == [
        part.tokens for part in split_reply(pieces, EmbedReply(rows, total))
    ]


def test_single_slice_is_joined_and_split_unchanged() -> None:
    (piece,) = pieces_of([(2, 9)])
    reply = EmbedReply(np.zeros((2, 1), np.float32), 3)

    assert piece is join_slices([piece])
    assert reply is split_reply([piece], reply)[0]


@many
@given(SIZES, st.integers(1, 12), st.integers(1, 100), st.one_of(st.none(), st.integers(0, 100)))
def test_totals_are_within_bounds_if_each_sum_is(
    sizes: list[tuple[int, int]], inputs: int, tokens: int, room: int | None
) -> None:
    totals = BatchTotals()
    for count, cost in sizes:
        totals = totals.plus(Slice(0, Embed(("a",) * count), count, cost, bytes=cost * 2))
    sums = [sum(column) for column in zip(*sizes, strict=True)]

    fits = room is None or sums[1] * 2 <= room
    assert (sums[0] <= inputs and sums[1] <= tokens and fits) is totals.is_within(
        Bounds(inputs, tokens, room)
    )


@pytest.mark.parametrize(
    "other",
    [
        Embed(("b",), normalize=False),
        Embed(("b",), dimensions=4),
        Embed(("b",), max_tokens=4),
        Embed(("b",), prompt_name="query"),
        Embed(("b",), truncate=Truncate.ERROR),
        Embed(("b",), special_tokens=False),
        Embed(("b",), chat=Chat()),
        Rerank("q", ("b",)),
    ],
)
def test_only_embeddings_with_equal_options_are_joinable(other: Embed | Rerank) -> None:
    first, same = Slice(0, Embed(("a",)), 1, 1), Slice(0, Embed(("b",)), 1, 1)
    different = Slice(0, other, 1, 1)

    assert first.work.is_joinable(same.work)
    assert not first.work.is_joinable(different.work)
    assert not different.work.is_joinable(first.work)
    assert not Rerank("q", ("a",)).is_joinable(Rerank("q", ("b",)))


def test_joined_and_cut_texts_keep_the_lengths_of_their_prompts() -> None:
    pieces = [
        Slice(0, Embed(("p: a", "b"), prompt_characters=(3, 0)), 2, 9),
        Slice(0, Embed(("query: c",), prompt_characters=(7,)), 1, 9),
    ]
    whole = join_slices(pieces)

    assert pieces[0].work.is_joinable(pieces[1].work)
    assert not pieces[0].work.is_joinable(Embed(("d",)))
    assert Embed(("p: a", "b", "query: c"), prompt_characters=(3, 0, 7)) == whole.work
    parts = cut(whole.work, [1, 1, 1], Bounds(inputs=2))
    assert [pieces[0].work, pieces[1].work] == [part.work for part in parts]


def test_late_chunking_shares_no_request() -> None:
    late = Slice(0, EmbedChunks((("a",),)), 1, 3)

    assert not late.work.is_joinable(late.work)
    assert not late.work.is_joinable(Embed(("a",)))
