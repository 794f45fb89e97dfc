"""Limits are exact to the microsecond: meters compared with references that replay the whole history."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import cache
from math import ceil
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.quotas.limits import (
    SECOND_US,
    UNITS,
    WINDOWS_US,
    CalendarMeter,
    Cost,
    FlightMeter,
    Limit,
    Meter,
    Period,
    RateMeter,
    meter_for,
    parse_limit,
    period_end_us,
    period_start_us,
)

LEASE_US = 3600 * SECOND_US
START_US = int(datetime(2024, 2, 28, 23, 59, 50, tzinfo=UTC).timestamp()) * SECOND_US
DAY_US = 24 * 3600 * SECOND_US

many = settings(max_examples=200, deadline=None)


def at(text: str) -> int:
    """Return a UTC moment in microseconds."""
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * SECOND_US


@dataclass
class Entry:
    """One reservation as the reference records it. cost: reserved, or actual once settled."""

    number: int
    at_us: int
    reserved: int
    cost: int
    open: bool = True


@dataclass
class History:
    """Driver of a meter as in a ledger: takes only what fits, closes each reservation once."""

    meter: Meter
    now_us: int = START_US
    reservations: list[Entry] = field(default_factory=list)

    def play(self, step: "Step") -> None:
        """Apply one random step."""
        if step.pause_us is None:
            self.now_us += self.meter.wait_us(step.amount, self.now_us)
        else:
            self.now_us += step.pause_us
        if step.close is None:
            self.take(step.amount)
            return
        waiting = [entry for entry in self.reservations if entry.open]
        if waiting:
            chosen = waiting[step.close % len(waiting)]
            self.close(chosen, chosen.reserved * step.percent // 100)

    def take(self, amount: int) -> None:
        """Reserve if it fits now."""
        if self.meter.wait_us(amount, self.now_us) == 0:
            number = len(self.reservations) + 1
            self.meter.take(number, amount, self.now_us)
            self.reservations.append(Entry(number, self.now_us, amount, amount))

    def close(self, chosen: Entry, actual: int) -> None:
        """Settle a reservation."""
        self.meter.give_back(chosen.number, chosen.reserved, actual)
        chosen.cost, chosen.open = actual, False


@dataclass
class Step:
    """Wait, then take an amount, or close an open reservation at a percentage of its reserve.

    pause_us: None waits exactly until the amount fits.
    """

    pause_us: int | None
    amount: int
    close: int | None
    percent: int


RATES = st.builds(
    Limit,
    st.just("tokens"),
    st.sampled_from(["second", "minute", "hour"]),
    st.sampled_from([1, 3, 7, 10, 60, 1000, 999_983, 10**9]),
)


# Actual cost of a request, in percent of its reserve.
DOWN = (0, 1, 37, 100)
BOTH_WAYS = (0, 50, 400, 1000)


# Hypothesis validates each new strategy, which takes longer than drawing from it.
@cache
def steps(limit: Limit, percents: Sequence[int] = DOWN) -> st.SearchStrategy[list[Step]]:
    """Return histories whose pauses and amounts match the size of the window."""
    window_us = WINDOWS_US.get(limit.period, DAY_US)
    pauses = st.one_of(st.none(), st.just(0), st.integers(1, window_us // 8), st.integers(1, 2 * window_us))
    amounts = st.one_of(st.integers(0, limit.amount), st.integers(1, -(-limit.amount // 4)))
    closes = st.one_of(st.none(), st.integers(0, 5))
    return st.lists(
        st.builds(Step, pauses, amounts, closes, st.sampled_from(percents)), min_size=6, max_size=24
    )


@st.composite
def rate_histories(draw: st.DrawFn, percents: Sequence[int] = DOWN) -> tuple[Limit, list[Step]]:
    limit = draw(RATES)
    return limit, draw(steps(limit, percents))


def true_wait_us(limit: Limit, reservations: Sequence[Entry], amount: int, now_us: int) -> Fraction:
    """Compute GCRA in exact fractions from the whole history, each reservation at its true cost."""
    per_unit = Fraction(WINDOWS_US[limit.period], limit.amount)
    full_at = Fraction(0)
    for entry in reservations:
        full_at = max(full_at, Fraction(entry.at_us)) + entry.cost * per_unit
    wait = max(full_at, Fraction(now_us)) + amount * per_unit - now_us - WINDOWS_US[limit.period]
    return max(Fraction(0), wait)


@many
@given(rate_histories())
def test_no_span_admits_more_than_amount_and_refill(case: tuple[Limit, list[Step]]) -> None:
    limit, plan = case
    history = History(RateMeter(limit))
    window_us = WINDOWS_US[limit.period]
    for step in plan:
        history.play(step)
        for first, start in enumerate(history.reservations):
            admitted = 0
            for end in history.reservations[first:]:
                admitted += end.cost
                flows_in = Fraction(limit.amount * (end.at_us - start.at_us), window_us)
                assert limit.amount + flows_in >= admitted


@many
@given(rate_histories(BOTH_WAYS), st.integers(0, 10**9))
def test_wait_is_exact_to_the_microsecond(case: tuple[Limit, list[Step]], amount: int) -> None:
    limit, plan = case
    amount %= limit.amount + 1
    history = History(RateMeter(limit))
    for step in plan:
        history.play(step)
        truth = true_wait_us(limit, history.reservations, amount, history.now_us)
        assert ceil(truth) == history.meter.wait_us(amount, history.now_us)


@many
@given(rate_histories(), st.integers(0, 10**9))
def test_fits_after_the_wait_and_not_a_microsecond_earlier(
    case: tuple[Limit, list[Step]], amount: int
) -> None:
    limit, plan = case
    amount %= limit.amount + 1
    history = History(RateMeter(limit))
    for step in plan:
        history.play(step)
        wait_us = history.meter.wait_us(amount, history.now_us)
        assert history.meter.wait_us(amount, history.now_us + wait_us) == 0
        assert wait_us == 0 or history.meter.wait_us(amount, history.now_us + wait_us - 1) == 1


def replayed(limit: Limit, reservations: Sequence[Entry]) -> RateMeter:
    """Return a meter that was charged every true cost from the start and never corrected."""
    meter = RateMeter(limit)
    for entry in reservations:
        meter.take(entry.number, entry.cost, entry.at_us)
    return meter


@many
@given(rate_histories())
def test_correction_equals_charging_the_true_cost(
    case: tuple[Limit, list[Step]],
) -> None:
    limit, plan = case
    history = History(RateMeter(limit))
    for step in plan:
        history.play(step)
        expected = replayed(limit, history.reservations)
        assert expected.status(history.now_us) == history.meter.status(history.now_us)
        assert expected.wait_us(limit.amount, 0) == history.meter.wait_us(limit.amount, 0)


@many
@given(rate_histories(BOTH_WAYS))
def test_upward_correction_is_exact(case: tuple[Limit, list[Step]]) -> None:
    limit, plan = case
    history = History(RateMeter(limit))
    for step in plan:
        history.play(step)
        expected = replayed(limit, history.reservations)
        assert expected.status(history.now_us) == history.meter.status(history.now_us)


def test_overrun_is_charged_despite_later_reservations() -> None:
    meter = RateMeter(Limit("tokens", "minute", 100))
    meter.take(1, 10, START_US)
    later_us = START_US + 6 * SECOND_US
    meter.take(2, 10, later_us)
    meter.give_back(1, 10, 60)

    # Of the 60 charged at the start, 10 had been refilled when the second reserve came.
    assert 100 - (60 - 10) - 10 == meter.status(later_us).remaining


def test_time_with_a_full_bucket_does_not_come_back() -> None:
    meter = RateMeter(Limit("tokens", "minute", 100))
    meter.take(1, 50, START_US)
    later_us = START_US + 60 * SECOND_US
    meter.take(2, 100, later_us)
    meter.give_back(1, 50, 0)

    assert 0 == meter.status(later_us).remaining
    assert 60 * SECOND_US == meter.wait_us(100, later_us)


@many
@given(rate_histories(BOTH_WAYS))
def test_candidates_are_bounded_by_open_reservations(case: tuple[Limit, list[Step]]) -> None:
    limit, plan = case
    meter = RateMeter(limit)
    history = History(meter)
    for step in plan:
        history.play(step)
        assert len(meter._firsts) <= sum(entry.open for entry in history.reservations) + 1
        assert sorted(meter._firsts) == meter._firsts


class Unpruned:
    """Candidates of a rate without pruning: one for every reservation."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.candidates: list[tuple[int, int]] = []

    def take(self, number: int, amount: int, now_us: int) -> None:
        """Add a candidate, and move all of them forward."""
        self.candidates.append((number, now_us * self.limit.amount))
        self._move(number, amount)

    def give_back(self, number: int, reserved: int, actual: int) -> None:
        """Move the candidates from before it by its unused cost."""
        self._move(number, actual - reserved)

    def wait_us(self, amount: int, now_us: int) -> int:
        """Return the time until this amount fits, as RateMeter does."""
        latest = max(tat for _, tat in self.candidates)
        debt = max(0, latest - now_us * self.limit.amount)
        window_us = WINDOWS_US[self.limit.period]
        return max(0, ceil(Fraction(debt + (amount - self.limit.amount) * window_us, self.limit.amount)))

    def _move(self, number: int, amount: int) -> None:
        change = amount * WINDOWS_US[self.limit.period]
        self.candidates = [(first, tat + change * (first <= number)) for first, tat in self.candidates]


