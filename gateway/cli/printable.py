"""Text of servers and files for a terminal."""

import codecs
import io
import sys

ESCAPED = "gateway.escaped"


def escape_unprintable() -> None:
    """Have standard output and error escape what their encoding lacks, as on terminals of Latin-1 or ASCII.

    The escapes are those of JSON, so that printed JSON stays the same value.
    """
    codecs.register_error(ESCAPED, _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPED)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    numbers = (units[index : index + 2].hex() for index in range(0, len(units), 2))
    return "".join(f"\\u{number}" for number in numbers), error.end


def printable(text: str) -> str:
    """Return a text with a space in place of each character that a terminal could take for a command."""
    return "".join(character if character.isprintable() or character in "\n\t" else " " for character in text)


def plain(text: str) -> str:
    """Replace characters that a terminal would interpret."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)
