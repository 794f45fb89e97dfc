"""Conversion of unexpected errors while a model is opened: each becomes a refusal that states its cause."""

from collections.abc import Iterator
from contextlib import contextmanager

from backends.contract.errors import ModelUnavailable
from backends.torch.memory import is_exhausted


@contextmanager
def refuse_on_error(fault: str, remedy: str = "") -> Iterator[None]:
    """Raise errors of the block as ModelUnavailable; exhausted memory passes, as a retry may help.

    fault: what the error means, which the message puts before it. remedy: the way out, put behind it.
    """
    try:
        yield
    except ModelUnavailable:
        raise
    except Exception as error:
        if is_exhausted(error):
            raise
        cause = f"{fault}: {describe_error(error)}"
        raise ModelUnavailable(f"{cause}; {remedy}" if remedy else cause) from error


def describe_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    name, line = type(error).__name__, first_line(error)
    return line if line == name else f"{name}: {line}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
