"""What callers may give as inputs: texts, or token ids where the model's config says of which vocabulary.

Source: TEI's and OpenAI's unions: a list of numbers is one input, a list of lists is many.
"""

from collections.abc import Sequence
from typing import TypeAlias

from backends.contract import Operation
from backends.texts import TOKEN_ID_LIMIT
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import Api
from gateway.errors import EmptyInput, InvalidInput

# Ids stand beside texts because a union of two kinds of list cannot be told apart before it is read.
Inputs: TypeAlias = str | list[str | int | list[int]]


async def read_texts(
    given: Inputs, field: str, model: str | None, context: RequestContext, api: Api, operation: Operation
) -> tuple[str, ...]:
    """The texts of a call, ids decoded; none of them may be empty.

    Raises: EmptyInput, InvalidInput, and what `Routes.resolve` raises.
    """
    if isinstance(given, str):
        return api.whole_texts(given, field)
    items = as_items(given, field)
    ids = [one for one in items if not isinstance(one, str)]
    if ids:
        api.texts([""] * len(items), field)
        items = await _decoded(items, model, context, api, operation)
    return api.whole_texts([one for one in items if isinstance(one, str)], field)


def as_items(given: Sequence[str | int | list[int]], field: str) -> list[str | list[int]]:
    """Each input by itself. Raises: EmptyInput, InvalidInput."""
    numbers = [one for one in given if isinstance(one, int)]
    if numbers and len(numbers) < len(given):
        raise InvalidInput(f"`{field}` mixes numbers with other inputs", param=field)
    check_ids(numbers, field)
    others = [one for one in given if not isinstance(one, int)]
    for one in others:
        if isinstance(one, list):
            check_ids(one, field)
    items: list[str | list[int]] = [numbers] if numbers else others
    if any(not one for one in items):
        raise EmptyInput(f"`{field}` holds an empty input", param=field)
    return items


def check_ids(ids: Sequence[int], field: str) -> None:
    """Raises: InvalidInput, where a number is no token's in any vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < TOKEN_ID_LIMIT:
        raise InvalidInput(f"`{field}` holds a number that is no token id", param=field)


async def _decoded(
    items: Sequence[str | list[int]],
    model: str | None,
    context: RequestContext,
    api: Api,
    operation: Operation,
) -> list[str | list[int]]:
    """The items with texts in the place of ids."""
    route = api.route(context, model, operation)
    ids = [one for one in items if not isinstance(one, str)]
    texts = iter(await api.gateway.upstreams[route.upstream].ids.decode(ids, route.deadline_s))
    return [one if isinstance(one, str) else next(texts) for one in items]
