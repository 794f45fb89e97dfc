"""Pictures in many formats, encoded in memory: modes, sizes, rotations and damage."""

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from backends import contract

SIZES = ((40, 30), (30, 40), (33, 65), (1, 1), (2, 300), (300, 2), (128, 128))
ROTATIONS = range(2, 9)
ORIENTATION = 0x0112
DEEP = "PNG of 16 bits"


def pictures() -> dict[str, bytes]:
    """Return more than fifty encoded pictures by name."""
    return dict(_pictures())


def part_of(data: bytes) -> contract.Image:
    """Return a picture as a part of an input."""
    with Image.open(io.BytesIO(data)) as image:
        return contract.Image(data, f"image/{str(image.format).lower()}", *image.size)


def noise(width: int, height: int, seed: int = 0) -> Any:
    """Return an RGB picture with smooth and with random areas."""
    generator = np.random.default_rng(seed)
    ramp = np.linspace(0, 255, width, dtype=np.uint8)[None, :, None].repeat(height, axis=0).repeat(3, axis=2)
    dots = generator.integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(np.where(np.arange(height)[:, None, None] % 9 < 5, ramp, dots).astype(np.uint8))


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    """Return a picture in a format of Pillow."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """Return a PNG whose header states a size, with no pixels behind it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def one_bit_png(side: int) -> bytes:
    """Return a white square of one bit for each pixel, which takes few bytes."""
    return encoded(Image.new("1", (side, side), 1), optimize=True)


def progressive_jpeg(width: int, height: int, scans: int) -> bytes:
    """Return a grey JPEG whose scans, after the first, change nothing and have some hundred bytes."""
    blocks = -(-width // 8) * -(-height // 8)
    # A code of one bit for the first of 32,767 blocks without coefficients, and 14 bits for how many.
    runs = ("0" + "1" * 14) * -(-blocks // 32767)
    bits = runs + "1" * (-len(runs) % 8)
    empty = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    levels = _segment(0xDA, b"\1\1\0\0\0\1") + bytes(-(-blocks // 8))
    first, again = (_segment(0xDA, b"\1\1\0\1\x3f" + bits) + empty for bits in (b"\x0d", b"\xdc"))
    return b"".join(
        (
            b"\xff\xd8",
            _segment(0xDB, b"\0" + b"\1" * 64),
            _segment(0xC2, struct.pack(">BHHB", 8, height, width, 1) + b"\1\x11\0"),
            _segment(0xC4, b"\0\1" + bytes(15) + b"\0"),
            _segment(0xC4, b"\x10\1" + bytes(15) + b"\xe0"),
            levels,
            first,
            again * (scans - 2),
            b"\xff\xd9",
        )
    )


def _segment(marker: int, body: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(body) + 2) + body


def deep_in_8_bits() -> bytes:
    """Return the picture of 16 bits in 8."""
    return encoded(Image.fromarray((_deep() >> 8).astype(np.uint8)))


def _deep() -> Any:
    return (np.arange(40 * 50, dtype=np.uint16) * 31).reshape(40, 50)


def _pictures() -> Iterator[tuple[str, bytes]]:
    for seed, size in enumerate(SIZES):
        for kind in ("PNG", "JPEG", "WEBP"):
            yield f"{kind} of {size}", encoded(noise(*size, seed), kind)
    for mode in ("L", "LA", "P", "RGBA", "1"):
        yield f"PNG in mode {mode}", encoded(noise(50, 37, 1).convert(mode))
    for mode in ("L", "CMYK"):
        yield f"JPEG in mode {mode}", encoded(noise(50, 37, 2).convert(mode), "JPEG")
    for orientation in ROTATIONS:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        for kind in ("JPEG", "PNG"):
            yield f"{kind} turned by {orientation}", encoded(noise(61, 40, 3), kind, exif=exif)
    yield DEEP, encoded(Image.fromarray(_deep()))
    palette = noise(44, 52, 4).convert("P")
    yield "PNG with a transparent color", encoded(palette, transparency=3)
    yield "GIF", encoded(palette, "GIF")
    frames = [noise(30, 20, seed).convert("P") for seed in (5, 6)]
    yield "GIF of two frames", encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    yield "WebP with alpha", encoded(noise(45, 45, 7).convert("RGBA"), "WEBP")
    yield "WebP without loss", encoded(noise(45, 45, 8), "WEBP", lossless=True)
    yield "progressive JPEG", encoded(noise(90, 70, 9), "JPEG", progressive=True, quality=40)
    yield "long line", encoded(noise(10_000, 10, 10))
    yield "high line", encoded(noise(10, 10_000, 11), "JPEG")
    for seed in range(20, 26):
        yield f"small JPEG {seed}", encoded(noise(20 + seed, 2 * seed, seed), "JPEG", quality=30 + seed)
