"""Limits as a command line writes them: NAME=AMOUNT."""

from collections.abc import Mapping, Sequence

import msgspec

from gateway.config.schema import LimitAmount, limit_problems


def limits_of(written: Sequence[str]) -> dict[str, int]:
    """Amounts by name. Raises: ValueError with what is wrong."""
    limits = {}
    for one in written:
        name, _, amount = one.partition("=")
        if not amount.isdecimal():
            raise ValueError(f"{one}: expected NAME=AMOUNT, such as tokens_per_minute=100000")
        try:
            limits[name] = msgspec.convert(int(amount), LimitAmount)
        except msgspec.ValidationError as error:
            raise ValueError(f"{one}: {error}") from error
    for name, problem in limit_problems(limits).items():
        raise ValueError(f"{name}: {problem}")
    return limits


def shown_limits(limits: Mapping[str, int], scope: str = "") -> list[str]:
    """The same, as text. scope: stands before each name."""
    return [f"{scope}{name}={amount}" for name, amount in limits.items()]