@st.composite
def crowds(draw: st.DrawFn) -> tuple[Limit, list[tuple[int, int, int]]]:
    """Return many reservations in short succession, and for some of them an actual cost, in percent."""
    limit = draw(RATES)
    pauses = st.integers(0, WINDOWS_US[limit.period] // 16)
    reservation = st.tuples(pauses, st.integers(0, -(-limit.amount // 8)), st.sampled_from((-1, *BOTH_WAYS)))
    return limit, draw(st.lists(reservation, min_size=2, max_size=24))


@many
@given(crowds(), st.randoms(use_true_random=False))
def test_pruned_candidates_never_change_the_result(
    case: tuple[Limit, list[tuple[int, int, int]]], order: Random
) -> None:
    limit, plan = case
    pruned, unpruned, now_us = RateMeter(limit), Unpruned(limit), START_US
    for number, (pause_us, amount, _) in enumerate(plan):
        now_us += pause_us
        pruned.take(number, amount, now_us)
        unpruned.take(number, amount, now_us)
    closings = [(n, amount, percent) for n, (_, amount, percent) in enumerate(plan) if percent >= 0]
    order.shuffle(closings)
    for number, amount, percent in closings:
        pruned.give_back(number, amount, amount * percent // 100)
        unpruned.give_back(number, amount, amount * percent // 100)
        assert unpruned.wait_us(limit.amount, START_US) == pruned.wait_us(limit.amount, START_US)


def test_many_open_reservations_leave_one_candidate() -> None:
    meter = RateMeter(Limit("tokens", "hour", 1_000_000))
    meter.take(0, 900_000, START_US)
    meter.give_back(0, 900_000, 900_000)
    for number in range(1, 500):
        meter.take(number, 100, START_US + number)

    assert 1 == len(meter._firsts)


def test_many_settled_reservations_leave_one_candidate() -> None:
    meter = RateMeter(Limit("requests", "second", 1000))
    for number in range(1, 1001):
        meter.take(number, 1, START_US + number)
        meter.give_back(number, 1, number % 2)

    assert 1 == len(meter._firsts) == len(meter._tats)
    assert [] == meter._open == meter._reserved


@many
@given(rate_histories())
def test_remaining_amount_is_exactly_what_fits(case: tuple[Limit, list[Step]]) -> None:
    limit, plan = case
    history = History(RateMeter(limit))
    for step in plan:
        history.play(step)
        status = history.meter.status(history.now_us)
        assert history.meter.wait_us(status.remaining, history.now_us) == 0
        assert history.meter.wait_us(status.remaining + 1, history.now_us) > 0
        assert limit.amount == history.meter.status(history.now_us + status.reset_us).remaining


@pytest.mark.parametrize("amount", [1, 3, 7, 60, 600, 999])
@pytest.mark.parametrize("period", ["second", "minute", "hour"])
def test_new_limit_admits_exactly_its_amount_at_once(period: Period, amount: int) -> None:
    history = History(RateMeter(Limit("requests", period, amount)))
    for _ in range(amount + 1):
        history.take(1)

    assert amount == len(history.reservations)
    assert 0 == history.meter.status(START_US).remaining


def test_bucket_refills_evenly() -> None:
    meter = RateMeter(Limit("tokens", "minute", 60))
    meter.take(1, 60, START_US)

    assert [0, 1, 30, 60, 60] == [
        meter.status(START_US + s * SECOND_US).remaining for s in (0, 1, 30, 60, 90)
    ]
    assert 60 * SECOND_US == meter.status(START_US).reset_us


@pytest.mark.parametrize(
    ("period", "moment", "start", "end"),
    [
        ("day", "2024-02-28T23:59:59", "2024-02-28", "2024-02-29"),
        ("day", "2024-02-29T00:00:00", "2024-02-29", "2024-03-01"),
        ("day", "2023-12-31T12:00:00", "2023-12-31", "2024-01-01"),
        ("month", "2024-02-29T23:59:59", "2024-02-01", "2024-03-01"),
        ("month", "2023-02-01T00:00:00", "2023-02-01", "2023-03-01"),
        ("month", "2023-12-31T23:59:59", "2023-12-01", "2024-01-01"),
        ("month", "2000-02-29T00:00:00", "2000-02-01", "2000-03-01"),
    ],
)
def test_period_is_a_utc_day_or_month(period: Period, moment: str, start: str, end: str) -> None:
    assert at(start) == period_start_us(period, at(moment))
    assert at(end) == period_end_us(period, at(moment))


MOMENTS = st.integers(0, at("2200-01-01"))
CALENDAR = st.sampled_from(["day", "month"])


@many
@given(CALENDAR, MOMENTS)
def test_periods_partition_time(period: Period, now_us: int) -> None:
    start_us, end_us = period_start_us(period, now_us), period_end_us(period, now_us)

    assert start_us <= now_us < end_us
    assert start_us == period_start_us(period, start_us) == period_start_us(period, end_us - 1)
    assert end_us == period_start_us(period, end_us)
    assert end_us - start_us <= (DAY_US if period == "day" else 31 * DAY_US)


@pytest.mark.parametrize(("period", "edge"), [("day", "2024-02-29"), ("month", "2024-03-01")])
def test_calendar_limit_resets_exactly_at_the_boundary(period: Period, edge: str) -> None:
    meter = CalendarMeter(Limit("tokens", period, 10))
    meter.take(1, 10, at(edge) - SECOND_US)

    assert 1 == meter.wait_us(10, at(edge) - 1)
    assert 0 == meter.wait_us(10, at(edge))
    assert 10 == meter.status(at(edge)).remaining


def test_calendar_wait_is_the_time_to_the_next_period() -> None:
    meter = CalendarMeter(Limit("tokens", "month", 10))
    now_us = at("2024-02-10T12:00:00")
    meter.take(1, 8, now_us)

    assert 0 == meter.wait_us(2, now_us)
    assert at("2024-03-01") - now_us == meter.wait_us(3, now_us)
    assert at("2024-03-01") - now_us == meter.status(now_us).reset_us


def test_settling_yesterdays_reservation_does_not_change_today() -> None:
    meter = CalendarMeter(Limit("tokens", "day", 10))
    meter.take(1, 10, at("2024-02-28T23:59:59"))
    meter.take(2, 6, at("2024-02-29"))
    meter.give_back(1, 10, 0)
    assert 4 == meter.status(at("2024-02-29")).remaining
    meter.give_back(2, 6, 1)
    assert 9 == meter.status(at("2024-02-29")).remaining


@st.composite
def calendar_histories(draw: st.DrawFn) -> tuple[Limit, list[Step]]:
    limit = Limit("tokens", draw(CALENDAR), draw(st.sampled_from([1, 10, 1000])))
    return limit, draw(steps(limit))


@many
@given(calendar_histories())
def test_no_calendar_period_admits_more_than_the_amount(case: tuple[Limit, list[Step]]) -> None:
    limit, plan = case
    history = History(CalendarMeter(limit))
    for step in plan:
        history.play(step)
        today_us = period_start_us(limit.period, history.now_us)
        admitted = sum(
            entry.cost
            for entry in history.reservations
            if today_us == period_start_us(limit.period, entry.at_us)
        )
        assert admitted <= limit.amount
        assert limit.amount - admitted == history.meter.status(history.now_us).remaining


def test_admits_no_more_requests_in_flight_than_the_limit() -> None:
    meter = FlightMeter(Limit("requests", "in_flight", 2), LEASE_US)
    meter.take(1, 1, START_US)
    assert 0 == meter.wait_us(1, START_US)
    meter.take(2, 1, START_US)
    assert SECOND_US == meter.wait_us(1, START_US)
    assert 0 == meter.status(START_US).remaining


@pytest.mark.parametrize("actual", [0, 1])
def test_finished_request_frees_its_slot(actual: int) -> None:
    meter = FlightMeter(Limit("requests", "in_flight", 1), LEASE_US)
    meter.take(1, 1, START_US)
    meter.give_back(1, 1, actual)

    assert 0 == meter.wait_us(1, START_US)
    assert 1 == meter.status(START_US).remaining


def test_lease_expires_exactly_on_time() -> None:
    meter = FlightMeter(Limit("requests", "in_flight", 1), LEASE_US)
    meter.take(1, 1, START_US)

    assert LEASE_US == meter.status(START_US).reset_us
    assert SECOND_US == meter.wait_us(1, START_US + LEASE_US - 1)
    assert 0 == meter.wait_us(1, START_US + LEASE_US)


def test_ending_an_expired_lease_frees_no_other_slot() -> None:
    meter = FlightMeter(Limit("requests", "in_flight", 1), LEASE_US)
    meter.take(1, 1, START_US)
    later_us = START_US + LEASE_US
    assert 0 == meter.wait_us(1, later_us)
    meter.take(2, 1, later_us)
    meter.give_back(1, 1, 1)

    assert SECOND_US == meter.wait_us(1, later_us)


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit != "budget"])
@pytest.mark.parametrize("period", ["second", "minute", "hour", "day", "month"])
def test_limit_name_round_trips(unit: str, period: str) -> None:
    limit = parse_limit(f"{unit}_per_{period}", 5)

    assert (unit, period, 5) == (limit.unit, limit.period, limit.amount)
    assert f"{unit}_per_{period}" == limit.name


def test_parses_requests_in_flight() -> None:
    assert Limit("requests", "in_flight", 5) == parse_limit("requests_in_flight", 5)
    assert "requests_in_flight" == parse_limit("requests_in_flight", 5).name


@pytest.mark.parametrize("name", ["requests", "bytes_per_second", "tokens_per_year", "tokens_in_flight"])
def test_rejects_unknown_limit_names(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        parse_limit(name, 5)


@pytest.mark.parametrize(
    ("period", "kind"),
    [
        ("second", RateMeter),
        ("minute", RateMeter),
        ("hour", RateMeter),
        ("day", CalendarMeter),
        ("month", CalendarMeter),
        ("in_flight", FlightMeter),
    ],
)
def test_each_period_has_its_meter(period: Period, kind: type[Meter]) -> None:
    assert isinstance(meter_for(Limit("requests", period, 1), LEASE_US), kind)


def test_cost_has_an_amount_per_unit() -> None:
    cost = Cost(requests=1, tokens=20, inputs=3)

    assert [1, 20, 3] == [cost.of("requests"), cost.of("tokens"), cost.of("inputs")]


def test_days_begin_at_midnight_utc_in_any_time_zone() -> None:
    ahead = datetime(2024, 3, 1, 1, 0, tzinfo=UTC) - timedelta(hours=2)
    assert at("2024-02-29") == period_start_us("day", int(ahead.timestamp()) * SECOND_US)
