"""Laws that hold for every kind of work: parts and their replies, places, duplicates, scores, cache rows."""

from collections.abc import Sequence
from itertools import repeat
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from backends.contract import (
    FREE_OPERATIONS,
    BaseReply,
    BaseWork,
    Capabilities,
    Embed,
    EmbedParts,
    Lengths,
    ModelWork,
    Operation,
    Output,
    Reply,
    Score,
    ScoreParts,
    Work,
)
from gateway.cache.entries import SplitCall, decode_entry, encode_entry, entry_keys
from gateway.calls import Work as CallWork
from gateway.dispatch import vector_scores
from gateway.lane.slices import Bounds, Slice, cut, cut_again, halves, join, parts_of, separated
from tests.works import REPLICA_WORKS, WORKS, kinds_of, plain, reply_to

many = settings(max_examples=60, deadline=None)
BOUNDS = st.builds(Bounds, st.integers(1, 6), st.integers(1, 60), st.none() | st.integers(20, 400))
EMBEDDER = Capabilities("m", frozenset({Operation.EMBED, Operation.EMBED_IMAGE}))
# Kinds that know how vectors score them, and kinds whose results a cache keeps.
SCORED = {kind: works for kind, works in WORKS.items() if kind.by_vectors is not BaseWork.by_vectors}
KEPT = {kind: works for kind, works in WORKS.items() if kind.rows_of is not BaseWork.rows_of}
PAGES = Capabilities("m", frozenset({Operation.EMBED_IMAGE}), outputs=frozenset({Output.MULTIVECTOR}))


