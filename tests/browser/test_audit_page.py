"""The page of the audit: what was changed, and its way back."""

import csv
import io
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.browser.conftest import ObservedPage
from tests.browser.console_stand import FROM_THE_RIGHT, LONG, MARKUP, READER, ConsoleStand, violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleStand]:
    with ExitStack() as resources:
        yield ConsoleStand(tmp_path_factory.mktemp("audit"), resources)


@pytest.fixture
def audit(browser: Any, stand: ConsoleStand) -> Iterator[ObservedPage]:
    observed = stand.opened(browser, "audit")
    yield observed
    observed.context.close()


def settings_of(stand: ConsoleStand, name: str) -> Any:
    """Return the settings of a stored tenant."""
    with stand.client() as client:
        return client.get(f"/admin/tenants/{name}").json()["settings"]


def open_restore(page: Any, name: str) -> None:
    """Open the newest change of a tenant, and the question about its way back."""
    page.get_by_label("Object", exact=True).fill(f"tenant/{name}")
    page.get_by_label("Action", exact=True).select_option("change")
    row = page.locator(f"#audit tbody tr:has-text('change'):has-text('{name}')").first
    row.get_by_role("link").first.click()
    page.get_by_role("button", name="Restore what it was").click()
    page.wait_for_selector("#restored tbody tr")


def test_restores_a_limit(audit: ObservedPage, stand: ConsoleStand) -> None:
    page = audit.page
    stand.make_tenant("acme", tokens_per_day=1000)
    stand.patch("acme", {"limits": {"tokens_per_day": 5, "requests_per_day": 7}, "weight": 3})
    open_restore(page, "acme")
    rows = [row.split("\t") for row in page.inner_text("#restored tbody").splitlines()]
    page.get_by_role("button", name="Restore", exact=True).click()
    page.wait_for_selector(".toast:has-text('acme is again what it was')")
    restored = settings_of(stand, "acme")
    # The restore is a change of its own, on top of the others.
    page.locator("#audit tbody tr").nth(1).wait_for()
    newest = page.locator("#audit tbody tr").first.inner_text()

    assert ["limit requests per day", "7", "not set"] in rows
    assert ["limit tokens per day", "5", "1,000"] in rows
    assert ({"tokens_per_day": 1000}, 1) == (restored["limits"], restored["weight"])
    assert "1,000" in newest
    assert [] == audit.complaints


def test_a_change_meanwhile_is_not_overwritten(audit: ObservedPage, stand: ConsoleStand) -> None:
    page = audit.page
    stand.make_tenant("shared", tokens_per_day=1000)
    stand.patch("shared", {"limits": {"tokens_per_day": 5}})
    open_restore(page, "shared")
    stand.patch("shared", {"limits": {"tokens_per_day": 6}})
    page.get_by_role("button", name="Restore", exact=True).click()
    page.wait_for_selector("dialog .problem:has-text('shared was changed meanwhile')")
    kept = settings_of(stand, "shared")["limits"]
    # It is read again, and says so next to the field.
    page.wait_for_selector("#restored td:has-text('changed since this record')")
    now = page.locator("#restored tbody td").nth(1).inner_text()
    page.get_by_role("button", name="Restore", exact=True).click()
    page.wait_for_selector(".toast:has-text('shared is again')")

    assert {"tokens_per_day": 6} == kept
    assert now.startswith("6")
    assert {"tokens_per_day": 1000} == settings_of(stand, "shared")["limits"]


def test_makes_a_removed_tenant_again(audit: ObservedPage, stand: ConsoleStand) -> None:
    page = audit.page
    stand.make_tenant("gone", tokens_per_day=1000)
    with stand.client() as client:
        client.delete("/admin/tenants/gone").raise_for_status()
    page.get_by_label("Object", exact=True).fill("tenant/gone")
    page.locator("#audit tbody tr:has-text('remove')").get_by_role("link").first.click()
    page.get_by_role("button", name="Restore what it was").click()
    page.get_by_text("It is made again with the settings below, and without keys.").wait_for()
    page.get_by_role("button", name="Restore", exact=True).click()
    page.wait_for_selector(".toast")

    assert {"tokens_per_day": 1000} == settings_of(stand, "gone")["limits"]


def test_filters_and_saves_what_is_filtered(audit: ObservedPage, stand: ConsoleStand) -> None:
    page = audit.page
    stand.make_tenant("sought", tokens_per_day=1)
    for number in range(60):
        stand.patch("sought", {"weight": number + 2})
    stand.make_tenant("other")
    page.get_by_label("Search", exact=True).fill("SOUGHT")
    # What is typed filters after a pause.
    page.wait_for_url("**search=SOUGHT**")
    page.get_by_label("Action", exact=True).select_option("change")
    page.wait_for_url("**action=change**")
    page.wait_for_selector("#audit [role=status]:text-is('50 rows')")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as CSV").click()
    saved = list(csv.DictReader(io.StringIO(download.value.path().read_text())))
    page.get_by_role("button", name="Show older").click()
    page.wait_for_selector("#audit [role=status]:text-is('60 rows')")
    page.reload()
    page.wait_for_selector("#audit tbody tr:has-text('sought')")

    assert 60 == len(saved)
    assert {("ops", "change", "tenant/sought")} == {
        (row["Who"], row["Action"], row["Object"]) for row in saved
    }
    assert "weight: 60 → 61" == saved[0]["Change"]
    assert "search=SOUGHT" in page.url
    assert 0 == page.locator("#audit tbody tr:has-text('other')").count()
    assert [] == audit.complaints


def test_a_reader_sees_records_and_restores_none(browser: Any, stand: ConsoleStand) -> None:
    stand.make_tenant("seen", tokens_per_day=1)
    stand.patch("seen", {"limits": {"tokens_per_day": 2}})
    reader = stand.opened(browser, "audit?object=tenant/seen&action=change", READER)
    page = reader.page
    page.locator("#audit tbody td a").first.press("Enter")
    page.wait_for_selector("#record :text('All changes of this object')")
    page.wait_for_load_state("networkidle")
    buttons = page.locator("#record button").all_inner_texts()
    page.keyboard.press("Escape")
    page.wait_for_selector("#record", state="detached")
    reader.context.close()

    assert "Restore what it was" not in buttons


@pytest.mark.parametrize("width", [400, 1280])
def test_odd_names_fit_and_nothing_violates(browser: Any, stand: ConsoleStand, width: int) -> None:
    if width == 400:
        for name in (LONG, FROM_THE_RIGHT, MARKUP):
            stand.make_tenant(name, tokens_per_day=5)
    scheme = "dark" if width == 400 else "light"
    observed = stand.opened(
        browser, "audit?action=create", viewport={"width": width, "height": 800}, color_scheme=scheme
    )
    page = observed.page
    for name in (LONG, FROM_THE_RIGHT, MARKUP):
        page.get_by_text(name, exact=True).first.wait_for()
    found = violations(page)
    page.locator("#audit tbody td a").first.click()
    page.wait_for_selector("#record")
    found += violations(page)
    images = page.locator("img").count()
    observed.context.close()

    assert ([], 0) == (found, images)
    assert [] == observed.complaints
