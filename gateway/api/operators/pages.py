"""Pages of the lists for operators: checks of their query, and the part that a page shows."""

import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import msgspec

from gateway.config.durations import moment_s
from gateway.errors import InvalidInput

LIMIT_MAX = 1_000
LIMIT_DEFAULT = 50
# The last page begins before this one: an offset is a number of rows, and no store has so many.
OFFSET_MAX = 10_000_000
ORDERS = ("asc", "desc")
Row = TypeVar("Row")


class Paging(msgspec.Struct, frozen=True):
    """Part of a list. sort: a name among those allowed."""

    sort: str
    is_descending: bool
    limit: int
    offset: int

    def part(self, rows: Sequence[Row], key: Callable[[Row], Any] | None) -> list[Row]:
        """Return the rows of the page.

        rows: in the order of their names, in which equal ones stay. key: of what is sorted by, None for the
        names. Rows without a key come last.
        """
        if key is None:
            found = list(reversed(rows)) if self.is_descending else list(rows)
        else:
            pairs = [(key(row), row) for row in rows]
            with_key = [pair for pair in pairs if pair[0] is not None]
            with_key.sort(key=itemgetter(0), reverse=self.is_descending)
            found = [row for _, row in with_key] + [row for value, row in pairs if value is None]
        return found[self.offset : self.offset + self.limit]


def paging_of(
    sorts: Sequence[str], sort: str | None, order: str | None, limit: int | None, offset: int | None
) -> Paging:
    """Return the part of a list that a query asks for.

    sorts: allowed, the first is the default. Names rise and amounts fall unless `order` says otherwise.
    Raises: InvalidInput.
    """
    sort = check_choice("sort", sorts[0] if sort is None else sort, sorts)
    if order is None:
        order = "asc" if sort in ("name", "id", "tenant", "expires") else "desc"
    check_choice("order", order, ORDERS)
    return Paging(sort, order == "desc", check_limit(limit, LIMIT_DEFAULT), check_offset(offset))


def check_limit(limit: int | None, missing: int, most: int = LIMIT_MAX) -> int:
    """Return the number of rows of a page. Raises: InvalidInput."""
    if limit is None:
        return missing
    if not 1 <= limit <= most:
        raise InvalidInput(f"limit: from 1 to {most}, not {limit}", param="limit")
    return limit


def check_offset(offset: int | None) -> int:
    """Return the number of rows in front of a page. Raises: InvalidInput."""
    if offset is None:
        return 0
    if not 0 <= offset <= OFFSET_MAX:
        raise InvalidInput(f"offset: from 0 to {OFFSET_MAX}, not {offset}", param="offset")
    return offset


def check_choice(name: str, value: str, allowed: Sequence[str]) -> str:
    """Return the value of a parameter. Raises: InvalidInput, which names those that are allowed."""
    if value not in allowed:
        raise InvalidInput(f"{name}: one of {', '.join(allowed)}, not {value[:40]!r}", param=name)
    return value


def moment_of(name: str, text: str) -> float | None:
    """Return the moment that a parameter states, in seconds since 1970; None for none. Raises: InvalidInput.

    text: a day, a moment, or a duration before now.
    """
    try:
        return moment_s(text, time.time()) if text else None
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"{name}: {error}", param=name) from error
