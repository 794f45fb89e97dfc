"""Rate-limit headers in OpenAI's format. Pure."""

from collections.abc import Sequence

from gateway.config.money import money_text
from gateway.quotas.limits import SECOND_US, UNITS, Limit, LimitStatus, Unit

NAMES = {
    unit: tuple(f"x-ratelimit-{field}-{unit}" for field in ("limit", "remaining", "reset")) for unit in UNITS
}


def rate_limit_headers(limit_statuses: Sequence[LimitStatus]) -> dict[str, str]:
    """Build OpenAI's x-ratelimit-* headers: per unit, of the limit with the smallest remaining share."""
    tightest: dict[Unit, tuple[float, LimitStatus]] = {}
    for status in limit_statuses:
        unit, share = status.limit.unit, status.remaining / max(1, status.limit.amount)
        if unit not in tightest or share < tightest[unit][0]:
            tightest[unit] = share, status
    headers: dict[str, str] = {}
    for unit, (_, status) in tightest.items():
        limit, remaining, reset = NAMES[unit]
        headers[limit] = _amount_text(status.limit, status.limit.amount)
        headers[remaining] = _amount_text(status.limit, status.remaining)
        # When a slot in flight becomes free is unknown: show a second, not the expiry of its lease.
        in_flight = status.limit.period == "in_flight"
        headers[reset] = format_duration(min(status.reset_us, SECOND_US) if in_flight else status.reset_us)
    return headers


def _amount_text(limit: Limit, amount: int) -> str:
    return money_text(amount, "") if limit.unit == "budget" else str(amount)


def format_duration(microseconds: int) -> str:
    """Format as OpenAI does: 1h2m3s, 6m0s, 1.25s, 20ms; rounded up to the millisecond."""
    milliseconds = -(-microseconds // 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest_ms = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest_ms // 1000}s" if rest_ms % 1000 == 0 else f"{rest_ms / 1000:g}s"
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes or hours else "") + seconds
