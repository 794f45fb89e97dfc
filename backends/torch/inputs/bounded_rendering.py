"""Bounds of the work that a chat template does with a caller's values: characters that it writes, and time.

A template may repeat a value as often as another value says: in its output, in a macro, or in a variable. The
sandbox of Jinja bounds neither. Rule: a rendering blocks its thread for at most `RENDER_S_MAX`.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import local
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from backends.contract.errors import InvalidWork

# What a template can raise besides its own errors: a wrong type or value of a variable, endless recursion.
FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
# Processor time of one conversation; one of 1,024 messages takes some milliseconds.
RENDER_S_MAX = 1.0
# Steps between two looks at the clock.
STEPS = 64

_bound = local()


class RenderedTooLong(Exception):
    """Text of a template that is longer than its bound."""


def _join(parts: Iterable[str]) -> str:
    """Join the parts of a text that a template writes, within the bound of this thread."""
    left: int | None = getattr(_bound, "characters", None)
    if left is None:
        return "".join(parts)
    kept = []
    for part in parts:
        left -= len(part)
        if left < 0:
            raise RenderedTooLong
        kept.append(part)
    return "".join(kept)


# Compiled templates join their output, and that of macros and blocks, with this function.
ImmutableSandboxedEnvironment.concat = staticmethod(_join)


@contextmanager
def bounded(characters: int) -> Iterator[None]:
    """Bound each text that templates join in this block, and the time of the block.

    Raises: InvalidWork if a bound is exceeded.
    """
    before = sys.gettrace()
    _bound.characters = characters
    sys.settrace(_watch(time.thread_time() + RENDER_S_MAX))
    try:
        yield
    except RenderedTooLong as error:
        raise InvalidWork(
            f"the chat template of the model writes more than {characters:,} characters for this "
            "conversation, more than the model reads: shorten `messages` and `chat_template_kwargs`"
        ) from error
    finally:
        sys.settrace(before)
        _bound.characters = None


def _watch(until_s: float) -> Callable[[FrameType, str, Any], Any]:
    """Return a trace function that ends a thread's work after a moment of its processor time."""
    steps = 0

    def watch(_: FrameType, __: str, ___: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps % STEPS == 0 and time.thread_time() > until_s:
            raise InvalidWork(
                f"the chat template of the model takes more than {RENDER_S_MAX:g} s for this conversation: "
                "shorten `messages` and `chat_template_kwargs`"
            )
        return watch

    return watch
