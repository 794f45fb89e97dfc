"""Limits in command-line options: NAME=AMOUNT."""

import re
from collections.abc import Mapping, Sequence

import msgspec

from gateway.config.schema import LimitAmount, limit_problems

AMOUNT = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)


def parse_limits(options: Sequence[str]) -> dict[str, LimitAmount]:
    """Return the amounts by name. Raises: ValueError with the problem."""
    limits = {}
    for option in options:
        name, _, amount = option.partition("=")
        if not AMOUNT.fullmatch(amount):
            raise ValueError(f"{option}: expected NAME=AMOUNT, such as tokens_per_minute=100000")
        try:
            limits[name] = msgspec.convert(float(amount) if "." in amount else int(amount), LimitAmount)
        except msgspec.ValidationError as error:
            raise ValueError(f"{option}: {error}") from error
    for name, problem in limit_problems(limits).items():
        raise ValueError(f"{name}: {problem}")
    return limits


def format_limits(limits: Mapping[str, LimitAmount], prefix: str = "") -> list[str]:
    """Return the limits in the form of the options. prefix: put in front of each name."""
    return [f"{prefix}{name}={amount}" for name, amount in limits.items()]
