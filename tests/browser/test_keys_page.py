"""The page of keys: made, shown once, replaced, revoked, and what is marked in the list."""

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import ObservedPage
from tests.browser.operators import (
    DESK,
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
from tests.quotas.many_tenants import fill_folder
from tests.quotas.redis_server import RedisServer

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with serve_in_thread(FakeTei()) as url:
        yield url


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, upstream: str) -> Iterator[Served]:
    """Start two workers: a key that one makes works with the other, and shows in its lists."""
    folder = tmp_path_factory.mktemp("keys")
    with ExitStack() as resources:
        redis = RedisServer(folder)
        resources.callback(redis.stop)
        process = Served(write_config(folder, upstream, redis.url, 2)).wait_until_up()
        resources.callback(process.stop)
        with as_operator(process) as client:
            client.put("/admin/tenants/acme", json={}).raise_for_status()
        yield process


@pytest.fixture
def console(browser: Any, gateway: Served) -> Iterator[ObservedPage]:
    """Open the page of keys."""
    observed = opened(browser, gateway, "keys", viewport=DESK)
    observed.page.wait_for_selector("#keys tbody tr")
    yield observed
    observed.context.close()


def start_key(page: Any, tenant: str, id_: str) -> None:
    """Open the panel of a new key, and name its tenant and its id."""
    page.get_by_role("button", name="New key").click()
    page.get_by_label("Tenant", exact=True).fill(tenant)
    page.get_by_label("Id", exact=True).fill(id_)


def take_key(page: Any) -> str:
    """Make the key of the open panel, and return its text."""
    page.get_by_role("button", name="Make the key").click()
    key = str(page.inner_text(".secret code"))
    page.get_by_role("button", name="I have saved it").click()
    page.wait_for_selector("#created-key", state="detached")
    return key


def test_makes_and_revokes_a_key_that_works_at_once(console: ObservedPage, gateway: Served) -> None:
    page = console.page
    start_key(page, "acme", "laptop")
    page.wait_for_selector("datalist option[value='acme']", state="attached")
    key = take_key(page)
    page.wait_for_selector("#keys tbody tr:has-text('laptop'):has-text('by ops')")
    with gateway.client() as client:
        made = call_until(client, key, 200)
        page.get_by_role("button", name="Revoke laptop").click()
        page.wait_for_selector("dialog:has-text('It cannot be taken back')")
        page.get_by_role("button", name="Revoke the key").click()
        toast(page, "laptop is revoked")
        page.wait_for_selector("#keys tbody tr:has-text('laptop')", state="detached")
        refused = call_until(client, key, 401)

    assert 200 == made.status_code, made.text
    assert 401 == refused.status_code
    assert console.complaints == []


def test_a_key_has_scopes_models_limits_and_an_end(console: ObservedPage, gateway: Served) -> None:
    page = console.page
    soon = datetime.now(UTC) + timedelta(days=5)
    start_key(page, "acme", "narrow")
    page.get_by_label("Expires").fill(soon.date().isoformat())
    page.get_by_role("group", name="Scopes").get_by_label("Only these").check()
    page.get_by_role("button", name="Make the key").click()
    page.wait_for_selector(".field-error:text-is('Choose at least one scope.')")
    page.get_by_role("checkbox", name="embed").check()
    page.get_by_role("group", name="Models of the key").get_by_label("Only these").check()
    page.get_by_label("Model to add: Models of the key").fill("bge")
    page.get_by_label("Model to add: Models of the key").press("Enter")
    page.get_by_role("button", name="Add a limit").click()
    page.get_by_label("Number of limit 1").fill("60")
    take_key(page)
    row = page.locator("#keys tbody tr:has-text('narrow')")
    row.wait_for()
    with as_operator(gateway) as client:
        (stored,) = client.get("/admin/keys", params={"search": "narrow"}).json()["data"]

    assert "in 4 d" in row.inner_text()
    assert "60 requests per minute" in row.inner_text()
    assert (["embed"], ["bge"], {"requests_per_minute": 60}) == (
        stored["scopes"],
        stored["models"],
        stored["limits"],
    )


def test_mistakes_are_shown_beside_their_field(console: ObservedPage, gateway: Served) -> None:
    with as_operator(gateway) as client:
        client.post("/admin/keys", json={"tenant": "acme", "id": "there"}).raise_for_status()
    page = console.page
    start_key(page, "", "there")
    make = page.get_by_role("button", name="Make the key")
    make.click()
    page.wait_for_selector(".field-error:text-is('Choose a tenant.')")
    page.get_by_label("Tenant", exact=True).fill("acme")
    make.click()
    page.wait_for_selector(".field.wrong:has(label:text-is('Id')) .field-error:has-text('there is a key')")
    page.get_by_label("Id", exact=True).fill("late")
    page.get_by_label("Expires").fill("2020-01-01")
    make.click()
    page.wait_for_selector(".field.wrong:has(label:text-is('Expires')) .field-error:has-text('in the past')")


def test_a_key_is_shown_once_and_not_lost_by_escape(console: ObservedPage) -> None:
    page = console.page
    start_key(page, "acme", "precious")
    page.get_by_role("button", name="Make the key").click()
    key = page.inner_text(".secret code")
    page.keyboard.press("Escape")
    page.wait_for_selector("[role=alert]:has-text('The key is not shown again.')")
    page.get_by_role("button", name="Stay").click()
    page.get_by_role("button", name="I have saved it").click()
    page.wait_for_selector("#created-key", state="detached")

    assert key.startswith("gw_precious_")
    assert key not in page.content()
    assert "New key" == page.evaluate("document.activeElement.innerText.trim()")


