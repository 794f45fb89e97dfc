"""Durations and moments as operators write them: `90m`, `7d`, `2027-01-31`. Pure."""

import re
from datetime import UTC, datetime

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
DURATION = re.compile(r"([0-9]{1,9})([smhd])", re.ASCII)
LONGEST_S = 3650 * 86_400


def duration_s(text: str) -> int:
    """Return the seconds of a duration, at most ten years. Raises: ValueError with what is expected."""
    match = DURATION.fullmatch(text)
    seconds = int(match[1]) * UNITS_S[match[2]] if match else -1
    if not 0 <= seconds <= LONGEST_S:
        raise ValueError(f"{text!r} is no duration such as 90m, 24h or 7d, of ten years at most")
    return seconds


def moment_s(text: str, now_s: float) -> float:
    """Return seconds since 1970 of a day, a moment (UTC without a time zone), or a duration ago.

    Raises: ValueError with what is expected.
    """
    if DURATION.fullmatch(text):
        return now_s - duration_s(text)
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        expected = (
            "a day such as 2027-01-31, a moment such as 2027-01-31T12:00:00Z, nor a duration such as 12h"
        )
        raise ValueError(f"{text!r} is neither {expected}") from error
