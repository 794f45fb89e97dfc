"""Parts that the endpoints for stored keys and stored tenants share."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
from litestar.openapi.datastructures import ResponseSpec

from gateway.config.schema import LimitAmount, limit_problems
from gateway.errors import InvalidInput, QuotaUnavailable
from gateway.store.errors import StoreUnavailable


class EmptyObject(msgspec.Struct):
    """An empty object."""


REMOVED = {200: ResponseSpec(EmptyObject, generate_examples=False, description="It was removed")}


@contextmanager
def store_errors() -> Iterator[None]:
    """Translate an outage of the store.

    Raises: QuotaUnavailable.
    """
    try:
        yield
    except StoreUnavailable as error:
        raise QuotaUnavailable("the store of tenants and keys is unavailable") from error


def check_limits(limits: Mapping[str, LimitAmount]) -> None:
    """Check the names and the amounts of limits.

    Raises: InvalidInput if one is unknown or wrong.
    """
    for name, problem in limit_problems(limits).items():
        raise InvalidInput(f"{name}: {problem}", param="limits")
