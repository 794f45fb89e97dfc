"""The pages of tenants: their list, the page of one, and every change that an operator makes there."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import ObservedPage, until
from tests.browser.operators import (
    DESK,
    FROM_THE_RIGHT,
    HAN,
    HEIGHT_MAX,
    LONG,
    MARKUP,
    PHONE,
    READER,
    as_operator,
    call_until,
    opened,
    size_of,
    toast,
    violations,
    write_config,
)
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served
from tests.quotas.many_tenants import MANY, fill_folder

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with serve_in_thread(FakeTei()) as url:
        yield url


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, upstream: str) -> Iterator[Served]:
    process = Served(write_config(tmp_path_factory.mktemp("tenants"), upstream)).wait_until_up()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory, upstream: str) -> Iterator[Served]:
    """Start a gateway with ten thousand stored tenants."""
    folder = tmp_path_factory.mktemp("crowded")
    fill_folder(folder / "state")
    process = Served(write_config(folder, upstream)).wait_until_up()
    yield process
    process.stop()


@pytest.fixture
def console(browser: Any, gateway: Served) -> Iterator[ObservedPage]:
    """Open the list of tenants."""
    observed = opened(browser, gateway, "tenants", viewport=DESK)
    yield observed
    observed.context.close()


def put(gateway: Served, name: str, **settings: Any) -> None:
    """Store a tenant."""
    with as_operator(gateway) as client:
        client.put(f"/admin/tenants/{name}", json=settings).raise_for_status()


def settings_of(gateway: Served, name: str) -> dict[str, Any]:
    """Return the stored settings of a tenant."""
    with as_operator(gateway) as client:
        reply = client.get(f"/admin/tenants/{name}").raise_for_status()
    settings: dict[str, Any] = reply.json()["settings"]
    return settings


def open_tenant(console: ObservedPage, name: str) -> None:
    """Go to the page of a tenant, and wait for its usage."""
    console.page.evaluate("name => { location.hash = `#/tenants/${encodeURIComponent(name)}` }", name)
    console.page.wait_for_selector("#calls-today")


def test_a_new_tenant_gets_a_key_whose_first_call_is_seen(console: ObservedPage, gateway: Served) -> None:
    page = console.page
    page.get_by_role("button", name="New tenant").click()
    page.get_by_label("Name", exact=True).fill("acme")
    page.get_by_role("button", name="Add a limit").first.click()
    page.get_by_label("Number of limit 1").fill("100,000")
    page.get_by_label("Unit of limit 1").select_option("tokens")
    page.get_by_label("Window of limit 1").select_option("day")
    page.get_by_role("button", name="Add the tenant").click()
    toast(page, "acme is added.")
    page.wait_for_selector("h1:text-is('acme')")
    page.wait_for_selector("#limits:has-text('0 of 100,000')")
    page.get_by_role("button", name="New key").click()
    page.get_by_label("Id", exact=True).fill("laptop")
    page.get_by_role("button", name="Make the key").click()
    key = page.inner_text(".secret code")
    page.wait_for_selector("#created-key:has-text('Waiting for its first call')")
    sample = page.inner_text("#created-key pre")
    with gateway.client() as client:
        made = call_until(client, key, 200)
    page.wait_for_selector("#created-key:has-text('First call: 200')")
    page.get_by_role("button", name="I have saved it").click()
    page.wait_for_selector("#calls-today .stat-value:text-is('1')")
    page.wait_for_selector("#keys tbody tr:has-text('laptop'):has-text('today')")
    page.wait_for_selector("#by-model tbody tr:has-text('bge')")

    assert made.headers["x-ratelimit-limit-tokens"] == "100000"
    assert {"tokens_per_day": 100_000} == settings_of(gateway, "acme")["limits"]
    assert key in sample
    assert key not in page.content()
    assert console.complaints == []


def test_a_name_that_exists_is_not_overwritten(console: ObservedPage, gateway: Served) -> None:
    put(gateway, "taken", limits={"tokens_per_day": 5})
    page = console.page
    page.get_by_role("button", name="New tenant").click()
    name = page.get_by_label("Name", exact=True)
    name.fill("taken")
    page.get_by_role("button", name="Add the tenant").click()
    page.wait_for_selector(".field.wrong .field-error:has-text('there is the tenant')")

    assert "true" == name.get_attribute("aria-invalid")
    assert {"tokens_per_day": 5} == settings_of(gateway, "taken")["limits"]


def test_a_name_of_the_file_is_refused_and_a_shadowed_record_removed(
    console: ObservedPage, gateway: Served
) -> None:
    page = console.page
    page.get_by_role("button", name="New tenant").click()
    page.get_by_label("Name", exact=True).fill("filed")
    page.get_by_role("button", name="Add the tenant").click()
    page.wait_for_selector(".field.wrong .field-error:has-text('router.yaml defines the tenant filed')")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Discard them").click()
    put(gateway, "filed", weight=3)
    open_tenant(console, "filed")
    page.get_by_role("button", name="Delete what is stored").click()
    page.get_by_role("button", name="Delete the stored settings").click()
    toast(page, "What was stored of filed is removed.")
    with as_operator(gateway) as client:
        left = client.get("/admin/tenants/filed").status_code

    assert 404 == left
    assert console.complaints == []


def test_a_model_that_is_written_counts_as_added(console: ObservedPage, gateway: Served) -> None:
    page = console.page
    page.get_by_role("button", name="New tenant").click()
    page.get_by_label("Name", exact=True).fill("choosy")
    page.get_by_role("group", name="Allowed models").get_by_label("Only these").check()
    save = page.get_by_role("button", name="Add the tenant")
    save.click()
    page.wait_for_selector(".choice.wrong .field-error:text-is('Choose a model, or all models.')")
    model = page.get_by_label("Model to add: Allowed models")
    model.press_sequentially("bg")
    page.wait_for_selector(".choice.wrong .field-error:has-text('bg is not served')")
    model.press_sequentially("e")
    page.get_by_role("button", name="Add a limit").first.click()
    page.get_by_label("Number of limit 1").fill("100k")
    save.click()
    toast(page, "choosy is added.")
    settings = settings_of(gateway, "choosy")

    assert (["bge"], {"requests_per_minute": 100_000}) == (settings["models"], settings["limits"])


def test_mistakes_are_shown_beside_their_field(console: ObservedPage) -> None:
    page = console.page
    page.get_by_role("button", name="New tenant").click()
    save = page.get_by_role("button", name="Add the tenant")
    save.click()
    page.wait_for_selector(".field-error:text-is('Write a name.')")
    page.get_by_label("Name", exact=True).fill("wrong")
    page.get_by_role("button", name="Add a limit").first.click()
    page.get_by_label("Number of limit 1").fill("1.5")
    save.click()
    page.wait_for_selector(".limit-row.wrong .field-error:has-text('a whole number')")
    page.get_by_label("Number of limit 1").fill("15")
    page.get_by_text("Advanced").click()
    page.get_by_label("Client certificates").fill("cn=indexer")
    save.click()
    # The words are the gateway's.
    page.wait_for_selector(".field.wrong .field-error:has-text('expected dns:indexer.example.org')")


def test_an_edit_that_comes_second_shows_the_first(console: ObservedPage, gateway: Served) -> None:
    put(gateway, "shared", limits={"tokens_per_day": 5, "requests_per_minute": 9})
    page = console.page
    open_tenant(console, "shared")
    page.get_by_role("button", name="Edit", exact=True).click()
    with as_operator(gateway) as client:
        client.patch("/admin/tenants/shared", json={"weight": 7}).raise_for_status()
    page.get_by_label("Number of limit 1").fill("6")
    page.get_by_role("button", name="Remove limit 2").click()
    page.get_by_role("button", name="Save the tenant").click()
    page.wait_for_selector(".conflict:has-text('shared was changed meanwhile'):has-text('weight')")
    kept = settings_of(gateway, "shared")
    page.get_by_role("button", name="Load it and keep my changes").click()
    weight = page.get_by_label("Weight").input_value()
    page.get_by_role("button", name="Save the tenant").click()
    toast(page, "shared is saved.")
    saved = settings_of(gateway, "shared")

    assert "7" == weight
    assert (7, {"tokens_per_day": 5, "requests_per_minute": 9}) == (kept["weight"], kept["limits"])
    assert (7, {"tokens_per_day": 6}) == (saved["weight"], saved["limits"])


def test_restores_a_limit_from_the_changes(console: ObservedPage, gateway: Served) -> None:
    put(gateway, "lowered", limits={"tokens_per_day": 5000})
    put(gateway, "lowered", limits={"tokens_per_day": 50}, weight=3)
    page = console.page
    open_tenant(console, "lowered")
    record = page.locator("#changes .records > li").first
    record.wait_for()
    text = record.inner_text()
    record.get_by_role("button", name="Restore").click()
    page.wait_for_selector("#restored tr:has-text('50'):has-text('5,000')")
    page.locator("dialog").get_by_role("button", name="Restore").click()
    page.wait_for_selector("#limits:has-text('0 of 5,000')")
    restored = settings_of(gateway, "lowered")

    assert "5,000" in text
    assert ({"tokens_per_day": 5000}, 1) == (restored["limits"], restored["weight"])


def test_deletes_a_tenant_with_its_keys(console: ObservedPage, gateway: Served) -> None:
    put(gateway, "leaving")
    with as_operator(gateway) as client:
        client.post("/admin/keys", json={"tenant": "leaving"}).raise_for_status()
    page = console.page
    open_tenant(console, "leaving")
    page.get_by_role("button", name="Delete", exact=True).click()
    page.wait_for_selector("dialog:has-text('1 key of it ends')")
    page.get_by_role("button", name="Delete the tenant").click()
    toast(page, "leaving and its keys are removed.")
    page.wait_for_selector("h1:text-is('Tenants')")
    with as_operator(gateway) as client:
        left = client.get("/admin/keys", params={"tenant": "leaving"}).json()["total"]

    assert 0 == left


def test_the_keyboard_opens_a_panel_and_gets_its_place_back(console: ObservedPage) -> None:
    page = console.page
    opener = page.get_by_role("button", name="New tenant")
    opener.focus()
    page.keyboard.press("Enter")
    until(page, "document.activeElement.closest('dialog')?.id === 'tenant-panel'")
    page.keyboard.type("half")
    page.keyboard.press("Escape")
    page.wait_for_selector("[role=alert]:has-text('Your changes are not saved.')")
    page.get_by_role("button", name="Keep editing").press("Enter")
    page.keyboard.press("Escape")
    page.wait_for_selector("[role=alert]:has-text('Your changes are not saved.')")
    page.keyboard.press("Escape")
    page.wait_for_selector("[role=alert]:has-text('Your changes are not saved.')", state="detached")
    typed = page.get_by_label("Name", exact=True).input_value()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Discard them").press("Enter")
    page.wait_for_selector("#tenant-panel", state="detached")

    assert "half" == typed
    assert "New tenant" == page.evaluate("document.activeElement.innerText.trim()")


def test_what_is_in_the_file_is_not_changed_here(console: ObservedPage) -> None:
    page = console.page
    open_tenant(console, "filed")
    limits = page.inner_text("#limits")
    note = page.inner_text(".page-title .note")

    assert 0 == page.get_by_role("button", name="Edit", exact=True).count()
    assert "change it under tenants there" in note
    assert "of 250.00 EUR" in limits
    assert "0 of 1,000" in limits


def test_a_reader_is_offered_no_change(browser: Any, gateway: Served) -> None:
    put(gateway, "watched", weight=1)
    put(gateway, "watched", weight=2)
    observed = opened(browser, gateway, "tenants", READER, viewport=DESK)
    observed.page.wait_for_selector("tbody tr:has-text('watched')")
    offered = observed.page.get_by_role("button", name="New tenant").count()
    open_tenant(observed, "watched")
    observed.page.wait_for_selector("#changes .records > li")
    for name in ("Edit", "Delete", "New key", "Restore"):
        offered += observed.page.get_by_role("button", name=name, exact=True).count()
    complaints = observed.complaints
    observed.context.close()

    assert 0 == offered
    assert complaints == []


def test_usage_is_shown_and_downloaded(console: ObservedPage, gateway: Served) -> None:
    put(gateway, "counted", limits={"budget_per_month": 250.5})
    with as_operator(gateway) as client:
        key = client.post("/admin/keys", json={"tenant": "counted"}).json()["key"]
        assert 200 == call_until(client, key, 200).status_code
    page = console.page
    open_tenant(console, "counted")
    page.wait_for_selector("#limits:has-text('250.50 EUR')")
    page.get_by_role("button", name="Usage report").click()
    page.wait_for_selector("#usage-report tbody tr:has-text('bge')")
    header = page.inner_text("#usage-report thead")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download as CSV").click()
    table = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))

    assert "Cost (EUR)" in header
    assert [("counted", "bge", "1")] == [(row["tenant"], row["model"], row["requests"]) for row in table]
    assert all(float(row["cost"]) > 0 for row in table)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_any_name_fits_and_is_text(browser: Any, gateway: Served, width: int, scheme: str) -> None:
    names = (LONG, FROM_THE_RIGHT, HAN, MARKUP)
    for name in names:
        put(gateway, name, limits={"tokens_per_day": 5})
    observed = opened(
        browser, gateway, "tenants", viewport={"width": width, "height": 800}, color_scheme=scheme
    )
    page = observed.page
    page.wait_for_selector("tbody tr:has-text('filed')")
    shown = set(page.locator("tbody td:first-child bdi").all_inner_texts())
    found, sizes = violations(page), [size_of(page)]
    for name in names:
        open_tenant(observed, name)
        page.wait_for_selector("#changes .records")
        assert name == page.inner_text("h1")
        sizes.append(size_of(page))
    found += violations(page)
    page.get_by_role("button", name="Edit", exact=True).click()
    page.get_by_text("Advanced").click()
    found += violations(page)
    sizes.append(size_of(page))
    complaints = observed.complaints
    observed.context.close()

    assert set(names) <= shown
    assert {width} == {size[0] for size in sizes}
    assert all(height <= HEIGHT_MAX for _, height in sizes)
    assert [] == found
    assert complaints == []


def test_ten_thousand_tenants_are_one_page_and_one_search(browser: Any, crowded: Served) -> None:
    observed = opened(browser, crowded, "tenants", viewport=DESK)
    observed.context.set_default_timeout(60_000)
    page = observed.page
    page.wait_for_selector("[role=status]:text-is('1–50 of 10,001')")
    first = page.locator("tbody tr").count()
    page.get_by_label("Filter: Tenants").fill("tenant-07777")
    page.wait_for_selector("[role=status]:text-is('1 row')")
    one = page.inner_text("tbody td:first-child bdi")
    # The field is not drawn anew by what it finds.
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.get_by_label("Filter: Tenants").fill("")
    page.get_by_role("button", name="Tokens today").click()
    page.wait_for_selector("tbody tr:first-child:has-text('Tenant-09999')")
    page.get_by_role("button", name="Next page").click()
    page.wait_for_selector("[role=status]:text-is('51–100 of 10,001')")
    page.wait_for_selector("tbody tr:first-child:has-text('Tenant-09949')")
    address = page.url
    page.reload()
    page.wait_for_selector("tbody tr:first-child:has-text('Tenant-09949')")
    # Eleven replies of a thousand rows.
    with page.expect_download(timeout=90_000) as download:
        page.get_by_role("button", name="Save as CSV").click()
    table = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    observed.context.close()

    assert 50 == first
    assert "Tenant-07777" == one
    assert "Filter: Tenants" == focused
    assert "sort=-tokens" in address
    assert "page=2" in address
    assert MANY + 1 == len(table)
    assert ("Tenant-09999", "9999") == (table[0]["Tenant"], table[0]["Tokens today"])


def test_ten_thousand_tenants_fit_a_phone(browser: Any, crowded: Served) -> None:
    observed = opened(browser, crowded, "tenants", viewport=PHONE)
    observed.page.wait_for_selector("[role=status]:text-is('1–50 of 10,001')")
    width, height = size_of(observed.page)
    observed.context.close()

    assert 400 == width
    assert height <= HEIGHT_MAX
