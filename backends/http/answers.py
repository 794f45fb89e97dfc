"""JSON answers of upstreams: decoding, with the place of a value at fault, and the words of an error.

Rule: a message to a caller never contains words of an answer. They are in the error's `detail`.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from backends.contract.errors import ReplicaFailed
from backends.http.client import UpstreamResponse

T = TypeVar("T")
UNREADABLE = "the upstream's answer could not be read"
# Larger answers are not decoded a second time to find the value at fault.
EXPLAINED_BYTES_MAX = 4 * 1024 * 1024
# Characters of a value that is quoted, and around a byte that is no JSON.
VALUE_CHARACTERS_MAX = 60
EXCERPT_BYTES = 24
# Characters of an error whose body has no known form.
WORDS_CHARACTERS_MAX = 300
# Fields of an error's text, in the order in which they are looked for.
WORD_FIELDS = ("message", "error", "detail", "msg", "error_msg", "reason", "title")
PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
# The place of an input in an answer: the first index of a path.
INPUT_INDEX = re.compile(r"(?:data|results|embeddings\.float|embeddings)?\[(?P<index>\d{1,6})\]")
BYTE = re.compile(r"\(byte (?P<at>\d+)\)")
TAG = re.compile(r"<[^>]{0,200}>")


def decode_json(body: bytes, type_: type[T]) -> T:
    """Decode the body of an answer of status 200.

    Raises: ReplicaFailed, whose detail has the path of the value at fault and what stood there.
    """
    try:
        return msgspec.json.decode(body, type=type_)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise unreadable(body, error) from error


@contextmanager
def translate_decode_errors() -> Iterator[None]:
    """Convert errors in converting the values of an answer to ReplicaFailed."""
    try:
        yield
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # ValueError: rows of unequal length, a length that is not a multiple of 4.
        raise ReplicaFailed(UNREADABLE).with_facts(detail=str(error)) from error


def unreadable_value(path: str, value: object, input_index: int | None = None) -> ReplicaFailed:
    """Return the error of a value that is JSON and is not what stands there in a valid answer."""
    return ReplicaFailed(UNREADABLE, input_index=input_index).with_facts(detail=f"`{path}`: {_shown(value)}")


def unreadable(body: bytes, error: Exception) -> ReplicaFailed:
    """Return the error of an answer that could not be decoded."""
    if words := words_of(body):
        # An error that was sent with status 200.
        return ReplicaFailed(UNREADABLE).with_facts(detail=words)
    if isinstance(error, msgspec.ValidationError):
        return _invalid_value(body, str(error))
    # Python's JSON has NaN and Infinity, which other parsers refuse.
    found = _first_not_finite(_loosely_decoded(body), "") if len(body) <= EXPLAINED_BYTES_MAX else None
    if found is not None:
        path, value = found
        return unreadable_value(path, value, _input_index(path))
    if not body.strip():
        return ReplicaFailed(UNREADABLE).with_facts(detail="it is empty")
    return ReplicaFailed(UNREADABLE).with_facts(detail=f"{error}{_excerpt(body, str(error))}")


def _invalid_value(body: bytes, message: str) -> ReplicaFailed:
    located = PATH.search(message)
    path = located["path"] if located else ""
    reason = message[: located.start()] if located else message
    value = _value_at(body, path) if path and "missing" not in reason else None
    place = f"`{path}`: " if path else ""
    shown = _shown(value[0]) if value is not None else reason
    return ReplicaFailed(UNREADABLE, input_index=_input_index(path)).with_facts(detail=f"{place}{shown}")


def _value_at(body: bytes, path: str) -> tuple[Any] | None:
    """Return the value at a path of msgspec, in a tuple, or None if it cannot be found again."""
    if len(body) > EXPLAINED_BYTES_MAX:
        return None
    value = _loosely_decoded(body)
    try:
        for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            value = value[name] if name else value[int(index)]
    except (KeyError, IndexError, TypeError):
        return None
    return (value,)


def _loosely_decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _first_not_finite(value: Any, path: str) -> tuple[str, float] | None:
    """Return the path and value of the first number that is not finite."""
    if isinstance(value, float):
        return None if math.isfinite(value) else (path, value)
    if isinstance(value, dict):
        children: Iterator[tuple[str, Any]] = (
            (f"{path}.{name}" if path else str(name), child) for name, child in value.items()
        )
    elif isinstance(value, list):
        children = ((f"{path}[{index}]", child) for index, child in enumerate(value))
    else:
        return None
    return next((found for name, child in children if (found := _first_not_finite(child, name))), None)


def _input_index(path: str) -> int | None:
    found = INPUT_INDEX.match(path)
    return int(found["index"]) if found else None


def _shown(value: object) -> str:
    """Return a value as JSON, cut; of lists and objects, the beginning."""
    text = value if isinstance(value, str) else None
    shown = json.dumps(value if text is None else text[:VALUE_CHARACTERS_MAX], default=str)
    return shown if len(shown) <= VALUE_CHARACTERS_MAX else f"{shown[:VALUE_CHARACTERS_MAX]}…"


def _excerpt(body: bytes, message: str) -> str:
    """Return the bytes around the one at fault, for a message that names it."""
    found = BYTE.search(message)
    if found is None:
        return f": {_shown(body[:EXCERPT_BYTES].decode(errors='replace'))}"
    at = int(found["at"])
    return f": {_shown(body[max(0, at - EXCERPT_BYTES) : at + EXCERPT_BYTES].decode(errors='replace'))}"


def words_of(body: bytes) -> str:
    """Return the text of an error body in any of the known forms, or "" if it has none."""
    if len(body) > EXPLAINED_BYTES_MAX:
        return ""
    decoded = _loosely_decoded(body)
    return _words_in(decoded) if isinstance(decoded, dict) else ""


def _words_in(value: Any, depth: int = 4) -> str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list) and value and depth:
        # FastAPI lists the faults of a request.
        return _words_in(value[0], depth - 1)
    if not isinstance(value, dict) or not depth:
        return ""
    found = (_words_in(value.get(name), depth - 1) for name in WORD_FIELDS)
    return next(filter(None, found), "")


def words_of_error(response: UpstreamResponse) -> str:
    """Return the upstream's own words in a response whose status is not 200, or "" if it has none."""
    if words := words_of(response.body):
        return words
    text = TAG.sub(" ", response.body[: 4 * WORDS_CHARACTERS_MAX].decode(errors="replace"))
    return " ".join(text.split())[:WORDS_CHARACTERS_MAX]


def in_order(indices: Sequence[int | None], path: str, *, listed: bool) -> list[int]:
    """Return, for each input in order, the place of its entry in an answer.

    indices: of the entries as they came. A missing one is not ambiguous if it is the only one, because
    protobuf leaves out 0, or if all are missing and the entries are listed in the order of the inputs.

    Raises: ReplicaFailed, unless each input has one entry.
    """
    places = list(range(len(indices)))
    if indices == places:
        return places
    missing = [place for place, index in enumerate(indices) if index is None]
    if len(missing) == len(indices) and (listed or len(indices) == 1):
        return places
    known = {index: place for place, index in enumerate(indices) if index is not None}
    if len(missing) == 1:
        free = next(index for index in range(len(indices)) if index not in known)
        known[free] = missing[0]
    elif missing:
        raise unreadable_value(f"{path}[{missing[0]}].index", None)
    if len(known) < len(indices) or any(index not in known for index in range(len(indices))):
        shown = ", ".join(map(str, indices[:10]))
        raise ReplicaFailed("the upstream's indices are not 0 to n - 1").with_facts(
            detail=f"`{path}[].index`: {shown}{', …' if len(indices) > 10 else ''}"
        )
    return [known[index] for index in range(len(indices))]
