"""The page of batches: progress, reasons, results, and cancelling."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.browser.conftest import ObservedPage
from tests.browser.console_stand import LONG, ConsoleStand, create_batch, line, run_batch, violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleStand]:
    with ExitStack() as resources:
        yield ConsoleStand(tmp_path_factory.mktemp("batches"), resources)


@pytest.fixture
def batches(browser: Any, stand: ConsoleStand) -> Iterator[ObservedPage]:
    observed = stand.opened(browser, "batches")
    yield observed
    observed.context.close()


def test_without_batches_shows_how_to_make_one(browser: Any, stand: ConsoleStand) -> None:
    own = stand.opened(browser, "batches", stand.make_tenant("beginner"))
    page = own.page
    page.wait_for_selector("#first-batch pre:has-text('/v1/batches')")
    code = page.inner_text("#first-batch")
    page.get_by_role("tab", name="Python").click()
    python = page.locator("#first-batch .code pre").inner_text()
    own.context.close()

    assert '"model":"bge"' in code
    assert "client.batches.create" in python
    compile(python, "sample", "exec")


def test_shows_what_a_cancelled_batch_has_not_run(batches: ObservedPage, stand: ConsoleStand) -> None:
    page = batches.page
    # The upload and the creation cost a request each, and so does each line.
    key = stand.make_tenant("short", requests_per_day=3)
    with stand.client(key) as client:
        batch = create_batch(client, "".join(map(line, "abc")))
    row = page.locator(f"#batches tr:has-text('{batch}')")
    row.get_by_role("button", name="Cancel").click()
    page.get_by_text("The other lines are not run.").wait_for()
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.wait_for_selector("dialog.modal", state="detached")
    row.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the batch").click()
    page.wait_for_selector(f".toast:has-text('{batch} is being cancelled')")
    page.wait_for_selector(f"#batches tr:has-text('{batch}'):has-text('cancelled'):has-text('not run')")
    assert "failed" not in row.inner_text()
    row.get_by_role("link").first.press("Enter")
    page.wait_for_selector("#batch .badge:has-text('cancelled')")
    page.keyboard.press("Escape")
    page.wait_for_selector("#batch", state="detached")

    assert [] == batches.complaints


def test_shows_and_fetches_batches(browser: Any, batches: ObservedPage, stand: ConsoleStand) -> None:
    page = batches.page
    key = stand.make_tenant("runner")
    with stand.client(key) as client:
        good = run_batch(client, line("a"))
        bad = run_batch(client, "no JSON\n" * 5)
        stand.patch("runner", {"limits": {"batch_tokens_per_day": 8}})
        waiting = create_batch(client, "".join(line(str(number)) for number in range(20)))
    page.wait_for_selector(
        f"#batches tr:has-text('{waiting}'):has-text('Waits: limit batch_tokens_per_day (8)')"
    )
    page.wait_for_selector(f"#batches tr:has-text('{good}'):has-text('completed'):has-text('1 of 1')")
    page.wait_for_selector(
        f"#batches tr:has-text('{bad}'):has-text('lines 1, 2, 3 and 2 more: the line is not valid JSON')"
    )
    everyone = page.inner_text("#batches-owner")
    page.get_by_label("State", exact=True).select_option("failed")
    page.wait_for_selector(f"#batches tr:has-text('{good}')", state="detached")
    page.locator(f"#batches tr:has-text('{bad}') a").first.click()
    page.wait_for_selector("#batch .problems li:has-text('lines 1, 2, 3 and 2 more')")
    own = stand.opened(browser, f"batches?batch={good}", key)
    with own.page.expect_download() as download:
        own.page.get_by_role("button", name="Results").click()
    result = download.value.path().read_text()
    own.page.wait_for_selector(".toast:has-text('is saved')")
    own_text = own.page.inner_text("#batches-owner")
    own.context.close()

    assert "These are of all tenants" in everyone
    assert "These are your tenant's" in own_text
    assert '"custom_id":"a"' in result
    assert [] == batches.complaints + own.complaints


def test_a_tenant_cancels_only_its_own(browser: Any, stand: ConsoleStand) -> None:
    one, other = stand.make_tenant("one", requests_per_day=3), stand.make_tenant("two", requests_per_day=3)
    with stand.client(one) as client:
        batch = create_batch(client, "".join(map(line, "abc")))
    with stand.client(other) as client:
        foreign = create_batch(client, "".join(map(line, "abc")))
    own = stand.opened(browser, "batches", one)
    page = own.page
    page.locator(f"#batches tr:has-text('{batch}') a").first.click()
    page.locator("#batch").get_by_role("button", name="Cancel the batch").click()
    page.locator("dialog.modal").get_by_role("button", name="Cancel the batch").click()
    page.wait_for_selector("#batch .badge:has-text('cancelled')")
    text = page.inner_text("body")
    admin = [address for address in own.addresses if "/admin/batches" in address]
    own.context.close()

    assert foreign not in text
    assert [] == admin


@pytest.mark.parametrize("width", [400, 1280])
def test_fits_and_nothing_violates(browser: Any, stand: ConsoleStand, width: int) -> None:
    if width == 400:
        with stand.client(stand.make_tenant(LONG)) as client:
            run_batch(client, line("a"))
            run_batch(client, "no JSON\n")
    scheme = "dark" if width == 400 else "light"
    observed = stand.opened(browser, "batches", viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = observed.page
    page.get_by_text(LONG, exact=True).first.wait_for()
    found = violations(page)
    page.locator("#batches tbody td a").first.click()
    page.wait_for_selector("#batch")
    found += violations(page)
    observed.context.close()

    assert [] == found
    assert [] == observed.complaints
