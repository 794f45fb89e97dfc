"""The console's overview: health, numbers, charts of the kept history, the busiest, what failed, lanes."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.tenants.keyring import key_digest
from tests.browser.conftest import ObservedPage, axe_script, until
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPERATOR = "sk-operator"
CALLER = "sk-caller"
LONG = "租户-" + "x" * 120
CONFIG = """
listen: 127.0.0.1:0
state_dir: {state}
currency: EUR
upstreams:
{upstreams}
models:
{models}
tenants: {{'{tenant}': {{keys: ["{caller}"], limits: {{requests_per_day: 9}}}}}}
admin: {{keys: [{{digest: "{operator}", id: ops, scopes: [embed, rerank, admin]}}]}}
"""
# Without the unit of time, which depends on the numbers.
ALL_CHARTS = ["Calls", "Latency of interactive calls", "Failures", "Tokens", "Cost", "Waiting and in flight"]


def started(folder: Path, upstreams: str, models: str) -> Served:
    path = folder / "router.yaml"
    path.write_text(
        CONFIG.format(
            state=folder / "state",
            upstreams=upstreams,
            models=models,
            tenant=LONG,
            caller=key_digest(CALLER),
            operator=key_digest(OPERATOR),
        )
    )
    return Served(path).wait_until_up()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a gateway on which all is well, and which has got no call."""
    with serve_in_thread(FakeTei()) as url:
        upstreams = f'  first: {{backend: tei, replicas: ["{url}"], limits: {{requests_per_minute: 500}}}}'
        models = "  bge: {upstream: first, price_per_million_tokens: 20}"
        process = started(tmp_path_factory.mktemp("overview"), upstreams, models)
        yield process
        process.stop()


class Troubled:
    """A gateway with a drained replica, one that is away, and a model without a replica."""

    def __init__(self, folder: Path, resources: ExitStack) -> None:
        self.one, two, half = (resources.enter_context(serve_in_thread(FakeTei())) for _ in range(3))
        self.leave = resources.enter_context(ExitStack())
        leaving = self.leave.enter_context(serve_in_thread(FakeTei()))
        upstreams = (
            f'  pair: {{backend: tei, replicas: ["{self.one}", "{two}"]}}\n'
            f'  half: {{backend: tei, replicas: ["{half}", "http://127.0.0.1:1"]}}\n'
            f'  gone: {{backend: tei, replicas: ["http://127.0.0.1:1", "http://127.0.0.1:2"]}}\n'
            f'  leaving: {{backend: tei, replicas: ["{leaving}"]}}'
        )
        models = (
            "  bge: {upstream: pair}\n  broken: {upstream: gone}\n"
            "  trial: {upstream: leaving, canary: {name: half, share: 0.5}}"
        )
        self.gateway = started(folder, upstreams, models)
        resources.callback(self.gateway.stop)


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troubled]:
    with ExitStack() as resources:
        yield Troubled(tmp_path_factory.mktemp("troubled"), resources)


def opened(browser: Any, gateway: Served, view: str = "overview", **options: Any) -> ObservedPage:
    """Open the overview with the operator's key."""
    observed = ObservedPage(browser, gateway.url, view, **options)
    # As after a reload: on a phone the buttons of the sidebar are hidden.
    observed.page.evaluate("key => sessionStorage.setItem('gateway.key', key)", OPERATOR)
    observed.page.reload()
    observed.page.wait_for_selector("#lanes tbody tr")
    # The browser reports that a key was asked for at first.
    observed.complaints.clear()
    return observed


@pytest.fixture
def overview(browser: Any, gateway: Served) -> Iterator[ObservedPage]:
    observed = opened(browser, gateway)
    yield observed
    assert [] == observed.complaints
    observed.context.close()


def chart_titles(page: Any) -> list[str]:
    labels = [chart.get_attribute("aria-label") for chart in page.query_selector_all("#charts [role=img]")]
    return [label.partition(":")[0].partition(" per ")[0] for label in labels]


def are_drawn(page: Any) -> list[bool]:
    """Return for each chart whether there is something on its canvas."""
    found: list[bool] = page.eval_on_selector_all(
        "#charts canvas",
        """all => all.map(canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height)
            .data.some(Boolean))""",
    )
    return found


