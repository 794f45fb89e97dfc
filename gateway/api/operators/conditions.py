"""Conditions of changes: `if-match` and `if-none-match`, with the tags of what is stored (RFC 9110). Pure."""

import re
from collections.abc import Sequence

import msgspec

from gateway.api.server.request_context import HttpContext
from gateway.errors import InvalidInput, PreconditionFailed

# A tag in its quotes; one that begins with W/ is weak, and no condition of a change is true for it.
TAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"')
ANY = "*"


class Condition(msgspec.Struct, frozen=True):
    """Condition of a change.

    tags: of what is there, any for "*"; None is no condition. is_new: nothing is there.
    """

    tags: tuple[str, ...] | None = None
    is_new: bool = False

    @property
    def is_set(self) -> bool:
        """Return whether there is any condition."""
        return self.tags is not None or self.is_new

    def check(self, what: str, tag: str | None) -> None:
        """Check what is stored. tag: None if there is nothing. Raises: PreconditionFailed."""
        if self.is_new and tag is not None:
            raise PreconditionFailed(f"there is {what} already", param="if-none-match")
        if self.tags is None or (tag is not None and (ANY in self.tags or tag in self.tags)):
            return
        now = f"its etag is {tag}" if tag is not None else "there is none now"
        raise PreconditionFailed(
            f"{what} has changed since it was read: {now}; read it again", param="if-match"
        )


def condition_of(context: HttpContext, *, may_be_new: bool = False) -> Condition:
    """Return the condition of a request. may_be_new: `if-none-match: *` has a meaning for it.

    Raises: InvalidInput.
    """
    matching, new = _values(context.headers, b"if-match"), _values(context.headers, b"if-none-match")
    if new and not (may_be_new and new == [ANY]):
        text = "only * is supported" if may_be_new else "it has no meaning for this request"
        raise InvalidInput(f"if-none-match: {text}", param="if-none-match")
    return Condition(_tags(", ".join(matching)) if matching else None, is_new=bool(new))


def _values(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for sent, value in headers if sent == name]


def _tags(text: str) -> tuple[str, ...]:
    """Return the tags of a list. Raises: InvalidInput."""
    if text == ANY:
        return (ANY,)
    tags = tuple(TAG.findall(text))
    if not tags or TAG.sub("", text).strip(", \t"):
        raise InvalidInput('if-match: expected *, or an etag in its quotes, such as "0123"', param="if-match")
    return tags
