"""Decoding of pictures with Pillow, as transformers' `load_image` does; only this module imports Pillow.

Rule: CPU-bound and without the GIL for the most part. Call it outside of the event loop.
"""

from typing import Any

import numpy as np

from backends.bounded_reads import (
    JPEG_FORMATS,
    PICTURE_READS_MAX,
    PIXELS_MAX,
    BoundedReads,
    TooManyReads,
    check_scans,
)
from backends.contract.errors import InvalidWork, ModelUnavailable
from backends.torch.memory import is_exhausted
from backends.torch.refusals import first_line

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def require_pillow() -> None:
    """Raise ModelUnavailable if Pillow is not installed."""
    try:
        import PIL  # noqa: F401 - part of an extra
    except ImportError as error:
        raise ModelUnavailable(
            "models of images need Pillow; install the extra `media`: pip install 'embedding-gateway[media]'"
        ) from error


def open_image(data: bytes) -> Any:
    """Return a picture as PIL's RGB image, turned as its EXIF data says; of an animation the first frame.

    Raises: InvalidWork if it is no whole picture of `FORMATS`, or has more than `PIXELS_MAX` pixels.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(BoundedReads(data, PICTURE_READS_MAX), formats=FORMATS) as image:
            _check_pixels(*image.size)
            if image.format in JPEG_FORMATS:
                check_scans(data, image.width * image.height)
            image.load()
            # Without a copy: the largest picture has 358 MB.
            ImageOps.exif_transpose(image, in_place=True)
            found = _in_8_bits(image)
            return found.convert("RGB") if found.mode != "RGB" else found
    except InvalidWork:
        raise
    except Image.DecompressionBombError as error:
        raise InvalidWork(f"the picture has more than {PIXELS_MAX:,} pixels; send it smaller") from error
    except TooManyReads as error:
        raise InvalidWork(f"the picture is in too many pieces: {error}; encode it again") from error
    except Image.UnidentifiedImageError as error:
        raise InvalidWork(f"it is no picture of these formats: {', '.join(FORMATS)}") from error
    except Exception as error:
        # Decoders of foreign bytes raise what they come across.
        if is_exhausted(error):
            raise
        raise InvalidWork(f"the picture is damaged: {first_line(error)}; send it again") from error


def _in_8_bits(image: Any) -> Any:
    """Return a grey picture of 16 bits in 8.

    Pillow, and with it `load_image` of transformers, clips its numbers at 255: most of them become white.
    """
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))


def blank_image(side: int) -> Any:
    """Return a grey picture to try a network with."""
    from PIL import Image

    return Image.new("RGB", (side, side), (128, 128, 128))


def _check_pixels(width: int, height: int) -> None:
    if width * height > PIXELS_MAX:
        raise InvalidWork(
            f"the picture has {width} x {height} pixels, more than {PIXELS_MAX:,} in all; send it smaller"
        )
