"""Equal inputs with pictures, computed once and answered at every place."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backends.contract import Embed, EmbedParts, EmbedReply, EncodeReply, Image, Part, PatchGrid
from gateway.lane.duplicates import with_duplicates, without_duplicates

# Equal by content, and not the same objects.
parts: st.SearchStrategy[Part] = st.one_of(
    st.sampled_from(("a", "b")),
    st.builds(lambda data: Image(bytes(data), "image/png", 1, 1), st.sampled_from((b"1", b"2", b"3"))),
)
inputs = st.lists(st.lists(parts, min_size=1, max_size=2).map(tuple), min_size=1, max_size=12).map(tuple)


def number_of(one: tuple[Part, ...]) -> float:
    """Return a number that belongs to the content of an input."""
    texts = [part if isinstance(part, str) else f"<{part.data!r}>" for part in one]
    return float(sum(ord(letter) * (index + 1) for index, letter in enumerate("|".join(texts))))


def dense_reply(work: EmbedParts) -> EmbedReply:
    rows = np.array([[number_of(one)] for one in work.inputs], np.float32)
    cut = tuple(index for index, one in enumerate(work.inputs) if len(one) == 2)
    return EmbedReply(rows, len(work.inputs), cut, tuple(len(one) for one in work.inputs))


@given(inputs)
def test_every_input_gets_its_own_vector(given_inputs: tuple[tuple[Part, ...], ...]) -> None:
    work = EmbedParts(given_inputs)
    fewer, places = without_duplicates(work)
    assert isinstance(fewer, EmbedParts)
    assert len(set(given_inputs)) == len(fewer.inputs)
    reply = dense_reply(fewer)
    if places is not None:
        spread = with_duplicates(reply, places)
        assert isinstance(spread, EmbedReply)
        assert reply.tokens == spread.tokens
        reply = spread
    expected = dense_reply(work)
    assert expected.vectors.tolist() == reply.vectors.tolist()
    assert (expected.truncated, expected.input_tokens) == (reply.truncated, reply.input_tokens)


@given(inputs)
def test_every_input_gets_its_own_vectors_per_token(given_inputs: tuple[tuple[Part, ...], ...]) -> None:
    fewer, places = without_duplicates(EmbedParts(given_inputs))
    assert isinstance(fewer, EmbedParts)
    if places is None:
        assert given_inputs == fewer.inputs
        return
    rows = tuple(np.full((len(one), 2), number_of(one), np.float32) for one in fewer.inputs)
    grids = tuple(PatchGrid(len(one), 1, 1) if len(one) > 1 else None for one in fewer.inputs)
    reply = with_duplicates(EncodeReply(7, multivector=rows, truncated=None, grids=grids), places)
    assert isinstance(reply, EncodeReply)
    assert reply.multivector is not None
    found = [vectors.tolist() for vectors in reply.multivector]
    assert [np.full((len(one), 2), number_of(one), np.float32).tolist() for one in given_inputs] == found
    expected = tuple(PatchGrid(len(one), 1, 1) if len(one) > 1 else None for one in given_inputs)
    assert expected == reply.grids
    assert (7, None, None) == (reply.tokens, reply.truncated, reply.dense)


def test_texts_are_not_compared() -> None:
    work = Embed(("a", "a"))
    assert (work, None) == without_duplicates(work)
