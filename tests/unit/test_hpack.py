"""HPACK: the examples of RFC 7541, appendix C, the bounds of one block, and damaged blocks."""

import numpy as np
import pytest

from gateway.api.grpc.hpack import (
    CODE_BITS,
    HUFFMAN,
    STATIC,
    BlockBounds,
    BlockDecoder,
    BlockTooLarge,
    CompressionFault,
    encode_block,
)

BOUNDS = BlockBounds(128, 32_768, 8_192)
FIRST = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")]
SECOND = [*FIRST, (b"cache-control", b"no-cache")]
THIRD = [
    (b":method", b"GET"),
    (b":scheme", b"https"),
    (b":path", b"/index.html"),
    (b":authority", b"www.example.com"),
    (b"custom-key", b"custom-value"),
]


@pytest.mark.parametrize(
    "blocks",
    [
        (
            "828684410f7777772e6578616d706c652e636f6d",
            "828684be58086e6f2d6361636865",
            "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
        ),
        (
            "828684418cf1e3c2e5f23a6ba0ab90f4ff",
            "828684be5886a8eb10649cbf",
            "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        ),
    ],
    ids=["C.3", "C.4, with Huffman's code"],
)
def test_requests_of_the_standard(blocks: tuple[str, ...]) -> None:
    decoder = BlockDecoder()
    for block, fields in zip(blocks, (FIRST, SECOND, THIRD), strict=True):
        assert fields == decoder.decode(bytes.fromhex(block), BOUNDS)


def test_literals_of_the_standard() -> None:
    decoder = BlockDecoder()
    # C.2.2 and C.2.3: neither is kept in the table.
    assert [(b":path", b"/sample/path")] == decoder.decode(
        bytes.fromhex("040c2f73616d706c652f70617468"), BOUNDS
    )
    assert [(b"password", b"secret")] == decoder.decode(
        bytes.fromhex("100870617373776f726406736563726574"), BOUNDS
    )
    with pytest.raises(CompressionFault, match="no such entry"):
        decoder.decode(b"\xbe", BOUNDS)


def test_the_table_evicts_its_oldest_entries() -> None:
    decoder = BlockDecoder()
    for number in range(5):
        # Of 1,033 bytes each: three of them fit.
        decoder.decode(b"\x40\x01%d\x7f\xe9\x06" % number + b"v" * 1000, BOUNDS)
    assert [(b"4", b"v" * 1000)] == decoder.decode(b"\xbe", BOUNDS)
    assert [(b"2", b"v" * 1000)] == decoder.decode(b"\xc0", BOUNDS)
    with pytest.raises(CompressionFault):
        decoder.decode(b"\xc1", BOUNDS)
    assert [] == decoder.decode(b"\x20", BOUNDS)
    with pytest.raises(CompressionFault):
        decoder.decode(b"\xbe", BOUNDS)


def test_huffmans_code_is_the_standards() -> None:
    assert 257 == len(CODE_BITS)
    assert 61 == len(STATIC)
    # A code is complete: no string of bits is without a meaning.
    assert 1 == sum(2.0**-bits for bits in CODE_BITS)
    codes = {"0": b"\x07", "a": b"\x1f", "~": b"\xff\xef", "\\": b"\xff\xfe\x1f"}
    for character, coded in codes.items():
        assert character.encode() == HUFFMAN.decode(coded)
    # Appendix C.6.1.
    assert b"Mon, 21 Oct 2013 20:13:21 GMT" == HUFFMAN.decode(
        bytes.fromhex("d07abe941054d444a8200595040b8166e082a62d1bff")
    )
    for wrong in (b"\xff\xff\xff\xff", b"\x00", b"\x1f\xff"):
        with pytest.raises(CompressionFault):
            HUFFMAN.decode(wrong)


@pytest.mark.parametrize(
    "block",
    [
        b"\x82" * 129,
        b"\0\x01a\x7f\x81\xff\x01" + b"v" * 32_768,
        b"\x40\x01a\x7f\x81\x03" + b"v" * 512 + b"\xbe" * 70,
        b"\0\x01a\xff\x82\x3f" + b"\x1f" * 8_193,
    ],
    ids=["fields", "one field", "references", "Huffman's code"],
)
def test_a_block_over_a_bound_is_not_decoded_to_its_end(block: bytes) -> None:
    with pytest.raises(BlockTooLarge):
        BlockDecoder().decode(block, BOUNDS)


def test_fields_are_written_as_they_are_read() -> None:
    fields = [(b"a" * size, b"b" * (size + 1)) for size in (0, 1, 126, 127, 128, 254, 255, 5_000)]
    assert fields == BlockDecoder().decode(encode_block(fields), BOUNDS)


def test_damaged_blocks_raise_nothing_else() -> None:
    generator = np.random.default_rng(3)
    decoder, read = BlockDecoder(), 0
    for _ in range(5_000):
        try:
            decoder.decode(generator.bytes(int(generator.integers(1, 60))), BOUNDS)
            read += 1
        except (BlockTooLarge, CompressionFault):
            decoder = BlockDecoder()
    assert read > 20
