"""Pictures, recognized by their content. Only headers are read; nothing is decoded."""

from backends.bounded_reads import (
    HEADER_READS_MAX,
    JPEG_FORMATS,
    PIXELS_MAX,
    BoundedReads,
    TooManyReads,
    check_scans,
)
from backends.contract import Image

MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
# Beginnings of other content, and how its sender gets on.
OTHERS = {
    b"%PDF": "a PDF: send its pages as images",
    b"<svg": "an SVG: send it as PNG",
    b"<?xm": "an SVG or XML: send a picture as PNG",
    b"<htm": "an HTML page: send a picture",
    b"<!DO": "an HTML page: send a picture",
    b"II*\0": "a TIFF: send it as PNG",
    b"MM\0*": "a TIFF: send it as PNG",
    b"BM": "a BMP: send it as PNG",
}
# The same behind the first four bytes.
BOXES = {
    b"ftypavif": "an AVIF: send it as PNG or JPEG",
    b"ftypheic": "a HEIC: send it as PNG or JPEG",
    b"ftypheix": "a HEIC: send it as PNG or JPEG",
    b"ftypmif1": "a HEIF: send it as PNG or JPEG",
}


def read_picture(data: bytes) -> Image:
    """Return a picture with its size. Raises: ValueError with the reason."""
    if not data:
        raise ValueError("it is empty")
    if (box := BOXES.get(data[4:12])) is not None:
        raise ValueError(f"it is {box}")
    for beginning, what in OTHERS.items():
        if data.lstrip()[: len(beginning)].lower() == beginning.lower():
            raise ValueError(f"it is {what}")
    name, width, height = _header_of(data)
    if width * height > PIXELS_MAX:
        raise ValueError(
            f"it has {width} x {height} pixels, more than {PIXELS_MAX:,} in all; send it smaller"
        )
    if name in JPEG_FORMATS:
        try:
            check_scans(data, width * height)
        except TooManyReads as error:
            raise ValueError(f"{error}; encode it again") from error
    # Pillow has a name of its own for a JPEG of several pictures, as telephones write them.
    return Image(data, MEDIA_TYPES.get(name, MEDIA_TYPES["JPEG"]), width, height)


def _header_of(data: bytes) -> tuple[str, int, int]:
    """Return format, width and height. Raises: ValueError."""
    try:
        import PIL.Image
    except ImportError as error:
        raise ValueError("this gateway was installed without Pillow: install its extra `media`") from error
    try:
        with PIL.Image.open(BoundedReads(data, HEADER_READS_MAX), formats=tuple(MEDIA_TYPES)) as opened:
            return str(opened.format), *opened.size
    except PIL.Image.DecompressionBombError as error:
        raise ValueError(f"it has more than {PIXELS_MAX:,} pixels; send it smaller") from error
    except TooManyReads as error:
        raise ValueError("its header has too many segments; encode it again") from error
    except Exception as error:
        # Readers of foreign bytes raise what they come across.
        raise ValueError(f"it is none of these formats, or damaged: {', '.join(MEDIA_TYPES)}") from error
