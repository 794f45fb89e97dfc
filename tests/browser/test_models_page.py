"""The console's page of models: those served, their names, the models of this host, and one model's page."""

import json
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.browser.conftest import ObservedPage
from tests.browser.model_stand import LONG, OPERATOR, READER, SLASHED, Stand, opened, violations, width_of

pytestmark = [pytest.mark.browser, pytest.mark.slow]

FROM_THE_RIGHT, HAN = "نموذج-التضمين", "模型-埋め込み"
MANY = 1000


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with ExitStack() as resources:
        yield Stand(tmp_path_factory.mktemp("models"), resources)


@pytest.fixture
def console(browser: Any, stand: Stand) -> Iterator[ObservedPage]:
    observed = opened(browser, stand, "models")
    observed.page.wait_for_selector("#models tbody tr")
    yield observed
    observed.context.close()


def cell(page: Any, model: str, title: str) -> str:
    """Return the text of a model's cell."""
    row = page.locator(f"#models tbody tr:has(a:text-is('{model}'))")
    return str(row.locator(f"td[data-label='{title}']").inner_text())


def test_shows_width_vector_space_and_price(console: ObservedPage) -> None:
    page = console.page

    assert "20.00" == cell(page, "bge", "EUR per 1M tokens")
    assert cell(page, "bge", "Vectors").startswith("8 numbers")
    assert "–" == cell(page, "ranker", "Vectors")
    assert "rerank" in cell(page, "ranker", "Operations").split("\n")
    assert "ready" == cell(page, "bge", "State")
    assert "leaving, half (canary)\ntei" == cell(page, "trial", "Served by")


def test_the_page_of_a_model_with_markup_in_its_name(console: ObservedPage, stand: Stand) -> None:
    page = console.page
    for _ in range(3):
        with stand.gateway.client() as client:
            headers = {"authorization": f"Bearer {OPERATOR}"}
            body = {"model": SLASHED, "input": "a"}
            client.post("/v1/embeddings", json=body, headers=headers).raise_for_status()
    page.get_by_role("link", name=SLASHED).click()
    page.wait_for_selector("h1:has-text('org/')")
    page.wait_for_selector("#model-replicas tbody tr")
    page.get_by_role("tab", name="Python").first.click()
    code = page.locator(".code pre").first.inner_text()

    assert SLASHED == page.inner_text("h1")
    assert f"#/models/{urllib.parse.quote(SLASHED, safe='')}" == page.evaluate("location.hash")
    assert json.dumps(SLASHED) in code
    assert 2 == page.locator("#model-replicas tbody tr").count()
    assert [] == console.complaints
    page.get_by_role("link", name="pair").first.click()
    page.wait_for_selector("h1:text-is('pair')")


def test_the_page_of_a_model_draws_its_calls(console: ObservedPage, stand: Stand) -> None:
    with stand.gateway.client() as client:
        body = {"model": "bge", "input": "drawn"}
        headers = {"authorization": f"Bearer {OPERATOR}"}
        client.post("/v1/embeddings", json=body, headers=headers).raise_for_status()
    page = console.page
    page.goto(f"{stand.gateway.url}/ui#/models/bge?range=15m")
    # The history has a minute once it is over, or at once with one process.
    page.wait_for_selector("figure[aria-label^='Calls per'] canvas", timeout=90_000)
    page.wait_for_selector("figure[aria-label^='Latency'] canvas")

    assert [] == console.complaints


