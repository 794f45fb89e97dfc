"""Prices and budgets in the file: problems by path, and changes that a reload applies."""

import re

import pytest

from gateway.config.diff import compare_configs, with_live_settings
from gateway.declared.additions import Additions
from gateway.declared.composition import compose
from gateway.tenants.keyring import key_digest
from tests.config_texts import parsed, problems_of

FILE = f"""
currency: EUR
upstreams: {{one: {{backend: tei, replicas: ["http://a"]}}}}
models: {{bge: {{upstream: one, price_per_million_tokens: 0.02, limits: {{budget_per_day: 5}}}}}}
tenants:
  acme:
    keys: [{{digest: "{key_digest("a")}", limits: {{budget_per_day: 0.5}}}}]
    limits: {{budget_per_month: 250.75}}
    model_limits: {{bge: {{budget_per_month: 1}}}}
sign_on:
  staff:
    issuer: https://login.example.org
    audience: [a]
    claims: {{tenant: {{claim: org}}, limits: {{claim: plan, values: {{small: {{budget_per_day: 2}}}}}}}}
"""


def messages_of(text: str) -> dict[str, str]:
    return {problem.path: problem.message for problem in problems_of(text)}


def test_prices_and_budgets_need_a_currency() -> None:
    found = messages_of(FILE.replace("currency: EUR\n", ""))

    assert {
        "models.bge.price_per_million_tokens",
        "models.bge.limits.budget_per_day",
        "tenants.acme.limits.budget_per_month",
        "tenants.acme.model_limits.bge.budget_per_month",
        "tenants.acme.keys[0].limits.budget_per_day",
        "sign_on.staff.claims.limits.values.small.budget_per_day",
    } == set(found)
    assert all(message.startswith("needs `currency`, the name of the money") for message in found.values())


@pytest.mark.parametrize(
    ("old", "new", "path", "problem"),
    [
        ("0.02", "0.0125", "models.bge.price_per_million_tokens", "expected at most three decimal places"),
        ("0.02", "-1", "models.bge.price_per_million_tokens", "expected a number, at least 0"),
        ("0.02", ".nan", "models.bge.price_per_million_tokens", "expected"),
        ("0.02", ".inf", "models.bge.price_per_million_tokens", "expected a number, at most 10000"),
        ("0.02", "10001", "models.bge.price_per_million_tokens", "expected a number, at most 10000"),
        ("250.75", "4000001", "tenants.acme.limits.budget_per_month", "above 0, at most 4000000"),
        ("250.75", "1e-10", "tenants.acme.limits.budget_per_month", "at most nine decimal places"),
        ("250.75", "much", "tenants.acme.limits.budget_per_month", "expected a number, not text"),
        ("budget_per_month: 250.75", "budget_per_hour: 1", "tenants.acme.limits.budget_per_hour", "unknown"),
        ("currency: EUR", 'currency: ""', "currency", "of length at least 1"),
    ],
)
def test_a_wrong_amount_is_a_problem_at_its_path(old: str, new: str, path: str, problem: str) -> None:
    assert problem in messages_of(FILE.replace(old, new))[path]


def test_an_added_model_with_a_price_needs_a_currency() -> None:
    file = parsed(
        re.sub(r"currency.*|, price_per[^,]*|, limits[^\n]*", "", FILE).partition("tenants")[0] + "}}"
    )
    added = Additions(models={"new": {"upstream": "one", "price_per_million_tokens": 1}})
    composed = compose(file, added, {}, {})
    with_currency = compose(parsed(FILE), added, {}, {})

    [problem] = composed.rejected["models", "new"]
    assert "needs `currency`" in problem.message
    assert 1 == with_currency.config.models["new"].price_per_million_tokens


def test_a_reload_applies_prices_budgets_and_currency() -> None:
    old, new = (
        parsed(FILE),
        parsed(FILE.replace("0.02", "0.03").replace("250.75", "99").replace("EUR", "USD")),
    )
    outcome = compare_configs(old, new)

    assert () == outcome.needs_restart
    assert {
        "currency changed",
        "models.bge.price_per_million_tokens changed (0.02 → 0.03)",
        "tenants.acme.limits.budget_per_month changed (250.75 → 99)",
    } == {str(change) for change in outcome.changes}
    assert new == with_live_settings(old, new)
