"""Types of request bodies: what decoding one can cost."""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from gateway.api.dialects.openai.embeddings import OpenAIEmbeddingsRequest
from gateway.api.server.endpoints import Endpoint
from gateway.api.server.paths import options_of
from gateway.app import HANDLERS

ANSWERS = [
    (f"{handler.fn.__module__.rpartition('.')[2]}.{handler.fn.__name__}", options_of(handler).answer)
    for handler in HANDLERS
]
BODIES = {
    name: answer.__self__.body
    for name, answer in ANSWERS
    if isinstance(answer, MethodType) and isinstance(answer.__self__, Endpoint)
}
HUGE = b"9" * 4300


def types_in(kind: Any, seen: set[Any]) -> Iterator[Any]:
    """Yield every type that a body of this type can contain."""
    if isinstance(kind, inspect.StructType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
    yield kind
    for name in kind.__struct_fields__:
        inner = getattr(kind, name)
        parts = inner if isinstance(inner, tuple) else (inner,)
        for part in [part.type if isinstance(part, inspect.Field) else part for part in parts]:
            if isinstance(part, inspect.Type):
                yield from types_in(part, seen)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_every_integer_has_an_upper_bound(body: Any) -> None:
    """Without one a number of thousands of digits is parsed, in quadratic time."""
    integers = [
        kind for kind in types_in(inspect.type_info(body), set()) if isinstance(kind, inspect.IntType)
    ]

    assert all(integer.le is not None or integer.lt is not None for integer in integers)


def test_finds_the_integers_of_bodies() -> None:
    bounded = sum(
        isinstance(kind, inspect.IntType)
        for body in BODIES.values()
        for kind in types_in(inspect.type_info(body), set())
    )
    unbounded = types_in(inspect.type_info(dict[str, list[str | int]]), set())

    assert len(BODIES) > 20
    assert bounded > 20
    assert [None] == [kind.le for kind in unbounded if isinstance(kind, inspect.IntType)]


@pytest.mark.parametrize("field", ["input", "truncate_prompt_tokens", "priority"])
@pytest.mark.parametrize("number", [HUGE, b"-" + HUGE, b"[" + HUGE + b"]", b"[[" + HUGE + b"]]"])
def test_a_huge_integer_is_refused(field: str, number: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"%b":%b}' % (field.encode(), number), type=OpenAIEmbeddingsRequest)
