"""Pictures as callers send them: read by their content, and refused with the reason."""

import base64
import io

import pytest
from PIL import Image

from backends.bounded_reads import count_scans
from gateway.errors import InvalidInput
from gateway.media.pictures import PIXELS_MAX, read_picture
from gateway.media.sources import PictureSource, bytes_of, read_parts
from tests.pictures import encoded, noise, pictures, png_of_size, progressive_jpeg

PNG, JPEG = encoded(noise(7, 5)), encoded(noise(7, 5), "JPEG")
GAMMA = bytes.fromhex("0000000467414d410000b18f0bfc6105")


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri_of(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64_of(data)}"


@pytest.mark.parametrize("name", sorted(pictures()))
def test_a_picture_is_known_by_its_content(name: str) -> None:
    data = pictures()[name]
    image = read_picture(bytes_of(PictureSource(uri_of(data, "image/any"))))

    assert image.data == data
    with Image.open(io.BytesIO(data)) as opened:
        assert (f"image/{str(opened.format).lower()}", opened.size) == (
            image.media_type,
            (image.width, image.height),
        )


def test_base64_may_be_in_lines_with_the_letters_of_urls_or_without_padding() -> None:
    data = bytes(range(256)) + b"xy"
    plain = base64_of(data)
    forms = (
        plain + "\n",
        " " + plain,
        "\r\n".join(plain[at : at + 76] for at in range(0, len(plain), 76)),
        plain.replace("+", "-").replace("/", "_"),
        plain.rstrip("="),
    )
    for form in forms:
        assert data == bytes_of(PictureSource(form))
        assert data == bytes_of(PictureSource(f"data:image/png;base64,{form}"))
    with pytest.raises(ValueError, match="follows the comma"):
        bytes_of(PictureSource("data:image/png;base64,%41"))


def test_base64_needs_no_uri() -> None:
    assert bytes_of(PictureSource(base64_of(PNG))) == PNG
    assert bytes_of(PictureSource(uri_of(PNG, "image/png;charset=x"))) == PNG


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("http://169.254.169.254/latest", "not fetched"),
        ("HTTPS://example.org/a.png", "not fetched"),
        ("file:///etc/passwd", "of this scheme are not read"),
        ("s3://bucket/a.png", "of this scheme are not read"),
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64", "not base64"),
        ("a.png", "no base64"),
        ("", "it is empty"),
        (base64_of(bytes(4) + b"ftypheic" + bytes(60)), "a HEIC: send it as PNG"),
        (base64_of(bytes(4) + b"ftypavif" + bytes(60)), "an AVIF: send it as PNG"),
        (base64_of(JPEG[:2] + b"\xff\xe5\0\2" * 50_000 + JPEG[2:]), "too many segments"),
        (base64_of(PNG[:33] + GAMMA * 20_000), "too many segments"),
        (base64_of(progressive_jpeg(80, 80, 101)), "more than 100 scans for its size; encode it again"),
        (base64_of(progressive_jpeg(9_400, 9_400, 25)), "more than 24 scans for its size; encode it again"),
        (base64_of(b"%PDF-1.7 ..."), "a PDF"),
        (base64_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "an SVG"),
        (base64_of(b"  \n<SVG/>"), "an SVG"),
        (base64_of(b"<html></html>"), "an HTML page"),
        (base64_of(b"II*\0aaaa"), "a TIFF"),
        (base64_of(b"BM" + bytes(60)), "a BMP"),
        (base64_of(PNG[:20]), "none of these formats, or damaged"),
        (base64_of(b"\x89PNG\r\n\x1a\n" + b"x" * 50), "none of these formats, or damaged"),
        (base64_of(png_of_size(20_000, 20_000)), "pixels; send it smaller"),
        (base64_of(png_of_size(2**31 - 1, 2**31 - 1)), "pixels; send it smaller"),
    ],
)
async def test_other_content_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason) as caught:
        await read_parts([["a"], [PictureSource(text)]], "input")
    assert "`input` 1" in caught.value.message
    assert len(caught.value.message) < 300


def test_the_largest_picture_is_read() -> None:
    side = int(PIXELS_MAX**0.5)
    image = read_picture(png_of_size(side, side))

    assert (side, side) == (image.width, image.height)


async def test_large_pictures_are_read_on_a_thread_in_order() -> None:
    large = encoded(noise(300, 200, 1))
    parts = await read_parts([[PictureSource(uri_of(large))], ["b"], [PictureSource(uri_of(PNG))]], "input")

    assert [300, None, 7] == [getattr(part, "width", None) for (part,) in parts]


@pytest.mark.parametrize(
    "data",
    [
        progressive_jpeg(80, 80, 100),
        progressive_jpeg(9_400, 9_400, 24),
        encoded(noise(90, 70), "JPEG", progressive=True),
        # The marker of a scan, in metadata.
        JPEG[:2] + b"\xff\xe1\x02\x02" + b"\xff\xda" * 256 + JPEG[2:],
        encoded(noise(7, 5), "MPO", save_all=True, append_images=[noise(7, 5, 1)] * 120),
    ],
)
def test_a_jpeg_of_few_scans_is_read(data: bytes) -> None:
    assert "image/jpeg" == read_picture(data).media_type


def test_scans_are_counted_as_the_decoder_finds_them() -> None:
    data = progressive_jpeg(40, 40, 7)
    padded = data.replace(b"\xff\xda", b"\xff\xff\xff\xda", 3)
    restarts = data.replace(b"\xff\xda", b"\xff\xd3\xff\xda")

    assert [7, 7, 7, 7, 1] == [
        count_scans(found) for found in (data, padded, restarts, data + data, encoded(noise(90, 70), "JPEG"))
    ]
    assert 10 == count_scans(encoded(noise(90, 70), "JPEG", progressive=True))
