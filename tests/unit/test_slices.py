"""Slices: cutting and joining lose nothing, keep the order and respect the bounds of a request."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from backends.contract import (
    Audio,
    Capabilities,
    Chat,
    Embed,
    EmbedChunks,
    EmbedParts,
    EmbedReply,
    Image,
    Lengths,
    Operation,
    Rerank,
    Tokenize,
    Work,
)
from backends.contract.errors import ReplicaFailed
from backends.contract.texts import normalized_bytes, token_upper_bound, token_upper_bounds
from gateway.lane.slices import (
    DEFAULT_REQUEST_INPUTS,
    DEFAULT_REQUEST_TOKENS,
    Bounds,
    ConfiguredBounds,
    Slice,
    bounds_of,
    cut,
    join,
    tightest,
)
from gateway.lane.ticket import Owner, Ticket
from tests.works import REPLICA_WORKS

many = settings(max_examples=200, deadline=None)

TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, max_size=40)
BOUNDS = st.builds(Bounds, st.integers(1, 12), st.integers(1, 60), st.one_of(st.none(), st.integers(1, 200)))


@st.composite
def calls(draw: st.DrawFn) -> tuple[Work, list[int], Bounds]:
    """Draw a call, the tokens of each of its inputs, and the bounds of a request."""
    work: Work = draw(st.one_of(*REPLICA_WORKS.values()))
    counts = draw(st.lists(st.integers(0, 40), min_size=len(work.inputs), max_size=len(work.inputs)))
    return work, counts, draw(BOUNDS)


def wire_bytes(texts: Sequence[str]) -> int:
    """Return the bytes of texts inside a JSON list: each with its quotes, its escapes and a comma."""
    return sum(len(msgspec.json.encode(text)) + 1 for text in texts)


@pytest.mark.parametrize("text", ["", "\x00", '"', "ä", "a"])
def test_small_inputs_of_any_characters_stay_within_the_byte_bound(text: str) -> None:
    work = Embed((text,) * 100)
    for most in (100, 310, 450, 601, 801):
        for piece in cut(work, [1] * 100, Bounds(1000, 1000, most)):
            assert most >= wire_bytes(piece.work.inputs)


def test_query_bytes_count_in_every_slice() -> None:
    work = Rerank("q" * 500, ("d" * 100,) * 20)
    for piece in cut(work, [1] * 20, Bounds(1000, 1000, 1000)):
        assert isinstance(piece.work, Rerank)
        assert 1000 >= wire_bytes([piece.work.query]) + wire_bytes(piece.work.documents)


@many
@given(calls())
def test_no_slice_has_room_for_the_next_input(case: tuple[Work, list[int], Bounds]) -> None:
    work, counts, bounds = case
    assume(work.conversation is None)
    bounds = msgspec.structs.replace(bounds, bytes=None)
    slices = cut(work, counts, bounds)
    for piece, following in pairwise(slices):
        full = piece.inputs == bounds.inputs
        assert full or piece.tokens + counts[following.start] > bounds.tokens


def test_call_that_fits_is_one_slice() -> None:
    work = Embed(("a", "b"))

    assert [Slice(0, work, 2, 7, 18)] == cut(work, [3, 4], Bounds(2, 7, 1000))


@pytest.mark.parametrize("bounds", [Bounds(9, 10, None), Bounds(9, 1000, 30)])
def test_input_over_the_bounds_is_a_slice_of_its_own(bounds: Bounds) -> None:
    work = Embed(("a", "b" * 50, "c", "d"))

    assert [1, 1, 2] == [piece.inputs for piece in cut(work, [1, 50, 1, 1], bounds)]


def slices_of(*sizes: int) -> list[Slice]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [Slice(a, Embed(("x",) * n), n, n) for a, n in zip(starts, sizes, strict=True)]


def vectors_of(inputs: int, tokens: int, truncated: tuple[int, ...] | None = ()) -> EmbedReply:
    return EmbedReply(np.ones((inputs, 2), np.float32), tokens, truncated)


def test_truncated_indices_follow_the_callers_order() -> None:
    slices = slices_of(3, 1, 2)
    cut_at = [(0, 2), (), (1,)]
    replies = [vectors_of(piece.inputs, 5, at) for piece, at in zip(slices, cut_at, strict=True)]

    assert (0, 2, 5) == join(slices, replies).truncated


@pytest.mark.parametrize("unknown", [0, 1, 2])
def test_truncation_is_unknown_if_a_slice_does_not_report_it(unknown: int) -> None:
    slices = slices_of(1, 1, 1)
    replies = [vectors_of(1, 5, None if index == unknown else (0,)) for index in range(3)]

    assert join(slices, replies).truncated is None


def test_truncation_of_a_single_slice_stays_unknown() -> None:
    slices = slices_of(2)

    assert join(slices, [vectors_of(2, 5, None)]).truncated is None


@many
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 10**6)), min_size=1, max_size=8))
def test_tokens_of_a_call_are_the_sum_of_its_slices(parts: list[tuple[int, int]]) -> None:
    slices = slices_of(*(size for size, _ in parts))
    replies = [vectors_of(size, tokens) for size, tokens in parts]

    assert sum(tokens for _, tokens in parts) == join(slices, replies).tokens


def test_joined_vectors_are_contiguous_float32() -> None:
    slices = slices_of(2, 3)
    joined = join(slices, [vectors_of(piece.inputs, 1) for piece in slices])

    assert isinstance(joined, EmbedReply)
    assert ((5, 2), np.float32) == (joined.vectors.shape, joined.vectors.dtype)
    assert joined.vectors.flags.c_contiguous


def capabilities_with(**values: int) -> Capabilities:
    return Capabilities("model", frozenset({Operation.EMBED}), **values)


@pytest.mark.parametrize(
    ("reported", "configured", "expected"),
    [
        ({}, (None, None), Bounds(DEFAULT_REQUEST_INPUTS, DEFAULT_REQUEST_TOKENS, None)),
        ({"request_inputs": 8, "request_tokens": 100, "request_bytes": 9}, (None, None), Bounds(8, 100, 9)),
        ({"request_inputs": 8, "request_tokens": 100}, (4, 50), Bounds(4, 50, None)),
        ({"request_inputs": 8, "request_tokens": 100}, (16, 200), Bounds(8, 100, None)),
        ({}, (1000, 10**6), Bounds(1000, 10**6, None)),
    ],
)
def test_bounds_are_the_tightest_given_or_the_defaults(
    reported: dict[str, int], configured: tuple[int | None, int | None], expected: Bounds
) -> None:
    assert expected == bounds_of(capabilities_with(**reported), ConfiguredBounds(*configured))


# As tokenizers.json of common models: XLM-R, ALBERT, BERT, T5, and some that are possible.
NORMALIZERS = (
    normalizers.NFC(),
    normalizers.NFD(),
    normalizers.NFKC(),
    normalizers.NFKD(),
    normalizers.Lowercase(),
    # Spaces around ideographs would be no tokens.
    normalizers.BertNormalizer(lowercase=True, handle_chinese_chars=False),
    normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    normalizers.Sequence([normalizers.Lowercase(), normalizers.NFKD(), normalizers.Lowercase()]),
    normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.NFKC()]),
)


def byte_tokens(text: str) -> int:
    """Return the tokens of a text in the worst vocabulary: one for each byte, and a space before it."""
    return max(len((" " + each.normalize_str(text)).encode()) for each in NORMALIZERS)


# Signs that normal forms expand: to 18 letters, six katakana, three letters, or longer in lower case.
EXPANDING = "\ufdfa\u3314\u1e9b\u0390\u1f82\u0130\u023a\u212b\uac01\u0149\ufb03\u00bd\U0001d160"


@pytest.mark.parametrize("sign", EXPANDING)
@pytest.mark.parametrize("times", [1, 20])
def test_token_bound_covers_signs_that_normal_forms_expand(sign: str, times: int) -> None:
    [bound] = Embed((sign * times,)).token_bounds(Lengths())

    assert bound >= byte_tokens(sign * times) + 2
    # And hardly more: a bound that is too high refuses calls that fit.
    assert bound <= 11 * len((sign * times).encode()) + 4


def test_no_character_has_more_bytes_than_its_bound() -> None:
    # One in seven of all code points.
    for code_point in range(0, 0x110000, 7):
        if not 0xD800 <= code_point < 0xE000:
            character = chr(code_point)
            assert normalized_bytes(character) >= byte_tokens(character) - 1, hex(code_point)


@many
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=9), max_size=9))
def test_bounds_of_many_texts_are_those_of_each(texts: list[str]) -> None:
    assert token_upper_bounds(texts) == [token_upper_bound(text) for text in texts]


def test_bytes_of_texts_without_such_signs_are_their_own() -> None:
    for text in ("plain text", "\u4f60\u597d", "\u0441\u043b\u043e\u0432\u043e", ""):
        assert normalized_bytes(text) == len(text.encode())


@many
@given(TEXTS, st.text(st.characters(codec="utf-8"), max_size=20), st.one_of(st.none(), st.integers(1, 30)))
def test_token_bound_covers_input_prompt_and_special_tokens(
    texts: list[str], prompt: str, most: int | None
) -> None:
    for text, bound in zip(texts, Embed(tuple(texts)).token_bounds(Lengths(most, prompt)), strict=True):
        longest = byte_tokens(prompt + text) + 2
        assert bound >= (longest if most is None else min(longest, most))
        assert most is None or bound <= most


def test_join_rejects_vectors_of_different_widths() -> None:
    slices = slices_of(1, 1)
    replies = [EmbedReply(np.zeros((1, dim), dtype=np.float32), 1) for dim in (2, 3)]

    with pytest.raises(ReplicaFailed, match="different widths"):
        join(slices, replies)


@pytest.mark.parametrize("order", [1, -1])
def test_bounds_of_several_replicas_are_the_tightest(order: int) -> None:
    several = [Bounds(8, 100, None), Bounds(4, 200, 70), Bounds(9, 300, 90)]

    assert Bounds(4, 100, 70) == tightest(several[::order])
    assert Bounds(8, 100, None) == tightest(several[:1])


def test_token_bound_of_a_document_includes_the_query() -> None:
    alone = Embed(("doc",)).token_bounds(Lengths())
    paired = Rerank("a query", ("doc",)).token_bounds(Lengths())

    assert [alone[0] + len("a query")] == paired


def test_token_bound_of_a_text_that_is_only_tokenized_has_no_maximum() -> None:
    # The bytes, and a reserve for special tokens.
    assert [100 + 4] == Tokenize(("a" * 100,)).token_bounds(Lengths(16))


def test_media_have_no_more_tokens_than_their_model_says() -> None:
    large, small = Image(b"", "image/png", 4000, 3000), Image(b"", "image/png", 8, 8)
    work = EmbedParts(((large,), ("a" * 200,), (small, "b"), (Audio(b"", "audio/wav"),)))

    assert [50, 77, 50 + 5, 50] == work.token_bounds(Lengths(77, media_tokens=50))
    assert [900, 77, 256 + 5, 900] == work.token_bounds(Lengths(77, media_tokens=900))
    assert 256 + 4000 * 3000 // 784 == work.token_bounds(Lengths(77))[0]


def test_chunks_of_a_document_stay_together() -> None:
    work = EmbedChunks((("a", "b", "c"), ("d", "e"), ("f",)))
    first, second = cut(work, [12, 3, 1], Bounds(inputs=2, tokens=5))

    assert ((("a", "b", "c"),), 12) == (first.work.inputs, first.tokens)
    assert ((("d", "e"), ("f",)), 4) == (second.work.inputs, second.tokens)


def test_a_conversation_is_alone_and_may_fill_the_model() -> None:
    work = Embed(("[]", "[{}]"), chat=Chat(), special_tokens=False)
    tokens = work.token_bounds(Lengths(512))

    assert [512, 512] == tokens
    assert [("[]",), ("[{}]",)] == [piece.work.inputs for piece in cut(work, tokens, Bounds())]


def test_pictures_weigh_by_their_pixels_where_the_model_counts_few_tokens() -> None:
    large, small = Image(b"", "image/png", 9_400, 9_400), Image(b"", "image/png", 640, 480)
    work = EmbedParts(((large,),) * 20)
    tokens = work.token_bounds(Lengths(77, media_tokens=50))
    slices = cut(work, tokens, Bounds())

    assert [1] * 20 == [piece.inputs for piece in slices]
    assert {50} == {piece.tokens for piece in slices}
    assert all(piece.cost > DEFAULT_REQUEST_TOKENS for piece in slices)
    assert all(Ticket(piece, Owner("a"), 1.0, 0.0).entry.cost == piece.cost for piece in slices)

    photos = EmbedParts(((small,),) * 32)
    (piece,) = cut(photos, photos.token_bounds(Lengths(77, media_tokens=50)), Bounds())
    assert (32, 50 * 32, 75 * 32) == (piece.inputs, piece.tokens, piece.cost)
    mixed = EmbedParts(((small,), (large,), ("a text",), (small,)))
    assert [1, 1, 2] == [piece.inputs for piece in cut(mixed, [50, 50, 6, 50], Bounds())]
