"""Arrival times of an open loop, in seconds from the start and in order; pure."""

import random
from typing import Literal

Arrivals = Literal["poisson", "constant"]


def constant(rate: float, seconds: float) -> list[float]:
    """Return one arrival each 1/rate seconds, at least one in all."""
    return [number / rate for number in range(max(1, round(rate * seconds)))]


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Return arrivals of independent callers: the gaps are exponential."""
    dice = random.Random(seed)  # noqa: S311 - a seeded load
    arrivals_s, now_s = [], dice.expovariate(rate)
    while now_s < seconds:
        arrivals_s.append(now_s)
        now_s += dice.expovariate(rate)
    return arrivals_s


def schedule(arrivals: Arrivals, rate: float, seconds: float, seed: int) -> list[float]:
    """Return the arrival times of either kind."""
    return constant(rate, seconds) if arrivals == "constant" else poisson(rate, seconds, seed)
