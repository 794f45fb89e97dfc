"""HPACK, the compression of HTTP/2's header blocks, with bounds on what a block may cost. Pure.

A decoder keeps 4 KiB for its connection. A block that exceeds a bound ends the connection, because the table
that both sides share is then unknown. Replies are written without the table.
Source: RFC 7541.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

Field: TypeAlias = tuple[bytes, bytes]

TABLE_BYTES_MAX = 4096
# RFC 7541, 4.1: added to the name and the value of each entry.
ENTRY_BYTES = 32
INTEGER_BYTES_MAX = 4
PADDING_BITS_MAX = 7
# RFC 7541, 4.2: of the table, at the beginning of a block.
SIZE_CHANGES_MAX = 2

# RFC 7541, appendix A.
STATIC: tuple[Field, ...] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
)

# RFC 7541, appendix B: bits of each symbol's code, the end of a string last. The code is canonical: codes of
# one length follow each other in the order of their symbols.
CODE_BITS = (
    *(13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28),
    *(28, 28, 28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6),
    *(6, 6, 7, 8, 15, 6, 12, 10, 13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8),
    *(7, 8, 13, 19, 13, 14, 6, 15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7),
    *(7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23),
    *(24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22),
    *(23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23, 26, 26, 20, 19, 22, 23, 22, 25),
    *(26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27, 20, 24),
    *(20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27),
    *(27, 27, 27, 26, 30),
)
END_OF_STRING = 256


class CompressionFault(Exception):
    """Header block that no encoder writes."""


class BlockTooLarge(Exception):
    """Header block over one of the bounds."""


class BlockBounds(NamedTuple):
    """Bounds of one header block. list_bytes: its size as HTTP/2 counts it, with 32 bytes for each field.

    coded_bytes: most bytes in Huffman's code, each of which takes some fifty nanoseconds.
    """

    fields: int
    list_bytes: int
    coded_bytes: int


def _codes() -> dict[tuple[int, int], int]:
    """Return the symbol of each code, by its bits and its value."""
    found: dict[tuple[int, int], int] = {}
    code = bits = 0
    for symbol in sorted(range(len(CODE_BITS)), key=lambda symbol: (CODE_BITS[symbol], symbol)):
        code <<= CODE_BITS[symbol] - bits
        bits = CODE_BITS[symbol]
        found[bits, code] = symbol
        code += 1
    return found


class _Begun:
    """Begun code. steps: by the next byte, the code that it begins, and the symbols that it ends."""

    __slots__ = ("bits", "code", "steps")

    def __init__(self, bits: int, code: int) -> None:
        self.bits = bits
        self.code = code
        self.steps: list[tuple[_Begun, bytes] | None] = [None] * 256


class HuffmanCode:
    """Decoder of Huffman's code, a byte at a time.

    Its steps are computed when they are first needed, at most 65,536 of them.
    """

    def __init__(self) -> None:
        self._codes = _codes()
        self._start = _Begun(0, 0)
        self._begun = {(0, 0): self._start}

    def decode(self, coded: bytes) -> bytes:
        """Return a string. Raises: CompressionFault."""
        begun, pieces = self._start, []
        for byte in coded:
            begun, symbols = begun.steps[byte] or self._step(begun, byte)
            pieces.append(symbols)
        if begun.bits > PADDING_BITS_MAX or begun.code != (1 << begun.bits) - 1:
            raise CompressionFault("a string ends within a code")
        return b"".join(pieces)

    def _step(self, begun: _Begun, byte: int) -> tuple[_Begun, bytes]:
        """Compute the step of a byte. Raises: CompressionFault."""
        bits, code, symbols = begun.bits, begun.code, bytearray()
        for shift in range(7, -1, -1):
            bits, code = bits + 1, code << 1 | byte >> shift & 1
            symbol = self._codes.get((bits, code))
            if symbol == END_OF_STRING:
                raise CompressionFault("a string contains its own end")
            if symbol is not None:
                symbols.append(symbol)
                bits = code = 0
        if (bits, code) not in self._begun:
            self._begun[bits, code] = _Begun(bits, code)
        step = begun.steps[byte] = self._begun[bits, code], bytes(symbols)
        return step


HUFFMAN = HuffmanCode()


class BlockDecoder:
    """Decoder of the header blocks of one connection, in their order."""

    def __init__(self) -> None:
        self._entries: deque[Field] = deque()
        self._bytes = 0
        self._bytes_max = TABLE_BYTES_MAX

    def decode(self, block: bytes, bounds: BlockBounds) -> list[Field]:
        """Return the fields of a block. Raises: BlockTooLarge, CompressionFault."""
        fields: list[Field] = []
        room, coded = bounds.list_bytes, _CodedRoom(bounds.coded_bytes)
        at, end, changes = 0, len(block), 0
        try:
            while at < end:
                first = block[at]
                if first & 0x80:
                    index, at = _integer(block, at, 0x7F)
                    found = self._entry(index)
                elif first & 0xE0 == 0x20:
                    changes += 1
                    at = self._change_size(block, at, is_first=not fields and changes <= SIZE_CHANGES_MAX)
                    continue
                else:
                    found, at = self._literal(block, at, coded)
                room -= _entry_bytes(found)
                if room < 0 or len(fields) == bounds.fields:
                    raise BlockTooLarge
                fields.append(found)
        except IndexError:
            raise CompressionFault("a header block ends too early") from None
        return fields

    def _literal(self, block: bytes, at: int, coded: "_CodedRoom") -> tuple[Field, int]:
        """Return a field that is no entry of the table, which may become one, and the place after it."""
        is_kept = block[at] & 0x40
        index, at = _integer(block, at, 0x3F if is_kept else 0x0F)
        name, at = (self._entry(index)[0], at) if index else _string(block, at, coded)
        value, at = _string(block, at, coded)
        if is_kept:
            self._insert((name, value))
        return (name, value), at

    def _change_size(self, block: bytes, at: int, *, is_first: bool) -> int:
        """Change the most bytes of the table; return the place after the number."""
        size, at = _integer(block, at, 0x1F)
        if not is_first or size > TABLE_BYTES_MAX:
            raise CompressionFault("a size of the table that is not allowed")
        self._bytes_max = size
        self._evict()
        return at

    def _entry(self, index: int) -> Field:
        if 1 <= index <= len(STATIC):
            return STATIC[index - 1]
        place = index - len(STATIC) - 1
        if not 0 <= place < len(self._entries):
            raise CompressionFault("the table has no such entry")
        return self._entries[place]

    def _insert(self, entry: Field) -> None:
        self._bytes += _entry_bytes(entry)
        self._entries.appendleft(entry)
        self._evict()

    def _evict(self) -> None:
        while self._bytes > self._bytes_max:
            self._bytes -= _entry_bytes(self._entries.pop())


class _CodedRoom:
    """Bytes in Huffman's code that a block may still have."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, size: int) -> None:
        """Take bytes. Raises: BlockTooLarge."""
        self._left -= size
        if self._left < 0:
            raise BlockTooLarge