def test_a_gateway_without_calls_is_well_and_says_what_comes(overview: ObservedPage) -> None:
    page = overview.page
    page.wait_for_selector("#health:has-text('All is well')")
    page.wait_for_selector("#busiest-tenants:has-text('No calls in this time')")
    page.wait_for_selector("#busiest-models:has-text('No calls in this time')")
    page.wait_for_selector("#failed-calls:has-text('Nothing failed')")
    page.wait_for_selector("#charts:has-text('Every call succeeded in this time')")
    facts = page.inner_text("#health")
    page.locator("#busiest-models").get_by_role("link", name="Try a model").click()
    page.wait_for_selector("h1:text-is('Playground')")

    assert "1 model ready · 1 replica up" in facts
    assert 0 == page.locator("#troubles").count()


@pytest.fixture(scope="module")
def called(gateway: Served) -> Served:
    """Send calls that succeed, calls that a limit refuses, and one for a model that is not there."""
    with gateway.client() as client:
        headers = {"authorization": f"Bearer {CALLER}"}
        statuses = [
            client.post(
                "/v1/embeddings", json={"model": model, "input": "a b c"}, headers=headers
            ).status_code
            for model in ("bge", "bge", "bge", "nowhere", *("bge",) * 8)
        ]
    assert {200, 404, 429} == set(statuses)
    return gateway


def test_shows_who_calls_and_what_failed(overview: ObservedPage, called: Served) -> None:
    page = overview.page
    page.wait_for_selector("#failed-calls li:has-text('quota exceeded')", timeout=30_000)
    page.wait_for_selector("#busiest-tenants li", timeout=30_000)
    failed = page.locator("#failed-calls li a").evaluate_all(
        "links => links.map(link => [link.innerText.split('\\n')[0], link.getAttribute('href')])"
    )
    shown, address = page.locator("#busiest-tenants li a").first.evaluate(
        "link => [link.innerText, link.getAttribute('href')]"
    )
    page.wait_for_selector("#figures:has-text('refused by limits')", timeout=30_000)
    troubles = page.locator("#troubles").count()
    page.locator("#busiest-tenants").get_by_role("button", name="Cost").click()
    page.wait_for_selector("#busiest-tenants li:has-text('EUR')")
    page.locator("#busiest-models li a").first.click()
    page.wait_for_selector("h1:has-text('bge')")

    rows = dict(failed)
    assert {"quota exceeded", "model not found"} == rows.keys()
    assert "#/calls?failed=true&model=bge&tenant=" in rows["quota exceeded"]
    assert LONG in shown
    assert "refused" in shown
    assert address.startswith("#/tenants/")
    # Refusals and mistakes of callers are no trouble of the gateway.
    assert 0 == troubles


def test_draws_the_charts(overview: ObservedPage, called: Served) -> None:
    page = overview.page
    until(page, "document.querySelectorAll('#charts [role=img]').length === 6")
    titles, drawn = chart_titles(page), are_drawn(page)
    page.get_by_text("As a table").first.click()
    columns = page.locator("#charts figure thead").first.inner_text()

    assert sorted(ALL_CHARTS) == sorted(titles)
    assert [True] * 6 == drawn
    assert all(name in columns for name in ("ok", "refused by limits", "failed"))


def test_ranges_and_zoom_are_in_the_address(overview: ObservedPage, called: Served) -> None:
    page = overview.page
    with page.expect_response(lambda reply: "/admin/history?range=7d" in reply.url) as replied:
        page.get_by_role("button", name="7d", exact=True).click()
    assert 200 == replied.value.status
    assert "range=7d" in page.url
    page.get_by_role("button", name="1h", exact=True).click()
    # While the history is read, the chart of what waits, which has no zoom, is the only one.
    plot = page.locator("#charts figure[aria-label^='Calls per'] .u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    with page.expect_response(lambda reply: "/admin/history?from=" in reply.url) as zoomed:
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 40, steps=4)
        page.mouse.up()
    content = zoomed.value.json()
    assert 25 * 60 <= content["until_s"] - content["from_s"] <= 35 * 60
    page.get_by_role("button", name="Leave the zoom").click()
    until(page, "!location.hash.includes('from=')")


