"""The pages of the console at /ui: charts, changes that operators make, calls, usage, and accessibility."""

import csv
import io
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.tenants.keyring import key_digest
from tests.browser.conftest import ObservedPage
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served
from tests.quotas.redis_server import RedisServer

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPERATOR = "sk-operator"
AXE = Path(__file__).parents[2] / "gateway/api/operators/console/node_modules/axe-core/axe.min.js"
TITLES = (
    "Overview",
    "Upstreams",
    "Models",
    "Tenants and keys",
    "Recent calls",
    "Jobs",
    "Playground",
    "My key",
)
CONFIG = """
listen: 127.0.0.1:0
workers: {workers}
quotas: {{store: "{store}"}}
state_dir: {state}
batches: {{dir: {state}/batches}}
upstreams: {{first: {{backend: tei, replicas: ["{url}"]}}}}
currency: EUR
models: {{bge: {{upstream: first, price_per_million_tokens: 20}}}}
admin: {{keys: [{{digest: "{operator}", id: ops, scopes: [embed, rerank, tokenize, metrics, admin]}}]}}
"""


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with serve_in_thread(FakeTei()) as url:
        yield url


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, upstream: str) -> Iterator[Served]:
    """Start two workers, so that each page must show what both did."""
    folder = tmp_path_factory.mktemp("console")
    with ExitStack() as resources:
        redis = RedisServer(folder)
        resources.callback(redis.stop)
        path = write_config(folder, upstream, redis.url, 2)
        process = Served(path).wait_until_up()
        resources.callback(process.stop)
        yield process


def write_config(folder: Path, upstream: str, store: str, workers: int) -> Path:
    """Write a configuration with an operator's key."""
    path = folder / "router.yaml"
    settings = {"store": store, "workers": workers, "state": folder / "state", "url": upstream}
    path.write_text(CONFIG.format(operator=key_digest(OPERATOR), **settings))
    return path


@pytest.fixture
def console(browser: Any, gateway: Served) -> Iterator[ObservedPage]:
    """Open the console with an operator's key."""
    observed = ObservedPage(browser, gateway.url)
    observed.use_key(OPERATOR)
    observed.page.wait_for_selector("#lanes tbody tr")
    # The browser reports that a key was asked for at first.
    observed.complaints.clear()
    yield observed
    observed.context.close()


def axe_script() -> str:
    """Return axe-core, or skip the test if it is not installed."""
    if not AXE.exists():
        pytest.skip("make .venv/installed-browser installs axe-core with npm")
    return AXE.read_text()


def rows(page: Any, selector: str) -> list[list[str]]:
    """Return the texts of a table's cells, by row."""
    return [
        [cell.inner_text() for cell in row.query_selector_all("td")]
        for row in page.query_selector_all(f"{selector} tbody tr")
    ]


def make_tenant(page: Any, name: str, limits: str = "") -> None:
    """Make a tenant on the page of tenants."""
    page.get_by_label("Name of the tenant").fill(name)
    page.get_by_label("Limits of the tenant").fill(limits)
    page.get_by_role("button", name="Save the tenant").click()
    page.wait_for_selector(f"#stored-tenants tbody tr:has-text('{name}')")


def make_key(console: ObservedPage, tenant: str, id_: str) -> str:
    """Make a key on the page of tenants, and return its text."""
    page = console.page
    page.get_by_label("Tenant of the key").fill(tenant)
    page.get_by_label("Id", exact=True).fill(id_)
    page.get_by_role("button", name="Make the key").click()
    return str(page.inner_text("#key-answer code"))


def test_makes_and_revokes_a_key_that_works_at_once(console: ObservedPage, gateway: Served) -> None:
    page = console.page
    console.show("Tenants and keys")
    make_tenant(page, "acme", "tokens_per_day: 100_000\nrequests_per_minute: 60")
    text = make_key(console, "acme", "laptop")
    page.wait_for_selector("#keys tbody tr:has-text('laptop')")
    with gateway.client() as client:
        headers = {"authorization": f"Bearer {text}"}
        made = call_until(client, headers, 200)
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Revoke laptop").click()
        page.wait_for_selector("#revoke-answer:has-text('laptop is revoked')")
        refused = call_until(client, headers, 401)

    assert made.status_code == 200, made.text
    assert made.headers["x-ratelimit-limit-tokens"] == "100000"
    assert refused.status_code == 401
    assert console.complaints == []


def call_until(client: httpx.Client, headers: dict[str, str], status: int) -> httpx.Response:
    """Call until a worker answers with a status: the others learn of a change within a second."""
    deadline_s = time.monotonic() + 5
    while True:
        reply = client.post("/v1/embeddings", json={"model": "bge", "input": "a"}, headers=headers)
        if reply.status_code == status or time.monotonic() > deadline_s:
            return reply


