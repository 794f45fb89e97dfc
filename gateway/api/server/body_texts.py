"""Texts of a JSON body that are no Unicode, and the byte order mark before it. Pure."""

import re
from typing import Any

import msgspec

Body = bytes | bytearray
MARK = b"\xef\xbb\xbf"
# Larger bodies are not searched: it takes several times the decoding.
SEARCHED_BYTES_MAX = 128 * 1024
# Half of a pair of escapes: a first one without the second, or a second one without the first. Before it is
# an even number of backslashes.
HALF = re.compile(
    rb"(?<!\\)((?:\\\\)*)(?:"
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
UNDECODED = re.compile("[\udc80-\udcff]+")
# Characters without a meaning, of which one that the body lacks stands for what is wrong.
FIRST_PRIVATE, LAST_PRIVATE = 0xE000, 0xE0FF


def without_mark(body: Body) -> Body:
    """Return a body without a byte order mark, which a reader of JSON may ignore (RFC 8259 §8.1)."""
    # `removeprefix` would copy every body.
    if body.startswith(MARK):
        return body[len(MARK) :]
    return body


def place_of_broken_text(body: Body) -> str | None:
    """Return the place of the first text that is no Unicode, such as `input[1]`; None if there is none."""
    if len(body) > SEARCHED_BYTES_MAX:
        return None
    marker = next(
        (
            character
            for character in map(chr, range(FIRST_PRIVATE, LAST_PRIVATE))
            if character.encode() not in body
        ),
        None,
    )
    if marker is None:
        return None
    repaired = HALF.sub(rb"\1" + marker.encode(), bytes(body)).decode("utf-8", "surrogateescape")
    try:
        value = msgspec.json.decode(UNDECODED.sub(marker, repaired))
    except (msgspec.DecodeError, RecursionError):
        return None
    return _place_of(value, marker) if isinstance(value, list | dict) else None


def _place_of(value: Any, marker: str) -> str | None:
    """Return the path of a text with a character. No recursion: a body may be nested deeply."""
    # Containers with the keys that lead to them, as linked pairs: most of them need no path.
    waiting: list[tuple[Any, Any]] = [(value, None)]
    while waiting:
        container, keys = waiting.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, item in items:
            if isinstance(item, str):
                if marker in item:
                    return _path_of((key, keys))
            elif item and isinstance(item, list | dict):
                waiting.append((item, (key, keys)))
            if isinstance(key, str) and marker in key:
                return _path_of(keys)
    return None


def _path_of(keys: Any) -> str:
    """Return linked keys as a path, such as `input[1].text`."""
    path = ""
    while keys is not None:
        key, keys = keys
        path = (f"[{key}]" if isinstance(key, int) else f".{key}") + path
    return path.removeprefix(".")