def test_keeps_the_selection_while_the_status_changes(overview: ObservedPage) -> None:
    page = overview.page
    page.evaluate("getSelection().selectAllChildren(document.getElementById('lanes'))")
    selected = page.evaluate("String(getSelection())")
    for _ in range(2):
        with page.expect_response(lambda reply: "/admin/status" in reply.url):
            pass
    assert "Attempt p50" in selected
    assert selected == page.evaluate("String(getSelection())")
    assert "500 requests per minute" in selected


def test_times_have_a_zone(browser: Any, gateway: Served) -> None:
    observed = opened(browser, gateway, timezone_id="Asia/Kathmandu")
    observed.page.wait_for_selector(".page-foot:has-text('GMT+5:45, Asia')")
    title = observed.page.title()
    observed.context.close()

    assert "Overview · Embedding gateway" == title


def test_a_gateway_that_was_taken_out_is_a_trouble(overview: ObservedPage, gateway: Served) -> None:
    page = overview.page
    with gateway.client() as client:
        headers = {"authorization": f"Bearer {OPERATOR}"}
        assert 200 == client.post("/admin/drain", headers=headers).status_code
        page.wait_for_selector("#troubles a[href='#/fleet']:has-text('This gateway was taken out')")
        assert 200 == client.post("/admin/undrain", headers=headers).status_code
    page.wait_for_selector("#health:has-text('All is well')")


def test_lists_troubles_with_links_to_where_they_are_mended(browser: Any, troubled: Troubled) -> None:
    observed = opened(browser, troubled.gateway)
    page = observed.page
    with troubled.gateway.client() as client:
        headers = {"authorization": f"Bearer {OPERATOR}"}
        body = {"upstream": "pair", "replica": troubled.one}
        assert 200 == client.post("/admin/replicas/drain", json=body, headers=headers).status_code
    troubled.leave.close()
    page.wait_for_selector(
        f"#troubles a[href='#/upstreams/pair']:has-text('Replica {troubled.one} of pair is drained')"
    )
    page.wait_for_selector("#troubles a[href='#/upstreams/half']:has-text('no connection to the replica')")
    page.wait_for_selector(
        "#troubles a[href='#/upstreams/gone']:has-text('2 of 2 replicas of gone are down')"
    )
    page.wait_for_selector("#troubles a[href='#/models/broken']:has-text('Model broken is unavailable')")
    more = page.get_by_role("button", name="more")
    page.wait_for_selector("#health button")
    more.click()
    page.wait_for_selector(
        "#troubles a[href='#/models/trial']"
        ":has-text('Calls of trial fail: upstream leaving has no replica in use')"
    )
    tones = page.locator("#troubles a").evaluate_all("links => links.map(link => link.className)")
    page.wait_for_selector("#changes .timeline .tone-bad:has-text('down')")
    observed.context.close()

    # The worst ones first.
    assert sorted(tones, key=lambda name: "tone-bad" not in name) == tones
    assert any("tone-warn" in name for name in tones)
    assert [] == observed.complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_is_accessible_and_no_wider_than_the_screen(
    browser: Any, gateway: Served, troubled: Troubled, scheme: str, width: int
) -> None:
    script = axe_script()
    found, widths = {}, {}
    for name, served in (("well", gateway), ("troubled", troubled.gateway)):
        observed = opened(browser, served, color_scheme=scheme, viewport={"width": width, "height": 800})
        page = observed.page
        page.wait_for_selector("#busiest-models :is(li, .empty)")
        page.wait_for_selector("#failed-calls :is(li, .empty)")
        page.evaluate(script)
        report = page.evaluate("axe.run()")
        found[name] = [(each["id"], each["nodes"][0]["target"]) for each in report["violations"]]
        widths[name] = page.evaluate("document.documentElement.scrollWidth")
        observed.context.close()

    assert {"well": [], "troubled": []} == found
    assert {width} == set(widths.values())