def test_rotates_a_key_with_an_overlap(console: ObservedPage, gateway: Served) -> None:
    page = console.page
    start_key(page, "acme", "old")
    old = take_key(page)
    page.get_by_role("button", name="Rotate old").click()
    page.get_by_label("The old key stays valid for").select_option("1h")
    page.get_by_label("Id of the new key").fill("fresh")
    page.get_by_role("button", name="Rotate the key").click()
    new = page.inner_text(".secret code")
    page.get_by_role("button", name="I have saved it").click()
    page.wait_for_selector("#keys tbody tr:has-text('old'):has-text('replaced')")
    page.wait_for_selector("#keys tbody tr:has-text('fresh')")
    with gateway.client() as client:
        statuses = [call_until(client, key, 200).status_code for key in (old, new)]

    assert [200, 200] == statuses


def test_marks_keys_whose_tenant_is_not_defined(console: ObservedPage) -> None:
    page = console.page
    start_key(page, "nowhere", "denied")
    page.get_by_role("button", name="Make the key").click()
    page.wait_for_selector("#created-key .notes:has-text('nowhere')")
    page.get_by_role("button", name="I have saved it").click()
    page.wait_for_selector("#keys tr:has-text('denied') .badge:text-is('not defined')")
    start_key(page, "acme", "accepted")
    take_key(page)
    page.wait_for_selector("#keys tr:has-text('accepted')")

    assert 0 == page.locator("#keys tr:has-text('accepted') .badge").count()


def test_keys_are_kept_over_a_restart(browser: Any, tmp_path: Path, upstream: str) -> None:
    path = write_config(tmp_path, upstream)
    first = Served(path).wait_until_up()
    try:
        console = opened(browser, first, "tenants/filed")
        page = console.page
        page.get_by_role("button", name="New key").click()
        page.get_by_label("Id", exact=True).fill("kept")
        key = take_key(page)
        console.context.close()
    finally:
        first.stop()
    second = Served(path).wait_until_up()
    try:
        with second.client() as client:
            reply = call_until(client, key, 200)
    finally:
        second.stop()

    assert 200 == reply.status_code, reply.text
    assert key not in (tmp_path / "state" / "tenants.json").read_text()


def test_a_reader_and_keys_of_the_file_are_offered_no_change(browser: Any, gateway: Served) -> None:
    observed = opened(browser, gateway, "keys", READER, viewport=DESK)
    observed.page.wait_for_selector("#keys tbody tr:has-text('filed-0')")
    offered = observed.page.locator("main button:has-text('New key'), td.actions button").count()
    observed.context.close()
    other = opened(browser, gateway, "keys?q=filed", viewport=DESK)
    other.page.wait_for_selector("#keys tbody tr:has-text('filed-0')")
    of_file = other.page.locator("td.actions button").count()
    other.context.close()

    assert (0, 0) == (offered, of_file)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (400, "light")])
def test_any_name_fits_and_is_text(browser: Any, gateway: Served, width: int, scheme: str) -> None:
    with as_operator(gateway) as client:
        for number, tenant in enumerate((LONG, MARKUP)):
            client.put(f"/admin/tenants/{tenant}", json={}).raise_for_status()
            client.post("/admin/keys", json={"tenant": tenant, "id": f"odd-{width}-{number}"})
    observed = opened(browser, gateway, "keys", viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = observed.page
    page.wait_for_selector(f"#keys tbody tr:has-text('odd-{width}-1')")
    shown = set(page.locator("#keys tbody a bdi").all_inner_texts())
    found, sizes = violations(page), [size_of(page)]
    start_key(page, MARKUP, f"shown-{width}")
    found += violations(page)
    page.get_by_role("button", name="Make the key").click()
    page.wait_for_selector("#created-key pre")
    found += violations(page)
    sizes.append(size_of(page))
    complaints = observed.complaints
    observed.context.close()

    assert {LONG, MARKUP} <= shown
    assert [] == found
    assert {width} == {size[0] for size in sizes}
    assert complaints == []


def test_ten_thousand_keys_are_one_page_and_one_search(browser: Any, tmp_path: Path, upstream: str) -> None:
    fill_folder(tmp_path / "state")
    crowded = Served(write_config(tmp_path, upstream)).wait_until_up()
    try:
        observed = opened(browser, crowded, "keys", viewport=PHONE)
        page = observed.page
        page.wait_for_selector("[role=status]:text-is('1–50 of 10,003')")
        width, height = size_of(page)
        page.get_by_label("Filter: Keys").fill("key-01234")
        page.wait_for_selector("[role=status]:text-is('1 row')")
        tenant = page.inner_text("#keys tbody a bdi")
        page.get_by_role("button", name="New key").click()
        page.get_by_label("Tenant", exact=True).fill("nant-0815")
        page.wait_for_selector("datalist option[value='Tenant-08151']", state="attached")
        observed.context.close()
    finally:
        crowded.stop()

    assert 400 == width
    assert height <= HEIGHT_MAX
    assert "Tenant-01234" == tenant
