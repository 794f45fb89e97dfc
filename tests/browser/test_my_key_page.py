"""The page of a key: what its holder may do, has used, and has met; and nothing of others."""

import csv
import io
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.browser.conftest import ObservedPage
from tests.browser.console_stand import (
    FROM_THE_RIGHT,
    LONG,
    MARKUP,
    OPERATOR,
    READER,
    WORDS,
    ConsoleStand,
    violations,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleStand]:
    with ExitStack() as resources:
        yield ConsoleStand(tmp_path_factory.mktemp("my-key"), resources)


@pytest.fixture(scope="module")
def holder(stand: ConsoleStand) -> str:
    """Return the key of a tenant that has called, and whose calls have failed in two ways."""
    key = stand.make_tenant("holder", tokens_per_day=100_000, requests_per_day=5, budget_per_month=2.5)
    assert [200, 200, 502] == [stand.call(key, model).status_code for model in ("bge", "bge", "broken")]
    while stand.call(key).status_code != 429:
        pass
    stand.call(stand.make_tenant("neighbor"))
    return key


@pytest.fixture
def own(browser: Any, stand: ConsoleStand, holder: str) -> Iterator[ObservedPage]:
    observed = stand.opened(browser, "usage", holder)
    yield observed
    observed.context.close()


def test_a_holder_finds_the_key_the_usage_and_the_error(own: ObservedPage) -> None:
    page = own.page
    page.wait_for_selector("#own-key:has-text('holder')")
    key, limits = page.inner_text("#own-key"), page.inner_text("#own-limits")
    page.wait_for_selector("#own-calls tbody tr:has-text('quota exceeded')")
    page.wait_for_selector("#own-calls tbody tr:has-text('ask the operator for a higher limit')")
    failed = page.locator("#own-calls tbody tr:has-text('upstream failed')").first
    failed.locator(".badge").click()
    panel = page.locator("#own-call")
    panel.get_by_text("A replica failed, and no other could take over.").wait_for()
    said = panel.inner_text()
    page.keyboard.press("Escape")
    page.wait_for_selector("#own-usage tbody tr:has-text('bge')")
    with page.expect_download() as download:
        page.locator("#own-usage").get_by_role("button", name="Save as CSV").click()
    saved = list(csv.DictReader(io.StringIO(download.value.path().read_text())))

    assert all(scope in key for scope in ("embed", "rerank", "all models", "never"))
    assert "5 requests per day" in limits
    assert "2.5 EUR per month" in limits
    assert page.locator("#own-limits [role=meter].tone-bad").count() == 1
    assert "Try again" in said
    # The upstream is none of the caller's business.
    assert WORDS not in page.content()
    (bge,) = [row for row in saved if row["Model"] == "bge"]
    assert int(bge["Calls"]) >= 2
    assert float(bge["Cost (EUR)"]) > 0
    assert [] == own.complaints


def test_a_holder_sees_nothing_of_others(own: ObservedPage, stand: ConsoleStand) -> None:
    page = own.page
    page.wait_for_selector("#own-calls tbody tr")
    page.get_by_role("tab", name="All calls").click()
    page.wait_for_selector("#own-calls tbody tr:has-text('200 ok')")
    text = page.content()
    titles = page.locator(".sidebar nav a").all_inner_texts()
    page.goto(f"{stand.url}/ui#/tenants")
    page.wait_for_selector("h1:text-is('My key')")
    admin = {address for address in own.addresses if "/admin/" in address and "/admin/status" not in address}

    assert "neighbor" not in text
    assert ["Batches", "Playground", "My key", "API"] == titles
    assert set() == admin


def test_the_code_of_a_first_call_runs(browser: Any, stand: ConsoleStand) -> None:
    key = stand.make_tenant("newcomer")
    fresh = stand.opened(browser, "usage", key)
    page = fresh.page
    # Of a tenant without calls it comes first.
    page.wait_for_selector(".grid > #first-call:first-child")
    languages = page.locator("#first-call [role=tab]").all_inner_texts()
    page.get_by_role("tab", name="Python").click()
    python = page.locator("#first-call pre").inner_text()
    page.get_by_role("tab", name="Go").click()
    go = page.locator("#first-call pre").inner_text()
    page.get_by_text("No call has failed").wait_for()
    fresh.context.close()

    assert ["curl", "Python", "TypeScript", "Go", "Java"] == languages
    compile(python, "sample", "exec")
    assert 'model="bge"' in python
    assert f'"{stand.url}/v1/embeddings"' in go
    assert [] == fresh.complaints


def test_days_are_chosen_and_refused_beside_the_table(own: ObservedPage) -> None:
    page = own.page
    page.wait_for_selector("#table-usage tbody tr")
    page.get_by_label("From the day").fill("2026-01-01")
    page.wait_for_selector("#own-usage .problem:has-text('from 1 to 31 days')")
    assert page.locator("#own-key").is_visible()
    page.get_by_label("Until the day").fill("2026-01-05")
    page.wait_for_selector("#own-usage:has-text('No usage on these days')")
    assert "since=2026-01-01" in page.url


@pytest.mark.parametrize("key", [READER, OPERATOR])
def test_an_operator_finds_no_emptiness(browser: Any, stand: ConsoleStand, key: str) -> None:
    operator = stand.opened(browser, "usage", key)
    page = operator.page
    if key == READER:
        page.wait_for_selector("#own-note:has-text('A key for operators, which calls no models')")
        assert 0 == page.locator("#own-calls, #own-usage").count()
    else:
        page.wait_for_selector("#own-key:has-text('ops')")
        page.wait_for_selector("#first-call pre")
    complaints = operator.complaints
    operator.context.close()

    assert [] == complaints


def test_a_revoked_key_signs_out_with_the_reason(browser: Any, stand: ConsoleStand) -> None:
    key = stand.make_tenant("leaver")
    leaver = stand.opened(browser, "usage", key)
    page = leaver.page
    page.wait_for_selector("#own-key:has-text('leaver')")
    with stand.client() as client:
        (id_,) = [each["id"] for each in client.get("/admin/keys").json() if each["tenant"] == "leaver"]
        client.delete(f"/admin/keys/{id_}").raise_for_status()
    page.wait_for_selector("#sign-in-problem")
    reason = page.inner_text("#sign-in-problem")
    stored = page.evaluate("sessionStorage.length")
    leaver.context.close()

    assert "Incorrect API key provided" in reason
    assert 0 == stored


@pytest.mark.parametrize("width", [400, 1280])
def test_odd_names_fit_and_nothing_violates(browser: Any, stand: ConsoleStand, width: int) -> None:
    found: dict[str, Any] = {}
    scheme = "dark" if width == 400 else "light"
    for name in (LONG, FROM_THE_RIGHT, MARKUP):
        key = stand.make_tenant(f"{name}{width}"[-200:], tokens_per_day=1000)
        stand.call(key)
        stand.call(key, "broken")
        observed = stand.opened(
            browser, "usage", key, viewport={"width": width, "height": 800}, color_scheme=scheme
        )
        page = observed.page
        page.wait_for_selector("#own-calls tbody tr")
        page.wait_for_selector("#table-usage tbody tr")
        found[name] = violations(page)
        page.locator("#own-calls tbody td a").first.click()
        page.wait_for_selector("#own-call")
        found[name] += violations(page) + [("img", "")] * page.locator("img").count()
        observed.context.close()
        assert [] == observed.complaints

    assert {} == {name: problems for name, problems in found.items() if problems}
