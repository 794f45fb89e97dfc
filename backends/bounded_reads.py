"""Bounds of the work that a picture's bytes can ask of a parser: pieces to read, and scans of its pixels."""

import io
import re

# As many as Pillow itself calls safe: 268 MB as RGB.
PIXELS_MAX = 89_478_485
# Pieces of a header, and of a whole picture of 21 MB whose parts have 2 KB.
HEADER_READS_MAX, PICTURE_READS_MAX = 10_000, 100_000
# A progressive JPEG has 10 scans, and encoders write up to 20. Each costs a pass over all pixels, however few
# bytes it has: 24 MB could hold 160,000.
SCANS_MAX, SCANNED_PIXELS_MAX = 100, 2**31
JPEG_FORMATS = frozenset({"JPEG", "MPO"})

_MARKER = re.compile(rb"\xff+([^\x00\xff])")
_SCAN, _END = 0xDA, 0xD9
# Markers without a length: restarts, the start of a picture, and one that is reserved.
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})


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


def check_scans(data: bytes, pixels: int) -> None:
    """Check that the scans of a JPEG are few for its pixels. Raises: TooManyReads."""
    scans_max = min(SCANS_MAX, SCANNED_PIXELS_MAX // max(1, pixels))
    # Every scan has this marker, and data between scans has not. Only metadata may hold it by chance.
    if data.count(b"\xff\xda") > scans_max and count_scans(data) > scans_max:
        raise TooManyReads(f"it has more than {scans_max} scans for its size")


def count_scans(data: bytes) -> int:
    """Return the scans of a JPEG, found as libjpeg finds them."""
    scans, place = 0, 2
    while (found := _MARKER.search(data, place)) is not None:
        marker, place = found[1][0], found.end()
        if marker == _END:
            break
        if marker in _BARE:
            continue
        scans += marker == _SCAN
        place += max(2, int.from_bytes(data[place : place + 2], "big"))
    return scans
