"""The ledger in memory: all limits or none, each reservation closed once, on a clock that never goes back."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import QuotaExceeded, RequestExceedsLimit
from gateway.quotas.ledger import (
    MEMORY_LEASE_US,
    NOTHING,
    MemoryLedger,
    QuotaRequest,
    Reservation,
)
from gateway.quotas.limit_text import format_duration, rate_limit_headers
from gateway.quotas.limits import SECOND_US, Cost, Limit, LimitStatus, parse_limit

NOON_US = 1_709_208_000 * SECOND_US  # 2024-02-29T12:00:00Z


@dataclass
class FakeClock:
    """Clock in microseconds that the test advances."""

    now_us: int = NOON_US

    def __call__(self) -> int:
        """Return the time."""
        return self.now_us


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ledger(clock: FakeClock) -> MemoryLedger:
    return MemoryLedger(clock)


def limits(**amounts: int) -> tuple[Limit, ...]:
    """Parse limits by their names in router.yaml."""
    return tuple(parse_limit(name, amount) for name, amount in amounts.items())


def remaining(limit_statuses: tuple[LimitStatus, ...]) -> dict[str, int]:
    return {status.limit.name: status.remaining for status in limit_statuses}


NUMBERS = count()


async def reserve(
    ledger: MemoryLedger, tenant: str, tenant_limits: tuple[Limit, ...], cost: Cost
) -> Reservation:
    """Reserve under a new id."""
    return await ledger.reserve(
        QuotaRequest(str(next(NUMBERS)), tenant, tenant_limits, cost, expires_us=3600 * SECOND_US)
    )


async def refusal_of(ledger: MemoryLedger, tenant_limits: tuple[Limit, ...], cost: Cost) -> QuotaExceeded:
    """Return the error of a refused reserve."""
    with pytest.raises(QuotaExceeded) as caught:
        await reserve(ledger, "acme", tenant_limits, cost)
    return caught.value


ALL = limits(requests_per_minute=10, tokens_per_hour=3600, inputs_per_day=100, requests_in_flight=4)


async def test_reserve_charges_every_limit_in_its_unit(ledger: MemoryLedger) -> None:
    reservation = await reserve(ledger, "acme", ALL, Cost(tokens=600, inputs=30))

    assert {
        "requests_per_minute": 9,
        "tokens_per_hour": 3000,
        "inputs_per_day": 70,
        "requests_in_flight": 3,
    } == remaining(reservation.limit_statuses)


@pytest.mark.parametrize("blocking", [limit.name for limit in ALL])
async def test_refused_reserve_charges_no_limit(ledger: MemoryLedger, blocking: str) -> None:
    only = tuple(limit for limit in ALL if limit.name == blocking)
    for _ in range(only[0].amount):
        await reserve(ledger, "acme", only, Cost(tokens=1, inputs=1))
    remaining_limits = tuple(limit for limit in ALL if limit.name != blocking)
    await refusal_of(ledger, ALL, Cost(tokens=1, inputs=1))

    untouched = await reserve(ledger, "acme", remaining_limits, Cost(requests=0))
    expected = {limit.name: limit.amount - (limit.period == "in_flight") for limit in remaining_limits}
    assert expected == remaining(untouched.limit_statuses)


async def test_tenants_do_not_share_limits(ledger: MemoryLedger) -> None:
    tenant_limits = limits(requests_per_minute=1)
    await reserve(ledger, "acme", tenant_limits, Cost())
    other = await reserve(ledger, "globex", tenant_limits, Cost())

    assert {"requests_per_minute": 0} == remaining(other.limit_statuses)
    await refusal_of(ledger, tenant_limits, Cost())


async def test_tenant_without_limits_is_never_refused(ledger: MemoryLedger) -> None:
    reservation = await reserve(ledger, "acme", (), Cost(tokens=10**12))

    assert () == reservation.limit_statuses
    assert () == ledger.settle(reservation, Cost(tokens=1))


async def test_settling_returns_the_unused_amount(ledger: MemoryLedger) -> None:
    reservation = await reserve(ledger, "acme", ALL, Cost(tokens=600, inputs=30))
    after = ledger.settle(reservation, Cost(tokens=100, inputs=30))

    assert {
        "requests_per_minute": 9,
        "tokens_per_hour": 3500,
        "inputs_per_day": 70,
        "requests_in_flight": 4,
    } == remaining(after)


async def test_settling_above_the_reserve_charges_the_difference(ledger: MemoryLedger) -> None:
    reservation = await reserve(ledger, "acme", ALL, Cost(tokens=10, inputs=1))
    after = ledger.settle(reservation, Cost(tokens=600, inputs=2))

    assert (3000, 98) == (remaining(after)["tokens_per_hour"], remaining(after)["inputs_per_day"])


async def test_refund_restores_every_limit(ledger: MemoryLedger, clock: FakeClock) -> None:
    before = await reserve(ledger, "acme", ALL, Cost(requests=0))
    reservation = await reserve(ledger, "acme", ALL, Cost(tokens=600, inputs=30))
    ledger.settle(reservation, NOTHING)
    ledger.settle(before, Cost(requests=0))

    after = await reserve(ledger, "acme", ALL, Cost(requests=0))
    assert before.limit_statuses == after.limit_statuses


async def test_late_refund_keeps_the_usage_of_other_requests(ledger: MemoryLedger, clock: FakeClock) -> None:
    tenant_limits = limits(tokens_per_minute=60)
    first = await reserve(ledger, "acme", tenant_limits, Cost(tokens=60))
    clock.now_us += 30 * SECOND_US
    second = await reserve(ledger, "acme", tenant_limits, Cost(tokens=30))
    ledger.settle(first, NOTHING)

    after = ledger.settle(second, Cost(tokens=30))
    assert {"tokens_per_minute": 30} == remaining(after)


@pytest.mark.parametrize("ways", [("settle", "settle"), ("refund", "settle"), ("settle", "refund")])
async def test_reservation_is_closed_exactly_once(ledger: MemoryLedger, ways: tuple[str, str]) -> None:
    reservation = await reserve(ledger, "acme", ALL, Cost(tokens=600, inputs=30))

    async def close(way: str, tokens: int) -> dict[str, int]:
        if way == "refund":
            ledger.settle(reservation, NOTHING)
        else:
            ledger.settle(reservation, Cost(tokens=tokens, inputs=0))
        probe = await reserve(ledger, "acme", ALL, Cost(requests=0))
        after = ledger.settle(probe, Cost(requests=0))
        return remaining(after)

    once = await close(ways[0], 500)
    assert once == await close(ways[1], 1)


async def test_settling_an_unknown_reservation_changes_nothing(ledger: MemoryLedger) -> None:
    tenant_limits = limits(tokens_per_minute=60)
    await reserve(ledger, "acme", tenant_limits, Cost(tokens=60))
    ledger.settle(
        Reservation(QuotaRequest("nobody", "acme", tenant_limits, Cost(tokens=60), MEMORY_LEASE_US), ()),
        Cost(tokens=0),
    )

    await refusal_of(ledger, tenant_limits, Cost(tokens=1))


@pytest.mark.parametrize(
    ("used", "retry_after_s"),
    [(1, 1), (1000, 1), (1001, 2), (1999, 2), (2000, 2), (59_001, 60), (60_000, 60)],
)
async def test_retry_after_is_the_exact_wait_rounded_up(
    ledger: MemoryLedger, used: int, retry_after_s: int
) -> None:
    tenant_limits = limits(tokens_per_hour=3_600_000)  # One per millisecond.
    await reserve(ledger, "acme", tenant_limits, Cost(tokens=used))
    error = await refusal_of(ledger, tenant_limits, Cost(tokens=3_600_000))

    assert retry_after_s == error.retry_after_s
    assert "x-should-retry" not in error.headers


@pytest.mark.parametrize("used", [60_001, 3_600_000])
async def test_caps_retry_after_at_a_minute_and_forbids_retries(ledger: MemoryLedger, used: int) -> None:
    tenant_limits = limits(tokens_per_hour=3_600_000)
    await reserve(ledger, "acme", tenant_limits, Cost(tokens=used))
    error = await refusal_of(ledger, tenant_limits, Cost(tokens=3_600_000))

    assert 60 == error.retry_after_s
    assert "false" == error.headers["x-should-retry"]
    assert format_duration(used * 1000) == error.headers["x-ratelimit-reset-tokens"]


async def test_waiting_for_retry_after_is_enough(ledger: MemoryLedger, clock: FakeClock) -> None:
    tenant_limits = limits(tokens_per_minute=7)
    await reserve(ledger, "acme", tenant_limits, Cost(tokens=7))
    error = await refusal_of(ledger, tenant_limits, Cost(tokens=3))
    clock.now_us += (error.retry_after_s or 0) * SECOND_US

    await reserve(ledger, "acme", tenant_limits, Cost(tokens=3))


async def test_refusal_names_the_limit_with_the_longest_wait(ledger: MemoryLedger) -> None:
    tenant_limits = limits(requests_per_second=1, tokens_per_day=10, inputs_per_minute=1)
    await reserve(ledger, "acme", tenant_limits, Cost(tokens=10, inputs=1))
    error = await refusal_of(ledger, tenant_limits, Cost(tokens=1, inputs=1))

    assert "tokens_per_day" in error.message
    assert ("tokens", True) == (error.unit, error.calendar)


@pytest.mark.parametrize(
    ("name", "calendar"),
    [
        ("requests_per_second", False),
        ("requests_per_hour", False),
        ("requests_per_day", True),
        ("requests_per_month", True),
        ("requests_in_flight", False),
    ],
)
async def test_only_days_and_months_are_calendar_limits(
    ledger: MemoryLedger, name: str, *, calendar: bool
) -> None:
    tenant_limits = limits(**{name: 1})
    await reserve(ledger, "acme", tenant_limits, Cost())

    assert calendar == (await refusal_of(ledger, tenant_limits, Cost())).calendar


@pytest.mark.parametrize(
    "name", ["tokens_per_second", "tokens_per_hour", "tokens_per_day", "tokens_per_month"]
)
async def test_request_above_a_whole_limit_can_never_pass(ledger: MemoryLedger, name: str) -> None:
    tenant_limits = limits(**{name: 10}, requests_per_minute=1)
    with pytest.raises(RequestExceedsLimit, match=name):
        await reserve(ledger, "acme", tenant_limits, Cost(tokens=11))

    reservation = await reserve(ledger, "acme", tenant_limits, Cost(tokens=10))
    assert {name: 0, "requests_per_minute": 0} == remaining(reservation.limit_statuses)


async def test_unreachable_limit_is_reported_before_waiting_ones(ledger: MemoryLedger) -> None:
    tenant_limits = limits(requests_per_minute=1, tokens_per_minute=10)
    await reserve(ledger, "acme", tenant_limits, Cost(tokens=10))

    with pytest.raises(RequestExceedsLimit):
        await reserve(ledger, "acme", tenant_limits, Cost(tokens=11))


async def test_unsettled_request_frees_its_slot_when_the_lease_expires(
    ledger: MemoryLedger, clock: FakeClock
) -> None:
    tenant_limits = limits(requests_in_flight=1)
    await reserve(ledger, "acme", tenant_limits, Cost())
    clock.now_us += MEMORY_LEASE_US - 1
    await refusal_of(ledger, tenant_limits, Cost())
    clock.now_us += 1

    await reserve(ledger, "acme", tenant_limits, Cost())


@pytest.mark.parametrize("name", ["requests_per_minute", "requests_per_day", "requests_per_month"])
async def test_backward_clock_step_admits_no_more(ledger: MemoryLedger, clock: FakeClock, name: str) -> None:
    tenant_limits = limits(**{name: 1})
    await reserve(ledger, "acme", tenant_limits, Cost())
    clock.now_us -= 40 * 24 * 3600 * SECOND_US
    await refusal_of(ledger, tenant_limits, Cost())
    clock.now_us = NOON_US
    await refusal_of(ledger, tenant_limits, Cost())


async def test_backward_clock_step_extends_no_lease(ledger: MemoryLedger, clock: FakeClock) -> None:
    tenant_limits = limits(requests_in_flight=1)
    await reserve(ledger, "acme", tenant_limits, Cost())
    clock.now_us -= SECOND_US
    error = await refusal_of(ledger, tenant_limits, Cost())
    clock.now_us += SECOND_US + MEMORY_LEASE_US

    await reserve(ledger, "acme", tenant_limits, Cost())
    # The end of another request is unknown: the header does not promise the end of its lease.
    assert "1s" == error.headers["x-ratelimit-reset-requests"]


@given(
    st.lists(
        st.tuples(st.integers(-90 * SECOND_US, 90 * SECOND_US), st.integers(1, 60)), min_size=1, max_size=20
    )
)
@settings(max_examples=100, deadline=None)
async def test_admits_no_more_than_the_latest_time_allows(plan: list[tuple[int, int]]) -> None:
    clock, tenant_limits = FakeClock(), limits(tokens_per_minute=60)
    ledger = MemoryLedger(clock)
    first_us = latest_us = NOON_US + plan[0][0]
    admitted = 0
    for change_us, tokens in plan:
        clock.now_us += change_us
        latest_us = max(latest_us, clock.now_us)
        try:
            await reserve(ledger, "acme", tenant_limits, Cost(tokens=tokens))
        except QuotaExceeded:
            continue
        admitted += tokens
        assert admitted <= 60 + (latest_us - first_us) / SECOND_US


def status(name: str, amount: int, left: int, reset_us: int = 0) -> LimitStatus:
    return LimitStatus(parse_limit(name, amount), left, reset_us)


@pytest.mark.parametrize("order", [1, -1])
def test_headers_show_the_tightest_limit_of_each_unit(order: int) -> None:
    limit_statuses = [
        status("tokens_per_minute", 100, 50, 30 * SECOND_US),
        status("tokens_per_day", 1000, 60, 3600 * SECOND_US),
        status("requests_per_minute", 10, 9, SECOND_US),
        status("requests_in_flight", 2, 1, 0),
    ]
    expected: Mapping[str, str] = {
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "60",
        "x-ratelimit-reset-tokens": "1h0m0s",
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "0ms",
    }
    assert expected == rate_limit_headers(limit_statuses[::order])


@pytest.mark.parametrize(
    ("limit", "own"),
    [("requests_per_minute", "requests"), ("tokens_per_day", "tokens"), ("inputs_per_day", "")],
)
def test_one_limit_shows_requests_and_tokens(limit: str, own: str) -> None:
    headers = rate_limit_headers([status(limit, 10, 9, SECOND_US)])

    for unit in ("requests", "tokens"):
        shown = tuple(headers[f"x-ratelimit-{field}-{unit}"] for field in ("limit", "remaining", "reset"))
        assert (("10", "9", "1s") if unit == own else ("1000000000", "1000000000", "0ms")) == shown


def test_without_limits_there_are_no_headers() -> None:
    assert {} == rate_limit_headers([])


def test_without_limits_headers_show_unlimited_amounts_if_asked() -> None:
    shown = ("1000000000", "1000000000", "0ms")
    expected = {
        f"x-ratelimit-{field}-{unit}": value
        for unit in ("requests", "tokens")
        for field, value in zip(("limit", "remaining", "reset"), shown, strict=True)
    }
    assert expected == rate_limit_headers([], show_unlimited=True)


async def test_refusal_headers_show_remaining_and_reset(ledger: MemoryLedger) -> None:
    tenant_limits = limits(tokens_per_minute=60)
    await reserve(ledger, "acme", tenant_limits, Cost(tokens=45))
    error = await refusal_of(ledger, tenant_limits, Cost(tokens=30))

    assert {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "15",
        "x-ratelimit-reset-tokens": "45s",
    }.items() <= error.headers.items()
    assert 15 == error.retry_after_s


@pytest.mark.parametrize(
    ("limit", "used", "cost", "is_bound", "expected", "back"),
    [
        (
            "tokens_per_month",
            34,
            22,
            True,
            "6 are left, and this call may cost up to 22 tokens, by its length",
            True,
        ),
        ("tokens_per_minute", 39, 40, False, "1 is left, and this call costs 40 tokens", False),
        ("requests_per_day", 40, 1, True, "nothing is left, and this call costs 1 request", True),
    ],
)
async def test_refusal_message_names_remaining_cost_and_wait(
    ledger: MemoryLedger, limit: str, used: int, cost: int, is_bound: bool, expected: str, back: bool
) -> None:
    tenant_limits = limits(**{limit: 40})
    await reserve(ledger, "acme", tenant_limits, Cost(requests=used, tokens=used))
    request = QuotaRequest(
        "it", "acme", tenant_limits, Cost(requests=cost, tokens=cost), 3600 * SECOND_US, is_bound=is_bound
    )
    with pytest.raises(QuotaExceeded) as caught:
        await ledger.reserve(request)

    when = "it starts again on 2024-03-01 (UTC), try again in 12h0m0s" if back else "try again in 59s"
    assert f"limit {limit} (40): {expected}; {when}" == caught.value.message


@pytest.mark.parametrize(
    ("microseconds", "shown"),
    [
        (0, "0ms"),
        (1, "1ms"),
        (20_000, "20ms"),
        (998_001, "999ms"),
        (999_001, "1s"),
        (1_250_000, "1.25s"),
        (59_999_000, "59.999s"),
        (59_999_001, "1m0s"),
        (360_000_000, "6m0s"),
        (361_500_000, "6m1.5s"),
        (3600_000_000, "1h0m0s"),
        (3723_000_000, "1h2m3s"),
        (31 * 24 * 3600 * SECOND_US, "744h0m0s"),
    ],
)
def test_formats_durations_as_openai_does(microseconds: int, shown: str) -> None:
    assert shown == format_duration(microseconds)


SHOWN = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?(?:(\d+)ms)?")


@given(st.integers(0, 32 * 24 * 3600 * SECOND_US))
@settings(max_examples=200, deadline=None)
def test_duration_is_rounded_up_to_the_millisecond(microseconds: int) -> None:
    found = SHOWN.fullmatch(format_duration(microseconds))
    assert found is not None
    hours, minutes, seconds, milliseconds = (float(part or 0) for part in found.groups())
    total_ms = round((hours * 3600 + minutes * 60 + seconds) * 1000 + milliseconds)

    assert -(-microseconds // 1000) == total_ms