def of_every_kind(works: dict[type[BaseWork], Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("works", works.values(), ids=[kind.__name__ for kind in works])


def test_every_kind_of_work_and_reply_is_drawn() -> None:
    """A new kind of work needs a strategy in `tests.works`, and a place in the unions."""
    assert set(WORKS) == set(kinds_of(BaseWork))
    assert set(WORKS) == set(get_args(CallWork))
    assert set(REPLICA_WORKS) == set(get_args(Work))
    assert set(get_args(Reply)) == set(kinds_of(BaseReply))


def test_a_kind_of_work_writes_what_its_base_leaves_to_it() -> None:
    """The groups are those of the docstring of `BaseWork`."""
    groups: dict[tuple[str, ...], set[type[BaseWork]]] = {
        ("kind", "inputs", "token_bounds"): set(REPLICA_WORKS),
        ("model_inputs", "map_texts"): set(get_args(ModelWork)),
        ("is_joinable", "joined"): {
            kind for kind in REPLICA_WORKS if kind.is_joinable is not BaseWork.is_joinable
        },
        ("row_fault", "is_cacheable", "item_keys", "rows_of", "reply_of_rows"): {
            kind for kind in REPLICA_WORKS if kind.is_cacheable is not BaseWork.is_cacheable
        },
    }

    for names, kinds in groups.items():
        assert kinds, names
        for kind in kinds:
            missing = [name for name in names if getattr(kind, name) is getattr(BaseWork, name, None)]
            assert not missing, (kind, missing)


def test_operations_of_free_works_are_free() -> None:
    assert {Operation.TOKENIZE, Operation.DETOKENIZE} == FREE_OPERATIONS
    assert not {kind.kind for kind in get_args(ModelWork)} & FREE_OPERATIONS


@of_every_kind(REPLICA_WORKS)
@many
@given(st.data())
def test_replies_to_the_slices_of_a_call_make_the_reply_to_it(works: Any, data: st.DataObject) -> None:
    work, bounds, reports = data.draw(works), data.draw(BOUNDS), data.draw(st.booleans())
    counts = data.draw(st.lists(st.integers(0, 40), min_size=len(work.inputs), max_size=len(work.inputs)))
    slices = cut(work, counts, bounds)

    assert_consecutive(slices, Slice(0, work, len(work.inputs), 0), counts)
    assert plain(reply_to(work, reports=reports)) == joined(slices, reports=reports)
    for piece in slices:
        if piece.inputs > 1:
            assert bounds.inputs >= piece.inputs
            assert bounds.tokens >= piece.tokens
            assert bounds.bytes is None or bounds.bytes >= piece.work.request_bytes - work.shared_bytes


@of_every_kind(REPLICA_WORKS)
@many
@given(st.data())
def test_parts_of_a_slice_have_its_inputs_in_order(works: Any, data: st.DataObject) -> None:
    work = data.draw(works)
    assume(len(work.inputs) > 1)
    counts = data.draw(st.lists(st.integers(0, 40), min_size=len(work.inputs), max_size=len(work.inputs)))
    places = data.draw(st.lists(st.integers(0, len(work.inputs) - 1), max_size=3))
    piece = Slice(7, work, len(work.inputs), sum(counts))

    for parts in (
        halves(piece, counts),
        parts_of(piece, counts, data.draw(st.integers(1, 5))),
        separated(piece, counts, places),
        cut_again(piece, counts, data.draw(BOUNDS)),
    ):
        assert_consecutive(parts, piece, counts)
        from_zero = [msgspec.structs.replace(part, start=part.start - 7) for part in parts]
        assert plain(reply_to(work)) == joined(from_zero)


def joined(slices: Sequence[Slice], *, reports: bool = True) -> Any:
    """Return the reply that replies to slices make."""
    return plain(join(slices, [reply_to(piece.work, reports=reports) for piece in slices]))


def assert_consecutive(parts: Sequence[Slice], whole: Slice, counts: Sequence[int]) -> None:
    """Check that parts have each input of a slice once, in order, with its tokens and all options."""
    start = whole.start
    for part in parts:
        first = part.start - whole.start
        assert start == part.start
        assert part.inputs == len(part.work.inputs) >= 1
        assert list(whole.work.inputs)[first : first + part.inputs] == list(part.work.inputs)
        assert sum(counts[first : first + part.inputs]) == part.tokens
        assert whole.work.options() == part.work.options()
        start += part.inputs
    assert whole.start + whole.inputs == start


@of_every_kind(REPLICA_WORKS)
@many
@given(st.data())
def test_selected_inputs_have_their_own_results(works: Any, data: st.DataObject) -> None:
    work, reports = data.draw(works), data.draw(st.booleans())
    places = data.draw(st.lists(st.integers(0, len(work.inputs) - 1), min_size=1, max_size=9))
    chosen = work.select(places)
    reply = reply_to(work, reports=reports)
    selected = reply.select(places)

    assert [list(work.inputs)[place] for place in places] == list(chosen.inputs)
    assert reply.tokens == selected.tokens
    expected = msgspec.structs.replace(reply_to(chosen, reports=reports), tokens=reply.tokens)
    assert plain(expected) == plain(selected)


@of_every_kind(REPLICA_WORKS)
@many
@given(st.data())
def test_equal_inputs_that_are_computed_once_have_one_result(works: Any, data: st.DataObject) -> None:
    work = data.draw(works)
    fewer, places = work.without_duplicates()
    if places is None:
        assert fewer is work
        return
    reply = reply_to(fewer)
    # Equal parts of other messages are another input.
    distinct = set(zip(work.inputs, getattr(work, "turns", ()) or repeat(()), strict=False))
    assert len(distinct) == len(fewer.inputs)
    expected = msgspec.structs.replace(reply_to(work), tokens=reply.tokens)
    assert plain(expected) == plain(reply.select(places))


def test_only_inputs_with_media_are_compared() -> None:
    texts = Embed(("a", "a"))

    assert (texts, None) == texts.without_duplicates()
    assert (EmbedParts((("a",), ("b",))), (0, 0, 1)) == EmbedParts(
        (("a",), ("a",), ("b",))
    ).without_duplicates()


@of_every_kind(REPLICA_WORKS)
@many
@given(st.data())
def test_bounds_of_parts_are_those_of_the_whole(works: Any, data: st.DataObject) -> None:
    work = data.draw(works)
    lengths = data.draw(
        st.builds(
            Lengths, st.none() | st.integers(5, 99), st.just("q: "), st.just(2), st.none() | st.just(50)
        )
    )
    place = data.draw(st.integers(0, len(work.inputs) - 1))
    alone = work.part(place, place + 1)

    assert work.token_bounds(lengths)[place : place + 1] == alone.token_bounds(lengths)
    assert work.wire_sizes(10**6)[place : place + 1] == alone.wire_sizes(10**6)
    assert list(work.pixel_weights())[place : place + 1] == list(alone.pixel_weights())


@of_every_kind(SCORED)
@many
@given(st.data())
def test_a_score_by_vectors_compares_both_texts_of_its_pair(works: Any, data: st.DataObject) -> None:
    work = data.draw(works)
    model = PAGES if isinstance(work, ScoreParts) and data.draw(st.booleans()) else EMBEDDER
    plan = work.by_vectors(model)
    assert plan is not None
    reply = reply_to(plan.work)
    scores = vector_scores(plan, reply)

    inputs, places = list(plan.work.inputs), plan.places
    assert sides_of(work) == [(inputs[first], inputs[second]) for first, second in places]
    assert len(places) == len(scores.scores)
    assert plan.roles is None or len(inputs) == len(plan.roles)
    for index, (first, second) in enumerate(places):
        alone = [reply_to(plan.work.select([place])) for place in (first, second)]
        assert scores.truncated is not None
        assert (index in scores.truncated) == any(each.truncated for each in alone)
        named = {"the query: "} if plan.has_query and second == places[0][0] else set()
        assert plan.place_of(second) in named | {f"input {places.index(pair)}: " for pair in places}
    if model is EMBEDDER:
        rows = [reply.vectors[[place for place, _ in places]], reply.vectors[[place for _, place in places]]]
        np.testing.assert_allclose(cosines(*rows), scores.scores, atol=1e-5)


def sides_of(work: Any) -> list[tuple[Any, Any]]:
    """Return both sides of each pair of a work."""
    if isinstance(work, Score | ScoreParts):
        return list(work.pairs)
    query, *others = work.inputs if not hasattr(work, "query") else (work.query, *work.inputs)
    return [(query, other) for other in others]


def cosines(first: Any, second: Any) -> Any:
    """Return the cosine of each row of two arrays; of a row of zeros it is 0."""
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return (first * second).sum(axis=1) / np.maximum(lengths, 1e-12)


@of_every_kind(KEPT)
@many
@given(st.data())
def test_found_and_computed_inputs_make_the_reply_to_the_whole(works: Any, data: st.DataObject) -> None:
    work = data.draw(works)
    assume(work.is_cacheable(2))
    keys = entry_keys(work, "shared", b"i", 0)
    full = work.uncut()
    reply = reply_to(full)
    counts = [data.draw(st.integers(0, 9)) for _ in work.inputs]
    whole = msgspec.structs.replace(reply, tokens=sum(counts))
    fresh = SplitCall(work, [None] * len(counts), 2).new_entries(whole, counts)
    stored = {keys[index]: encode_entry(entry) for index, entry in fresh}
    known = [data.draw(st.booleans()) for _ in counts]
    entries = [
        decode_entry(stored[key], 2) if found else None for key, found in zip(keys, known, strict=True)
    ]
    split = SplitCall(work, entries, 2)

    assert len(counts) == len(fresh)
    missing: Any = reply_to(split.missing_work()) if split.missing else None
    result: Any = split.joined(missing)
    computed = 0 if missing is None else missing.tokens
    assert computed + sum([entry.tokens for entry in entries if entry is not None]) == result.tokens
    assert reply.truncated == result.truncated
    if getattr(work, "dimensions", None) is None:
        assert work.rows_of(reply).tolist() == work.rows_of(result).tolist()