def test_adds_changes_and_removes_a_name(console: ObservedPage) -> None:
    page = console.page
    page.get_by_role("button", name="New name").click()
    page.get_by_label("Name for callers").fill("bge")
    page.get_by_role("button", name="Save the name").click()
    page.wait_for_selector(".field-error:has-text('router.yaml defines it')")
    page.get_by_label("Name for callers").fill("org/new")
    page.get_by_label("Upstream", exact=True).select_option("half")
    page.get_by_label("Price of a million tokens, in EUR").fill("-3")
    page.get_by_role("button", name="Save the name").click()
    page.wait_for_selector(".field:has(label:has-text('Price')) .field-error")
    assert [] == violations(page)
    page.get_by_label("Price of a million tokens, in EUR").fill("3")
    page.get_by_role("button", name="Save the name").click()
    page.wait_for_selector(".toast:has-text('org/new is saved')")
    page.wait_for_selector("#models tr:has-text('org/new'):has-text('added here'):has-text('3.00')")
    page.get_by_role("button", name="Change org/new").click()
    page.get_by_label("Price of a million tokens, in EUR").fill("4")
    page.get_by_role("button", name="Save the name").click()
    page.wait_for_selector("#models tr:has-text('org/new'):has-text('4.00')")
    page.get_by_role("link", name="org/new").click()
    page.wait_for_selector("#model-facts pre:has-text('\"price_per_million_tokens\": 4')")
    page.get_by_role("button", name="Remove", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Remove", exact=True).click()
    page.wait_for_selector("h1:text-is('Models')")
    page.wait_for_selector("#models tr:has-text('org/new')", state="detached")


def test_lists_models_and_instances_of_this_host(console: ObservedPage, stand: Stand) -> None:
    page = console.page
    name = "org/not-there"
    with stand.gateway.client() as client:
        headers = {"authorization": f"Bearer {OPERATOR}"}
        client.post("/admin/registry", json={"model_id": name}, headers=headers).raise_for_status()
        # The engine cannot load it: the instance fails, and tells why.
        body = {"name": "small", "model_id": name}
        made = client.post("/admin/instances", json=body, headers=headers)
    page.get_by_role("tab", name="On this host").click()
    page.wait_for_selector(f"#registry tr:has-text('{name}'):has-text('available')")
    page.get_by_role("button", name="Pull a model").click()
    page.get_by_role("button", name="Pull the model").click()
    page.wait_for_selector("#pull .field-error:has-text('Write the model')")
    page.get_by_label("Model of the Hub").fill("no name of a model")
    page.get_by_role("button", name="Pull the model").click()
    page.wait_for_selector("#pull .field-error:has-text('no name of a model')")
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Instances").click()
    if made.status_code == 201:
        page.get_by_role("button", name="Logs of small").click()
        page.wait_for_selector("#instance-log pre")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Remove small").click()
        page.get_by_role("button", name="Remove", exact=True).click()
        page.wait_for_selector("#instances tr:has-text('small')", state="detached")
    page.wait_for_selector("#instances .empty:has-text('No instances')")
    assert "tab=instances" in page.url


def test_an_operator_who_only_reads_is_offered_no_change(browser: Any, stand: Stand) -> None:
    observed = opened(browser, stand, "models", READER)
    page = observed.page
    page.wait_for_selector("#models tbody tr")
    page.wait_for_selector("text=You can see everything here, and change nothing.")
    names = page.get_by_role("button").all_inner_texts()
    page.get_by_role("tab", name="On this host").click()
    page.wait_for_selector("#registry")
    names += page.get_by_role("button").all_inner_texts()
    observed.context.close()

    assert not {"New name", "Pull a model", "Download", "Check"} & set(names)


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (400, "light"), (360, "dark")]
)
def test_fits_the_screen_and_has_no_accessibility_violation(
    browser: Any, stand: Stand, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 800}
    observed = opened(browser, stand, "models", viewport=size, color_scheme=scheme)
    page = observed.page
    found = {}
    for address, seen in (
        ("models", "#models tbody tr"),
        ("models?tab=host", "#registry"),
        ("models?tab=instances", "#instances"),
        (f"models/{LONG}", "#model-replicas tbody tr"),
        ("models/trial", "#model-upstreams tbody tr"),
    ):
        page.goto(f"{stand.gateway.url}/ui#/{address}")
        page.wait_for_selector(seen)
        found[address] = (width_of(page), violations(page))
    observed.context.close()

    assert {(width, ())} == {(wide, tuple(problems)) for wide, problems in found.values()}, found


def test_finds_one_of_many_names(browser: Any, stand: Stand) -> None:
    before = stand.path.read_text()
    names = [FROM_THE_RIGHT, HAN, *(f"org/model-{number:04d}" for number in range(MANY))]
    stand.path.write_text(before + "".join(f"  '{name}': {{upstream: pair}}\n" for name in names))
    with stand.gateway.client() as client:
        headers = {"authorization": f"Bearer {OPERATOR}"}
        client.post("/admin/reload", headers=headers).raise_for_status()
    observed = opened(browser, stand, "models", viewport={"width": 400, "height": 800})
    page = observed.page
    page.wait_for_selector("#models span[role=status]:has-text('1–50 of 1,0')")
    found = []
    for name in (LONG, FROM_THE_RIGHT, HAN):
        page.get_by_label("Filter: Models").fill(name)
        page.locator("#models tbody td:first-child a").filter(has_text=name).wait_for()
        page.wait_for_selector("#models span[role=status]:text-is('1 row')")
        found.append(page.inner_text("#models tbody td:first-child a"))
    page.get_by_label("Filter: Models").fill("org/model-")
    page.wait_for_selector("#models span[role=status]:text-is('1–50 of 1,000')")
    page.get_by_role("button", name="Next page").click()
    page.wait_for_selector("#models span[role=status]:text-is('51–100 of 1,000')")
    width = width_of(page)
    observed.context.close()

    assert [LONG, FROM_THE_RIGHT, HAN] == found
    assert 400 == width


def test_a_canary_that_is_left_alone_is_in_sight(console: ObservedPage, stand: Stand) -> None:
    stand.leave.close()
    row = console.page.locator("#model-upstreams tr:has-text('leaving')")
    row.locator(".badge:text-is('unavailable')").wait_for()

    assert row.locator(".badge.tone-quiet:text-is('serving')").count() == 1