def test_keys_are_kept_over_a_restart(browser: Any, tmp_path: Path, upstream: str) -> None:
    path = write_config(tmp_path, upstream, "memory", 1)
    first = Served(path).wait_until_up()
    try:
        console = ObservedPage(browser, first.url, "tenants")
        console.use_key(OPERATOR)
        make_tenant(console.page, "acme")
        text = make_key(console, "acme", "kept")
        console.context.close()
    finally:
        first.stop()
    second = Served(path).wait_until_up()
    try:
        with second.client() as client:
            reply = client.post(
                "/v1/embeddings",
                json={"model": "bge", "input": "a"},
                headers={"authorization": f"Bearer {text}"},
            )
    finally:
        second.stop()

    assert reply.status_code == 200, reply.text
    assert text not in (tmp_path / "state" / "tenants.json").read_text()


def test_mistakes_in_a_form_are_told_next_to_it(console: ObservedPage) -> None:
    page = console.page
    console.show("Tenants and keys")
    page.get_by_label("Name of the tenant").fill("acme")
    for text, told in (("tokens_per_day", "name and a number"), ("tokens_per_dy: 5", "tokens_per_dy")):
        page.get_by_label("Limits of the tenant").fill(text)
        page.get_by_role("button", name="Save the tenant").click()
        page.wait_for_selector(f"#tenant-answer .problem:has-text('{told}')")


def test_an_edit_of_a_tenant_that_another_operator_has_changed_is_refused(
    console: ObservedPage, gateway: Served
) -> None:
    page, path = console.page, "/admin/tenants/shared"
    console.show("Tenants and keys")
    make_tenant(page, "shared", "tokens_per_day: 5")
    headers = {"authorization": f"Bearer {OPERATOR}"}
    limits = page.get_by_label("Limits of the tenant")
    with gateway.client() as client:
        page.get_by_role("button", name="Edit shared").click()
        client.patch(path, json={"weight": 7}, headers=headers).raise_for_status()
        limits.fill("tokens_per_day: 6")
        page.get_by_role("button", name="Save the tenant").click()
        page.wait_for_selector("#tenant-answer .problem:has-text('shared was changed meanwhile')")
        kept = client.get(path, headers=headers).json()["settings"]
        # The list is read again: the next edit starts from what is there now.
        page.wait_for_selector("#stored-tenants tbody tr:has-text('shared'):has-text('7')")
        page.get_by_role("button", name="Edit shared").click()
        limits.fill("tokens_per_day: 6")
        page.get_by_role("button", name="Save the tenant").click()
        page.wait_for_selector("#tenant-answer:has-text('shared is saved')")
        saved = client.get(path, headers=headers).json()["settings"]

    assert [(7, {"tokens_per_day": 5}), (7, {"tokens_per_day": 6})] == [
        (settings["weight"], settings["limits"]) for settings in (kept, saved)
    ]


def test_adds_changes_and_removes_an_upstream(console: ObservedPage, upstream: str) -> None:
    page = console.page
    console.show("Upstreams")
    page.get_by_label("Name of the upstream").fill("second")
    page.get_by_label("Addresses of its replicas, one a line").fill(upstream)
    page.get_by_label("Serve it as the model").fill("org/second")
    page.get_by_role("button", name="Save the upstream").click()
    page.wait_for_selector("#added-upstreams tbody tr:has-text('second')")
    page.wait_for_selector("#replicas tbody tr:has-text('second')")
    console.show("Models")
    page.wait_for_selector("#models tbody tr:has-text('org/second')")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Remove org/second").click()
    page.wait_for_selector("#models tbody tr:has-text('org/second')", state="detached")
    console.show("Upstreams")
    page.get_by_role("button", name="Edit second").click()
    page.get_by_label("Window: batches in flight to a replica").fill("3")
    page.get_by_label("Serve it as the model").fill("")
    page.get_by_role("button", name="Save the upstream").click()
    page.wait_for_selector("#added-upstreams tbody tr:has-text('\"in_flight_batches\":3')")
    page.get_by_role("button", name="Remove second").click()
    page.wait_for_selector("#replicas tbody tr:has-text('second')", state="detached")
    page.get_by_role("button", name="Read router.yaml again").click()
    page.wait_for_selector("#reload-answer:has-text('Nothing has changed')")

    assert console.complaints == []


