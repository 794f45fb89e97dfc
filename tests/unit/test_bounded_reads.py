"""Bytes that may be read in a bounded number of pieces."""

import pytest

from backends.bounded_reads import BoundedReads, TooManyReads


def test_reads_end_with_an_error_and_seeks_do_not_count() -> None:
    file = BoundedReads(b"abcdef", 3)

    assert (b"ab", b"cd") == (file.read(2), file.read(2))
    file.seek(0)
    assert b"abcdef" == file.read()
    with pytest.raises(TooManyReads, match="too many segments"):
        file.read(1)
