"""The console's page of upstreams: replicas, drains, comparisons, additions and the reload of the file."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from tests.browser.conftest import ObservedPage
from tests.browser.model_stand import LONG, OPERATOR, READER, Stand, opened, violations, width_of
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with ExitStack() as resources:
        yield Stand(tmp_path_factory.mktemp("upstreams"), resources)


@pytest.fixture
def console(browser: Any, stand: Stand) -> Iterator[ObservedPage]:
    observed = opened(browser, stand, "upstreams")
    observed.page.wait_for_selector(".upstreams tbody tr")
    yield observed
    observed.context.close()


@contextmanager
def traffic(stand: Stand) -> Iterator[list[int]]:
    """Send calls to `pair` meanwhile, of which some wait at its first replica. Yields their statuses."""
    statuses: list[int] = []
    is_over = threading.Event()

    def call(text: str) -> None:
        with httpx.Client(base_url=stand.gateway.url, timeout=PATIENCE_S, trust_env=False) as client:
            while not is_over.is_set():
                body = {"model": "bge", "input": text}
                headers = {"authorization": f"Bearer {OPERATOR}"}
                statuses.append(client.post("/v1/embeddings", json=body, headers=headers).status_code)

    stand.released.clear()
    threads = [threading.Thread(target=call, args=(text,)) for text in ("slow a", "slow b", "c")]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        is_over.set()
        stand.released.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def test_follows_a_drain_under_traffic_and_puts_the_replica_back(console: ObservedPage, stand: Stand) -> None:
    page = console.page
    row = page.locator(f".upstreams section:has(h2:has-text('pair')) tr:has-text('{stand.one}')")
    with traffic(stand) as statuses:
        row.locator("td:has-text('1 of 2'), td:has-text('2 of 2')").first.wait_for()
        page.get_by_role("button", name=f"Drain {stand.one} of pair").click()
        page.get_by_role("dialog").get_by_role("button", name="Drain", exact=True).click()
        page.wait_for_selector("#drain [role=status]:has-text('in flight')")
        page.wait_for_selector("#drain h2:text-is('Draining')")
        row.locator(".badge:has-text('draining,')").wait_for()
        stand.released.set()
        page.wait_for_selector("#drain:has-text('0 in flight: its server can be stopped.')")
        page.wait_for_selector("#drain h2:text-is('Drained')")
        page.get_by_role("button", name="Close", exact=True).last.click()
        row.locator(".badge:text-is('drained')").wait_for()
        assert [] == console.complaints
        page.get_by_role("button", name=f"Drain {stand.two} of pair").click()
        page.get_by_role("dialog").get_by_role("button", name="Drain", exact=True).click()
        page.wait_for_selector("#drain .problem:has-text('the last replica')")
        page.keyboard.press("Escape")
        page.get_by_role("button", name=f"Put back {stand.one} of pair").click()
        page.wait_for_selector(".toast:has-text('gets work again')")
        row.locator(".badge:text-is('up'), .badge:text-is('probation')").wait_for()

    assert {200} == set(statuses)


def test_shows_the_health_of_a_replica_by_keyboard(console: ObservedPage, stand: Stand) -> None:
    page = console.page
    strip = page.get_by_role("button", name=f"Health of {stand.two}").first
    # A minute of the history is kept once it is over.
    strip.wait_for(timeout=90_000)
    strip.focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".tip:has-text('fake/model')")
    page.keyboard.press("Escape")
    page.wait_for_selector(".tip", state="detached")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open] td .badge:text-is('up')")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog[open]", state="detached")

    assert strip.evaluate("element => element === document.activeElement")
    assert [] == console.complaints


def test_compares_the_vectors_of_replicas_by_keyboard(console: ObservedPage) -> None:
    page = console.page
    opener = page.get_by_role("button", name="Verify pair")
    opener.focus()
    page.keyboard.press("Enter")
    page.get_by_label("Upstream to compare").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#verify-findings:has-text('all that should agree does')")

    assert ["fits", "fits"] == page.locator("#verify td .badge").all_inner_texts()
    assert ["1", "1.00000", "1.00000", "1"] == page.locator("table.matrix td.number").all_inner_texts()
    assert "The vectors agree." in page.locator("#verify [role=status]").all_inner_texts()
    assert [] == violations(page)
    page.keyboard.press("Escape")
    page.wait_for_selector("#verify", state="detached")
    assert opener.evaluate("element => element === document.activeElement")
    assert [] == console.complaints


def test_a_replica_that_is_away_is_no_difference(console: ObservedPage) -> None:
    page = console.page
    page.get_by_role("button", name="Verify half").click()
    page.locator("#verify").get_by_role("button", name="Verify").click()
    page.wait_for_selector("#verify-findings.tone-warn:has-text('1 replica could not be compared.')")


def test_adds_changes_and_removes_an_upstream(console: ObservedPage, stand: Stand) -> None:
    page = console.page
    page.get_by_role("button", name="Add an upstream").click()
    page.get_by_role("button", name="Save the upstream").click()
    page.wait_for_selector(".field:has(label:text-is('Name of the upstream')) .field-error")
    page.get_by_label("Name of the upstream").fill("second")
    addresses = page.get_by_label("Addresses of its replicas, one a line")
    addresses.fill("nowhere")
    page.get_by_role("button", name="Save the upstream").click()
    page.wait_for_selector(".field:has(textarea) .field-error:has-text('not a base URL')")
    assert [] == violations(page)
    addresses.fill(stand.two)
    page.get_by_label("Serve it as the model").fill("bge")
    page.get_by_role("button", name="Save the upstream").click()
    page.wait_for_selector(".field-error:has-text('router.yaml defines it')")
    page.get_by_label("Serve it as the model").fill("org/second")
    page.get_by_role("button", name="Save the upstream").click()
    page.wait_for_selector(".toast:has-text('second is saved')")
    card = page.locator(".upstreams section:has(h2:has-text('second'))")
    card.locator(".badge:text-is('up')").wait_for()
    card.locator("a:text-is('org/second')").wait_for()

    change_and_remove(page, stand)
    # Failed requests are reported by the browser.
    assert all("Failed to load resource" in complaint for complaint in console.complaints)


def change_and_remove(page: Any, stand: Stand) -> None:
    """Change the window of the upstream `second`, take it from its model, and remove it."""
    card = page.locator(".upstreams section:has(h2:has-text('second'))")
    page.get_by_role("button", name="Change second").click()
    page.get_by_text("More settings").click()
    page.get_by_label("Further settings, as JSON").fill("{oops")
    page.get_by_role("button", name="Save the upstream").click()
    page.wait_for_selector(".field-error:has-text('not JSON')")
    page.get_by_label("Further settings, as JSON").fill("")
    page.get_by_label("Window: batches in flight to a replica").fill("3")
    page.get_by_role("button", name="Save the upstream").click()
    card.locator("td:has-text('of 3')").wait_for()

    page.get_by_role("button", name="Remove second").click()
    page.get_by_role("button", name="Remove", exact=True).click()
    page.wait_for_selector("dialog .problem:has-text('org/second')")
    page.keyboard.press("Escape")
    with stand.gateway.client() as client:
        headers = {"authorization": f"Bearer {OPERATOR}"}
        client.delete("/admin/models/org%2Fsecond", headers=headers).raise_for_status()
    page.get_by_role("button", name="Remove second").click()
    page.get_by_role("button", name="Remove", exact=True).click()
    card.wait_for(state="detached")


def test_asks_before_changes_are_lost(console: ObservedPage) -> None:
    page = console.page
    page.get_by_role("button", name="Add an upstream").click()
    page.get_by_label("Name of the upstream").fill("half written")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Keep editing").click()
    assert "half written" == page.get_by_label("Name of the upstream").input_value()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Discard them").click()
    page.wait_for_selector("#upstream-panel", state="detached")


def test_each_kind_of_server_has_its_fields(console: ObservedPage) -> None:
    page = console.page
    page.get_by_role("button", name="Add an upstream").click()
    kind = page.get_by_label("Kind of server")
    assert page.get_by_label("Model at the server").count() == 0
    kind.select_option("cohere")
    page.get_by_label("Model at the server").wait_for()
    kind.select_option("torch")
    page.get_by_label("Checkpoint").wait_for()
    assert page.get_by_label("Addresses of its replicas, one a line").count() == 0


def test_reads_the_file_again_and_shows_what_has_changed(console: ObservedPage, stand: Stand) -> None:
    page = console.page
    before = stand.path.read_text()
    try:
        page.get_by_role("button", name="Read router.yaml again").click()
        page.wait_for_selector("#reload:has-text('Nothing has changed')")
        stand.path.write_text(before.replace("in_flight_batches: 2", "in_flight_batches: 5"))
        page.get_by_role("button", name="Read it again").click()
        page.wait_for_selector("#reload li:has-text('upstreams.pair.in_flight_batches'):has-text('2 → 5')")
        assert [] == violations(page)
        stand.path.write_text(before.replace("in_flight_batches: 2", "in_flight_batchs: 2"))
        page.get_by_role("button", name="Read it again").click()
        page.wait_for_selector("#reload .problem li:has-text('in_flight_batchs')")
    finally:
        stand.path.write_text(before)
        with stand.gateway.client() as client:
            headers = {"authorization": f"Bearer {OPERATOR}"}
            client.post("/admin/reload", headers=headers).raise_for_status()


def test_finds_upstreams_and_those_with_trouble(console: ObservedPage) -> None:
    page = console.page
    page.get_by_label("Filter: upstreams, replicas, models").fill("ranker")
    page.wait_for_selector(".upstreams:has-text('cross'):not(:has-text('pair'))")
    page.get_by_label("Filter: upstreams, replicas, models").fill("")
    page.get_by_label("Only with trouble").check()
    page.wait_for_selector(".upstreams:has-text('half'):not(:has-text('cross'))")
    page.reload()
    page.wait_for_selector(".upstreams:has-text('half'):not(:has-text('cross'))")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as CSV").click()
    assert "replicas.csv" == download.value.suggested_filename


def test_the_page_of_an_upstream_has_all_its_replicas(console: ObservedPage) -> None:
    page = console.page
    page.get_by_role("link", name="All 60 replicas").click()
    page.wait_for_selector("h1:text-is('many')")
    page.wait_for_selector("span[role=status]:text-is('1–50 of 60')")
    page.goto(page.url.replace("many", "pair"))
    page.wait_for_selector("h1:text-is('pair')")
    page.wait_for_selector("section:has-text('Limits of its account') [role=meter]")
    page.goto(page.url.replace("pair", "nothing"))
    page.wait_for_selector(".empty:has-text('There is no such upstream')")

    assert [] == console.complaints


def test_an_operator_who_only_reads_is_offered_no_change(browser: Any, stand: Stand) -> None:
    observed = opened(browser, stand, "upstreams", READER)
    page = observed.page
    page.wait_for_selector(".upstreams tbody tr")
    page.wait_for_selector("text=You can see everything here, and change nothing.")
    names = page.get_by_role("button").all_inner_texts()
    observed.context.close()

    assert not {"Drain", "Put back", "Verify", "Add an upstream", "Read router.yaml again"} & set(names)


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (400, "light"), (360, "dark")]
)
def test_fits_the_screen_and_has_no_accessibility_violation(
    browser: Any, stand: Stand, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 800}
    observed = opened(browser, stand, "upstreams", viewport=size, color_scheme=scheme)
    page = observed.page
    found = {}
    for address, seen in (
        ("upstreams", ".upstreams tbody tr"),
        ("upstreams/many", "tbody tr"),
        (f"upstreams/{LONG}", "tbody tr"),
    ):
        page.goto(f"{stand.gateway.url}/ui#/{address}")
        page.wait_for_selector(seen)
        found[address] = (width_of(page), violations(page))
    observed.context.close()

    assert {(width, ())} == {(wide, tuple(problems)) for wide, problems in found.values()}, found
    assert [] == observed.complaints
