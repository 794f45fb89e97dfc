"""When calls arrive in an open loop: moments in seconds from the start, in order. Pure."""

import random
from typing import Literal

Arrivals = Literal["poisson", "constant"]


def constant(rate: float, seconds: float) -> list[float]:
    """One call each 1/rate seconds."""
    return [number / rate for number in range(round(rate * seconds))]


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Callers that know nothing of each other: gaps are exponential."""
    dice = random.Random(seed)  # noqa: S311 - a seeded load
    moments, now_s = [], dice.expovariate(rate)
    while now_s < seconds:
        moments.append(now_s)
        now_s += dice.expovariate(rate)
    return moments


def schedule(arrivals: Arrivals, rate: float, seconds: float, seed: int) -> list[float]:
    """Of either kind."""
    return constant(rate, seconds) if arrivals == "constant" else poisson(rate, seconds, seed)