def _entry_bytes(entry: Field) -> int:
    return len(entry[0]) + len(entry[1]) + ENTRY_BYTES


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Return a number, whose first bits share a byte with others, and the place after it."""
    number = block[at] & mask
    at += 1
    if number < mask:
        return number, at
    for shift in range(0, 7 * INTEGER_BYTES_MAX, 7):
        byte = block[at]
        at += 1
        number += (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise CompressionFault("a number is too large")


def _string(block: bytes, at: int, coded: _CodedRoom) -> tuple[bytes, int]:
    """Return a string and the place after it. Raises: BlockTooLarge, CompressionFault."""
    is_coded = block[at] & 0x80
    length, at = _integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise CompressionFault("a string is longer than its block")
    content = bytes(block[at:end])
    if is_coded:
        coded.take(length)
        content = HUFFMAN.decode(content)
    return content, end


def encode_block(fields: Iterable[Field]) -> bytes:
    """Return a header block, which leaves the other side's table alone."""
    return b"".join([b"\0" + _length(name) + name + _length(value) + value for name, value in fields])


def _length(content: bytes) -> bytes:
    """Return the length of a string that is not coded."""
    size = len(content)
    if size < 0x7F:
        return bytes((size,))
    size -= 0x7F
    found = bytearray((0x7F,))
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    found.append(size)
    return bytes(found)