def test_usage_is_shown_and_downloaded(console: ObservedPage, gateway: Served) -> None:
    console.show("Tenants and keys")
    make_tenant_with_usage(console, gateway)
    console.page.get_by_label("Only the tenant").fill("counted")
    console.page.wait_for_selector("#usage tbody tr:has-text('counted')")
    with console.page.expect_download() as download:
        console.page.get_by_role("button", name="Download as CSV").click()
    table = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))

    header = console.page.inner_text("#usage thead")

    assert "cost (EUR)" in header
    assert [("counted", "bge", "1")] == [(row["tenant"], row["model"], row["requests"]) for row in table]
    assert all(float(row["cost"]) > 0 for row in table)
    assert console.complaints == []


def make_tenant_with_usage(console: ObservedPage, gateway: Served) -> None:
    """Make a tenant with a key that has called once."""
    make_tenant(console.page, "counted", "budget_per_month: 250.5")
    console.page.wait_for_selector(
        "#stored-tenants tr:has-text('counted'):has-text('budget_per_month: 250.5')"
    )
    text = make_key(console, "counted", "counted-key")
    with gateway.client() as client:
        assert call_until(client, {"authorization": f"Bearer {text}"}, 200).status_code == 200


def test_marks_keys_whose_tenant_is_not_defined(console: ObservedPage) -> None:
    console.show("Tenants and keys")
    make_tenant(console.page, "defined")
    make_key(console, "defined", "accepted")
    make_key(console, "nowhere", "denied")
    console.page.wait_for_selector(
        "#keys tr:has-text('denied'):has-text('nowhere') .state:text-is('not defined')"
    )
    console.page.wait_for_selector("#keys tr:has-text('accepted'):has-text('defined')")

    assert 0 == console.page.locator("#keys tr:has-text('accepted') .state").count()


def test_shows_the_width_and_the_price_of_models(console: ObservedPage) -> None:
    console.show("Models")
    console.page.wait_for_selector("#models tbody tr")
    header = console.page.locator("#models th").all_inner_texts()
    (cells,) = (row for row in rows(console.page, "#models") if row[0] == "bge")

    assert ("8", "20.00") == (
        cells[header.index("width")],
        cells[header.index("EUR per million tokens")],
    )


def test_shows_tenants_of_the_file_and_what_is_left(browser: Any, tmp_path: Path, upstream: str) -> None:
    path = write_config(tmp_path, upstream, "memory", 1)
    limits = (
        "limits: {budget_per_month: 250, tokens_per_day: 1000}, model_limits: {bge: {requests_per_day: 9}}"
    )
    path.write_text(f"{path.read_text()}tenants: {{filed: {{{limits}}}}}\n")
    gateway = Served(path).wait_until_up()
    try:
        observed = ObservedPage(browser, gateway.url, "tenants")
        observed.use_key(OPERATOR)
        observed.page.wait_for_selector("#file-tenants tbody tr")
        (shown,) = rows(observed.page, "#file-tenants")
        buttons = observed.page.locator("#file-tenants button").count()
        make_tenant(observed.page, "stored", "budget_per_day: 3")
        observed.page.wait_for_selector("#stored-tenants td:text-is('budget_per_day: 3.00') >> nth=1")
        observed.context.close()
    finally:
        gateway.stop()

    assert shown == [
        "filed",
        "all",
        "budget_per_month: 250.00, tokens_per_day: 1,000, model bge requests_per_day: 9",
        "1",
        "interactive",
        "budget_per_month: 250.00",
    ]
    assert buttons == 0


def new_tenant(client: httpx.Client, name: str, **limits: int) -> str:
    """Make a tenant, let the client use a key of it, and return the key."""
    client.headers["authorization"] = f"Bearer {OPERATOR}"
    client.put(f"/admin/tenants/{name}", json={"limits": limits}).raise_for_status()
    text = client.post("/admin/keys", json={"tenant": name, "id": name}).json()["key"]
    client.headers["authorization"] = f"Bearer {text}"
    return str(text)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_no_page_has_an_accessibility_violation(
    browser: Any, gateway: Served, scheme: str, width: int
) -> None:
    script = axe_script()
    observed = ObservedPage(
        browser, gateway.url, color_scheme=scheme, viewport={"width": width, "height": 800}
    )
    observed.use_key(OPERATOR)
    observed.page.wait_for_selector("#lanes tbody tr")
    observed.page.evaluate(script)
    found = {}
    for title in TITLES:
        observed.show(title)
        observed.page.wait_for_selector("main h3, main table, main .note")
        if title == "Upstreams":
            observed.page.get_by_role("button", name="Verify").click()
            observed.page.wait_for_selector("#verify-members")
        if title == "Playground":
            observed.page.get_by_role("button", name="Embed").click()
            observed.page.wait_for_selector("#embed-answer table.heat")
        report = observed.page.evaluate("axe.run()")
        found[title] = [
            (violation["id"], violation["nodes"][0]["target"]) for violation in report["violations"]
        ]
    observed.context.close()

    assert {} == {title: violations for title, violations in found.items() if violations}
