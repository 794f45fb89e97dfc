"""The console's shell in a real browser: signing in, what a key may see, safety, and every page's form."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.tenants.keyring import key_digest
from tests.browser.conftest import MARKUP, ObservedPage, axe_script, until
from tests.processes.conftest import KEY, Served

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPERATOR = "operator-key"
TITLES = (
    "Overview",
    "Recent calls",
    "Fleet",
    "Audit",
    "Tenants",
    "Keys",
    "Models",
    "Upstreams",
    "Batches",
    "Playground",
    "My key",
)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a gateway whose status needs an operator's key, and which has no batches."""
    path = tmp_path_factory.mktemp("closed") / "router.yaml"
    path.write_text(
        f"""
listen: 127.0.0.1:0
admin: {{keys: ["{key_digest(OPERATOR)}"]}}
upstreams: {{one: {{backend: tei, replicas: ["http://127.0.0.1:1"]}}}}
models: {{bge: {{upstream: one}}}}
tenants: {{acme: {{keys: ["{key_digest(KEY)}"]}}}}
"""
    )
    gateway = Served(path).wait_until_up()
    yield gateway
    gateway.stop()


@pytest.fixture
def stranger(browser: Any, closed: Served) -> Iterator[ObservedPage]:
    """Open the console of the closed gateway without a key."""
    observed = ObservedPage(browser, closed.url)
    yield observed
    observed.context.close()


def pages_of(page: Any) -> list[str]:
    """Return the titles in the sidebar."""
    texts: list[str] = page.locator(".sidebar nav a").all_inner_texts()
    return texts


def test_asks_for_a_key_before_anything_else(stranger: ObservedPage) -> None:
    page = stranger.page
    page.get_by_role("heading", name="Sign in").wait_for()
    assert 0 == page.locator(".problem, nav").count()
    page.get_by_role("button", name="Sign in", exact=True).click()
    assert "Type or paste an API key." == page.inner_text(".field-error")
    stranger.use_key(OPERATOR)
    page.wait_for_selector("h1:text-is('Overview')")
    # It calls no models.
    until(page, "!document.querySelector('.sidebar').innerText.includes('Playground')")
    assert [title for title in TITLES if title != "Playground"] + ["API"] == pages_of(page)


def test_a_refused_key_signs_out_with_the_reason(stranger: ObservedPage) -> None:
    page = stranger.page
    # The test moves the page's clock: no timer of the page fires by itself.
    page.clock.install()
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.wait_for_selector("#sign-in-problem")
    asked = len(stranger.addresses)
    page.clock.fast_forward(10_000)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    assert "Incorrect API key provided" in page.inner_text("#sign-in-problem")
    assert "{}" == page.evaluate("JSON.stringify({...sessionStorage})")
    # A wrong key is not sent again.
    assert [] == [address for address in stranger.addresses[asked:] if "/v1/" in address]


def test_a_key_is_kept_for_the_tab_only(stranger: ObservedPage, browser: Any, closed: Served) -> None:
    page = stranger.page
    stranger.use_key(OPERATOR)
    page.wait_for_selector("h1:text-is('Overview')")
    page.reload()
    page.wait_for_selector("h1:text-is('Overview')")
    stored = page.evaluate(
        "async () => JSON.stringify([{...localStorage}, document.cookie, location.href, history.state, "
        "await indexedDB.databases(), await caches.keys()])"
    )
    other = ObservedPage(browser, closed.url)
    other.page.get_by_role("heading", name="Sign in").wait_for()
    other.context.close()

    assert OPERATOR not in stored
    assert OPERATOR == page.evaluate("sessionStorage['gateway.key']")
    assert [] == stranger.context.cookies()
    assert [] == [address for address in stranger.addresses if OPERATOR in address]
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="Sign in").wait_for()
    assert 0 == page.evaluate("sessionStorage.length")


def test_a_key_without_the_scope_sees_its_own_pages(stranger: ObservedPage) -> None:
    stranger.page.goto(stranger.page.url.split("#")[0] + "#/tenants")
    stranger.use_key(KEY)
    stranger.page.wait_for_selector("h1:text-is('My key')")
    until(stranger.page, "document.querySelectorAll('.sidebar nav a').length === 4")

    assert ["Batches", "Playground", "My key", "API"] == pages_of(stranger.page)
    assert "acme" in stranger.page.inner_text("#signed-in")


def test_a_key_that_no_header_can_hold_is_refused_here(stranger: ObservedPage) -> None:
    stranger.page.get_by_label("API key").fill("schlüssel mit leerzeichen")
    stranger.page.get_by_role("button", name="Sign in", exact=True).click()

    assert "plain letters" in stranger.page.inner_text(".field-error")
    assert "true" == stranger.page.get_by_label("API key").get_attribute("aria-invalid")


