"""Range of a chart: its first and last moment, and the length of its intervals. Pure.

A range has at most some 400 intervals, which begin at multiples of their length. Minutes are kept for a day:
a range that begins earlier has intervals of hours.
"""

from collections.abc import Mapping

import msgspec

from gateway.errors import InvalidInput
from gateway.history.store import DAY_S, HOUR_S, KEPT_DAYS, MINUTE_S, MINUTES_KEPT_S, Resolution

RANGES_S: Mapping[str, int] = {
    "15m": 15 * MINUTE_S,
    "1h": HOUR_S,
    "6h": 6 * HOUR_S,
    "24h": DAY_S,
    "7d": 7 * DAY_S,
    "30d": 30 * DAY_S,
    "90d": KEPT_DAYS * DAY_S,
}
DEFAULT = "1h"
POINTS_MAX = 400
STEPS_S = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
# Later moments are no seconds, and no program shows them as a date.
MOMENT_MAX_S = 253_402_300_800
# Time in which the parts of a minute arrive: a minute is shown after it.
ARRIVAL_S = 5.0


class Range(msgspec.Struct, frozen=True):
    """Intervals of a chart. until_s: end of the last one, which may lie ahead."""

    from_s: int
    until_s: int
    step_s: int

    @property
    def steps(self) -> int:
        """Return the number of intervals."""
        return (self.until_s - self.from_s) // self.step_s

    @property
    def resolution(self) -> Resolution:
        """Return what the intervals consist of."""
        return "hour" if self.step_s >= HOUR_S else "minute"


def range_of(
    name: str | None, from_s: float | None, until_s: float | None, now_s: float, *, with_current: bool
) -> Range:
    """Return the range of a request. with_current: it includes the minute that runs. Raises: InvalidInput."""
    if name is not None:
        if from_s is not None or until_s is not None:
            raise InvalidInput("range: it cannot be combined with `from` and `until`", param="range")
        if name not in RANGES_S:
            raise InvalidInput(f"range: {name!r} is none of {', '.join(RANGES_S)}", param="range")
    elif from_s is None and until_s is not None:
        raise InvalidInput("until: it needs `from`", param="until")
    if from_s is None:
        return _last(RANGES_S[name or DEFAULT], now_s, with_current=with_current)
    return _between(from_s, now_s if until_s is None else until_s, now_s)


def _between(from_s: float, end_s: float, now_s: float) -> Range:
    """Return the range between two moments. Raises: InvalidInput."""
    if end_s >= MOMENT_MAX_S:
        raise InvalidInput(
            "until: expected seconds since 1970, before the year 10000; they are not milliseconds",
            param="until",
        )
    if not 0 <= from_s < end_s:
        raise InvalidInput("from: expected seconds since 1970, before `until`", param="from")
    if from_s >= now_s:
        raise InvalidInput("from: it lies ahead", param="from")
    start_s = max(from_s, now_s - RANGES_S["90d"])
    if end_s <= start_s:
        raise InvalidInput(f"until: history is kept for {KEPT_DAYS} days", param="until")
    end_s = min(end_s, now_s)
    step_s = _step_of(end_s - start_s, is_old=start_s < now_s - MINUTES_KEPT_S - MINUTE_S)
    return Range(int(start_s // step_s) * step_s, -int(-end_s // step_s) * step_s, step_s)


def _last(length_s: int, now_s: float, *, with_current: bool) -> Range:
    step_s = _step_of(length_s, is_old=length_s > MINUTES_KEPT_S)
    if step_s == MINUTE_S and not with_current:
        until_s = int((now_s - ARRIVAL_S) // step_s) * step_s
    else:
        until_s = -int(-now_s // step_s) * step_s
    return Range(until_s - length_s, until_s, step_s)


def _step_of(length_s: float, *, is_old: bool) -> int:
    """Return the shortest step with which a range has few enough intervals."""
    return next(
        step_s for step_s in STEPS_S if length_s <= step_s * POINTS_MAX and (step_s >= HOUR_S or not is_old)
    )
