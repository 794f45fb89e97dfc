"""Reader of responses: any bytes, in any pieces, become one response or InvalidResponse."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.http.responses import InvalidResponse, RawResponse, ResponseReader, is_closing_error

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;x=y\r\nok\r\n0\r\nx-sum: 1\r\n\r\n"
WHOLE = (
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
    b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED,
    CHUNKED,
)
NOTICE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Draw a response, cut off, with other bytes inserted, or with a part repeated."""
    whole = draw(st.sampled_from(WHOLE))
    at = draw(st.integers(0, len(whole)))
    until = draw(st.integers(0, len(whole)))
    return whole[:at] + draw(st.binary(max_size=6)) + whole[until:]


def read(pieces: list[bytes]) -> RawResponse | None:
    """Return the response in these pieces, or None if it is not complete."""
    reader = ResponseReader()
    try:
        return next((response for piece in pieces if (response := reader.feed(piece)) is not None), None)
    finally:
        reader.close()


@settings(max_examples=300, deadline=None)
@given(data=damaged() | st.binary(max_size=80), size=st.integers(1, 40))
def test_damaged_response_is_refused_or_read_the_same_in_any_pieces(data: bytes, size: int) -> None:
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    try:
        response = read([data])
    except InvalidResponse:
        # In pieces, a response may be complete before the fault comes.
        with pytest.raises(InvalidResponse):
            read(pieces)
        return
    assert response == read(pieces)


@pytest.mark.parametrize("whole", WHOLE)
def test_whole_response_is_read_in_any_pieces(whole: bytes) -> None:
    for size in range(1, len(whole) + 1):
        response = read([whole[start : start + size] for start in range(0, len(whole), size)])
        assert response is not None
        assert (200, b"ok") == (response.status, response.body)
        assert b"x-sum" not in dict(response.headers)


@pytest.mark.parametrize("until", range(len(NOTICE) + 1))
def test_timeout_notice_is_recognized_once_its_head_is_whole(until: int) -> None:
    assert (until == len(NOTICE)) == is_closing_error(NOTICE[:until])
