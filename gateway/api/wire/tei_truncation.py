"""TEI's truncation fields, which all its bodies share. Pure.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/types.rs.
"""

from typing import Literal, Protocol

from backends.contract import Truncate

Direction = Literal["left", "Left", "right", "Right"]


class TruncationFields(Protocol):
    """A body with TEI's truncation fields."""

    truncate: bool | None
    truncation_direction: Direction


def side_of(data: TruncationFields) -> Truncate | None:
    """Return the end of the input to cut, or None for the model's default.

    "right" is also the value of a body without the field, so it counts only if the body asks for truncation.
    """
    side = Truncate(data.truncation_direction.lower())
    return side if data.truncate or side is Truncate.LEFT else None
