"""Bytes that a parser reads in a bounded number of pieces."""

import io

# Pieces of a header, and of a whole picture of 21 MB whose parts have 2 KB.
HEADER_READS_MAX, PICTURE_READS_MAX = 10_000, 100_000


class TooManyReads(OSError):
    """Data that consist of too many pieces."""


class BoundedReads(io.BytesIO):
    """File in memory that ends with an error after so many reads.

    Parsers of pictures keep every segment of a header: five million empty ones take seconds and 800 MB.
    """

    def __init__(self, data: bytes, reads_max: int) -> None:
        super().__init__(data)
        self._reads_left = reads_max

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes. Raises: TooManyReads after the last allowed read."""
        self._reads_left -= 1
        if self._reads_left < 0:
            raise TooManyReads("it has too many segments")
        return super().read(size)