def test_operators_of_this_machine_need_no_key(watched: ObservedPage) -> None:
    watched.page.wait_for_selector("h1:text-is('Overview')")
    assert "This machine" in watched.page.inner_text("#signed-in")
    watched.show("Playground")
    watched.page.get_by_text("Sign in to try the models").wait_for()
    assert [] == watched.complaints


def test_policy_blocks_what_the_page_does_not_need(watched: ObservedPage) -> None:
    outcomes = watched.page.evaluate(
        """async () => {
            const outcomes = {};
            const met = new Promise((resolve) => addEventListener("securitypolicyviolation", resolve));
            outcomes.fetch = await fetch("http://127.0.0.2:1/").then(() => "sent", () => "stopped");
            outcomes.rule = (await met).effectiveDirective;
            try { document.body.innerHTML = "<b>x</b>"; outcomes.markup = "taken"; }
            catch { outcomes.markup = "stopped"; }
            const style = document.createElement("div");
            style.setAttribute("style", "color: red");
            outcomes.style = style.style.color || "stopped";
            return outcomes;
        }"""
    )

    assert {"fetch": "stopped", "rule": "connect-src", "markup": "stopped", "style": "stopped"} == outcomes


def test_loads_everything_from_the_gateway(ready: ObservedPage, gateway: Served) -> None:
    # This gateway has no batches, which the browser would report.
    for title in [title for title in TITLES if title != "Batches"]:
        ready.show(title)
    ready.page.wait_for_load_state("networkidle")

    assert ready.addresses
    own = (f"{gateway.url}/", "blob:")
    assert [] == [address for address in ready.addresses if not address.startswith(own)]
    assert 0 == ready.page.locator("img").count()
    assert [] == ready.complaints


def test_works_from_the_keyboard(watched: ObservedPage) -> None:
    page = watched.page
    page.wait_for_selector("h1:text-is('Overview')")
    page.keyboard.press("Tab")
    assert "Skip to the content" == page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:focus")
    page.get_by_role("link", name="Models", exact=True).focus()
    page.keyboard.press("Enter")
    # People who use a screen reader hear that the page has changed.
    page.wait_for_selector("h1:focus:text-is('Models')")
    assert "Models · Embedding gateway" == page.title()


def test_colors_follow_the_system_or_the_choice(watched: ObservedPage) -> None:
    page = watched.page
    ground = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    page.locator(".sidebar").get_by_role("button", name=re.compile("^Colors: system")).click()
    chosen = page.evaluate(ground)
    page.reload()
    page.wait_for_selector(".sidebar")

    assert light != dark
    assert light == chosen == page.evaluate(ground)


def test_reports_an_unreachable_gateway_and_recovers(ready: ObservedPage) -> None:
    ready.show("Upstreams")
    until(ready.page, "document.querySelector('main').innerText.includes('wide')")
    ready.context.set_offline(True)
    ready.page.wait_for_selector("#status-problem")
    text = ready.page.inner_text("#status-problem")
    assert "does not answer; asking again" in text
    assert "Last seen at" in text
    ready.context.set_offline(False)
    ready.page.wait_for_selector("#status-problem", state="detached")


def test_is_quiet_while_it_is_hidden(watched: ObservedPage) -> None:
    page = watched.page
    page.wait_for_selector("h1:text-is('Overview')")
    page.evaluate("Object.defineProperty(document, 'hidden', { get: () => true })")
    page.wait_for_load_state("networkidle")
    asked = len(watched.addresses)
    page.wait_for_timeout(4500)
    assert asked == len(watched.addresses)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_every_page_fits_and_has_no_violation(browser: Any, gateway: Served, width: int, scheme: str) -> None:
    view = {"width": width, "height": 800}
    watched = ObservedPage(browser, gateway.url, viewport=view, color_scheme=scheme)
    page = watched.page
    page.evaluate(f"sessionStorage.setItem('gateway.key', '{KEY}')")
    page.reload()
    found: dict[str, Any] = {}
    for title in TITLES:
        page.evaluate(f"location.hash = {watched.hash_of(title)!r}")
        page.wait_for_selector(f"h1:text-is('{title}')")
        page.wait_for_load_state("networkidle")
        until(page, "!document.querySelector('.skeleton')")
        if not page.evaluate("'axe' in window"):
            page.evaluate(axe_script())
        result = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        found[title] = [
            (violation["id"], node["html"][:200])
            for violation in result["violations"]
            for node in violation["nodes"]
        ]
        size = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        if size[0] > width or size[1] > 20 * 800:
            found[title].append(("size", size))
    watched.context.close()

    assert {} == {title: problems for title, problems in found.items() if problems}
    assert [] == [text for text in watched.complaints if "Security Policy" in text or "Trusted" in text]


def test_shows_markup_in_names_as_text(ready: ObservedPage) -> None:
    for title in ("Tenants", "Models"):
        ready.show(title)
        ready.page.get_by_text(MARKUP).first.wait_for()
    assert 0 == ready.page.locator("img").count()
    assert [] == ready.complaints
