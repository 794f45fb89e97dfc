"""The page of recent calls: why a call failed, filters, links to a call, and reading while calls go on."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.browser.conftest import ObservedPage, until
from tests.browser.console_stand import ODD_NAMES, OPERATOR, WORDS, ConsoleStand, violations
from tests.quotas.redis_server import RedisServer

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleStand]:
    """Start two workers, so that the page must show the calls of both."""
    folder = tmp_path_factory.mktemp("calls")
    with ExitStack() as resources:
        redis = RedisServer(folder)
        resources.callback(redis.stop)
        yield ConsoleStand(folder, resources, workers=2, store=redis.url)


@pytest.fixture
def calls(browser: Any, stand: ConsoleStand) -> Iterator[ObservedPage]:
    observed = stand.opened(browser, "calls")
    yield observed
    observed.context.close()


def row_of(page: Any, model: str) -> Any:
    """Return the newest row of a model."""
    return page.locator(f"#calls tbody tr:has-text('{model}')").first


def test_finds_why_a_call_failed(calls: ObservedPage, stand: ConsoleStand) -> None:
    page = calls.page
    failed = stand.call(OPERATOR, "broken")
    stand.call(OPERATOR)
    page.get_by_label("Only failed").check()
    page.get_by_label("Model", exact=True).fill("broken")
    row = row_of(page, "broken")
    row.locator(".badge").click()
    panel = page.locator("#call")
    panel.locator("#finding").wait_for()
    finding = panel.inner_text()

    assert failed.status_code == 502
    assert 0 == page.locator("#calls tbody tr .badge.tone-good").count()
    assert "A replica failed, and no other could take over." in finding
    assert "Read its status and words below" in finding
    assert "The upstream's last answer: 500" in finding
    assert WORDS in finding
    assert failed.headers["x-request-id"] in finding
    assert "http://127.0.0.1:" in panel.locator(".replicas").inner_text()
    assert "parse" in panel.locator(".stage-legend").inner_text()
    assert "failed=true" in page.url
    assert [] == calls.complaints


def test_a_link_to_a_call_opens_it(browser: Any, stand: ConsoleStand) -> None:
    reply = stand.call(OPERATOR)
    id_ = reply.headers["x-request-id"]
    # The filters of the link leave it out.
    shared = stand.opened(browser, f"calls?failed=true&call={id_}")
    page = shared.page
    page.wait_for_selector(f"#request-id:text-is('{id_}')")
    assert "Served" == page.locator("#call h2").inner_text()
    page.keyboard.press("Escape")
    page.wait_for_selector("#call", state="detached")
    assert id_ not in page.url
    page.evaluate("location.hash = '#/calls?call=none-of-them'")
    page.get_by_text("This gateway no longer keeps this call").wait_for()
    page.get_by_role("button", name="Ask all gateways").click()
    until(page, "location.hash.includes('fleet=true')")
    shared.context.close()

    assert [] == shared.complaints


def test_lists_calls_of_all_workers_without_content(calls: ObservedPage, stand: ConsoleStand) -> None:
    page = calls.page
    secret = "the text that no page may show"
    ids = set()
    for _ in range(8):
        # Each connection may come to another worker.
        with stand.client() as client:
            reply = client.post("/v1/embeddings", json={"model": "bge", "input": secret})
            ids.add(reply.headers["x-request-id"])
    for id_ in ids:
        page.get_by_label("Request id").fill(id_[:20])
        page.wait_for_selector(f"#calls tbody a[href*='{id_}']")
        page.wait_for_selector("#calls [role=status]:text-is('1 row')")
    assert "ops" in page.inner_text("#calls tbody")
    assert secret not in page.content()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as CSV").click()
    saved = download.value.path().read_text()
    assert id_ in saved
    assert "upstream s" in saved.splitlines()[0]


def test_rows_stay_while_somebody_reads(calls: ObservedPage, stand: ConsoleStand) -> None:
    page = calls.page
    stand.call(OPERATOR)
    page.wait_for_selector("#calls tbody tr")
    page.get_by_role("button", name="Pause").click()
    page.wait_for_load_state("networkidle")
    asked = len([address for address in calls.addresses if "/admin/calls" in address])
    stand.call(OPERATOR, "broken")
    page.wait_for_timeout(3000)
    assert asked + 1 >= len([address for address in calls.addresses if "/admin/calls" in address])
    shown = page.locator("#calls tbody tr").count()
    page.get_by_role("button", name="Go live").click()
    until(page, f"document.querySelectorAll('#calls tbody tr').length > {shown} || {shown} >= 50")
    page.locator("#calls tbody tr").nth(1).hover()
    stand.call(OPERATOR)
    page.wait_for_selector("#calls-state:has-text('newer call')")


def test_all_gateways_are_asked_only_on_demand(calls: ObservedPage, stand: ConsoleStand) -> None:
    page = calls.page
    stand.call(OPERATOR)
    page.wait_for_selector("#calls tbody tr")
    assert [] == [address for address in calls.addresses if "fleet=true" in address]
    page.get_by_label("All gateways").check()
    page.wait_for_selector("th:has-text('Replica and gateway')")
    page.wait_for_selector("#calls tbody tr")
    page.wait_for_timeout(4500)
    assert 1 == len([address for address in calls.addresses if "fleet=true" in address])
    page.get_by_role("button", name="Ask again").click()
    until(
        page, "performance.getEntriesByType('resource').filter(r => r.name.includes('fleet=true')).length > 1"
    )


def test_works_by_keyboard(calls: ObservedPage, stand: ConsoleStand) -> None:
    page = calls.page
    stand.call(OPERATOR)
    page.wait_for_selector("#calls tbody tr")
    page.get_by_role("button", name="Pause").press("Enter")
    link = page.locator("#calls tbody td a").first
    link.press("Enter")
    page.wait_for_selector("#call h2")
    page.keyboard.press("Escape")
    page.wait_for_selector("#call", state="detached")
    assert page.evaluate("document.activeElement.closest('td') !== null")


@pytest.mark.parametrize("width", [400, 1280])
def test_odd_names_fit_and_nothing_violates(browser: Any, stand: ConsoleStand, width: int) -> None:
    for name in ODD_NAMES if width == 400 else ():
        key = stand.make_tenant(name)
        stand.call(key)
        stand.call(key, "broken")
    scheme = "dark" if width == 400 else "light"
    observed = stand.opened(browser, "calls", viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = observed.page
    for name in ODD_NAMES:
        # The filter of tenants has the names too, as options that are not shown.
        page.locator("#calls tbody").get_by_text(name, exact=True).first.wait_for()
    found = violations(page)
    row_of(page, "broken").locator("a").first.click()
    page.wait_for_selector("#finding")
    found += violations(page)
    images = page.locator("img").count()
    observed.context.close()

    assert ([], 0) == (found, images)
    assert [] == observed.complaints
