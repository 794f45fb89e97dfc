"""Amounts of money: exact through floats and JSON, with bounds and clear problems."""

from decimal import Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.money import BUDGET_MAX, NANO, PRICE_MAX, budget_of, in_currency, money_text, token_price
from gateway.config.schema import LimitAmount, limit_problems
from gateway.quotas.limits import AMOUNT_MAX, FREE, Cost, Limit, Price, parse_limit

nano_units = st.integers(1, BUDGET_MAX * NANO)


@given(nano_units)
def test_every_amount_survives_the_file_and_json(units: int) -> None:
    written = f"{Decimal(units) / NANO:f}"
    read = msgspec.yaml.decode(written, type=LimitAmount)
    stored = msgspec.json.decode(msgspec.json.encode(read), type=LimitAmount)

    assert units == budget_of(read) == budget_of(stored) == budget_of(in_currency(units))
    assert units == parse_limit("budget_per_month", read).amount
    assert Decimal(units) / NANO == Decimal(money_text(units, "EUR").removesuffix(" EUR"))


@given(st.integers(0, PRICE_MAX * 1000))
def test_every_price_survives_the_file(nano_per_token: int) -> None:
    written = f"{Decimal(nano_per_token) / 1000:f}"

    assert nano_per_token == token_price(msgspec.yaml.decode(written, type=float))


@pytest.mark.parametrize(
    ("amount", "problem"),
    [
        (0.0000000001, "at most nine decimal places"),
        (0.1 + 0.2, "at most nine decimal places"),
        (4_000_000.5, "above 0, at most 4000000"),
        (0, "above 0"),
        (float("nan"), "above 0"),
    ],
)
def test_refuses_a_budget_that_it_could_not_count(amount: float, problem: str) -> None:
    assert problem in limit_problems({"budget_per_day": amount})["budget_per_day"]


@pytest.mark.parametrize(
    ("price", "problem"),
    [(0.0001, "three decimal places"), (-1.0, "from 0"), (10_001.0, "10000"), (float("nan"), "from 0")],
)
def test_refuses_a_price_that_it_could_not_count(price: float, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        token_price(price)


@pytest.mark.parametrize("name", ["budget_per_hour", "budget_in_flight", "money_per_month"])
def test_knows_budgets_of_days_and_months_only(name: str) -> None:
    assert "budget_per_<day|month>" in limit_problems({name: 5})[name]


@pytest.mark.parametrize("amount", [1.5, float("nan"), float("inf")])
def test_other_limits_are_whole_numbers(amount: float) -> None:
    assert {"tokens_per_day": "expected a whole number"} == limit_problems({"tokens_per_day": amount})


def test_a_whole_number_may_be_written_as_a_decimal() -> None:
    assert 1000 == parse_limit("tokens_per_day", msgspec.json.decode(b"1e3", type=LimitAmount)).amount


@given(st.integers(0, 10**9), st.integers(0, PRICE_MAX * 1000))
def test_tokens_that_an_amount_pays_for_cost_no_more_than_it(budget: int, nano_per_token: int) -> None:
    price, limit = Price(nano_per_token, "EUR"), Limit("budget", "month", max(1, budget))
    tokens = price.tokens_within([(limit, budget)])

    if not nano_per_token:
        assert tokens is None
    else:
        assert tokens is not None
        assert price.cost(tokens).budget <= budget < price.cost(tokens + 1).budget


def test_the_scarcest_limit_decides_how_many_tokens_fit() -> None:
    budget, tokens = Limit("budget", "month", 100), Limit("tokens", "day", 100)

    assert 14 == Price(7).tokens_within([(budget, 100), (tokens, 40)])
    assert 9 == Price(7).tokens_within([(budget, 100), (tokens, 9)])
    assert 40 == FREE.tokens_within([(budget, 0), (tokens, 40)])
    assert FREE.tokens_within([(budget, 0), (Limit("inputs", "day", 1), 1)]) is None


def test_a_cost_beyond_what_a_ledger_counts_is_the_highest_that_it_does() -> None:
    assert AMOUNT_MAX == Price(PRICE_MAX * 1000).cost(10**12).budget
    assert Cost(1, 10, 2, 3, 70, "EUR") == Price(7, "EUR").cost(10, 2, 3)
