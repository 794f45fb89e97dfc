"""Sign-in at the console by a real issuer, in a browser: operators, users, strangers, sign-out, expiry."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.tenants.keyring import key_digest
from tests.browser.conftest import ObservedPage
from tests.fakes.real_issuer import RealIssuer, free_port
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CONFIG = """
listen: 127.0.0.1:{port}
state_dir: {state}
upstreams: {{first: {{backend: tei, replicas: ["{url}"]}}}}
models: {{bge: {{upstream: first}}}}
tenants: {{acme: {{limits: {{requests_per_minute: 77}}}}}}
admin: {{keys: ["{operator}"]}}
sign_on:
  staff:
    issuer: {issuer}
    audience: [gateway-test]
    claims: &claims
      tenant: {{claim: groups, values: {{admins: operators, search: acme}}}}
      scopes: {{claim: groups, values: {{admins: [admin, metrics], search: [embed]}}}}
    console: {{client_id: console-test}}
  brief:
    issuer: {brief}
    audience: [gateway-test]
    claims: *claims
    console: {{client_id: console-test}}
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a gateway with two issuers; the tokens of one are valid for three seconds."""
    folder: Path = tmp_path_factory.mktemp("sign_in")
    port = free_port()
    consoles = [f"http://127.0.0.1:{port}/ui"]
    staff, brief = RealIssuer(consoles), RealIssuer(consoles, id_token_s=3)
    with serve_in_thread(FakeTei()) as url:
        path = folder / "router.yaml"
        addresses = {"issuer": staff.address, "brief": brief.address}
        path.write_text(
            CONFIG.format(port=port, state=folder, url=url, operator=key_digest("sk-op"), **addresses)
        )
        process = Served(path).wait_until_up()
        yield process
        process.stop()
    staff.stop()
    brief.stop()


@pytest.fixture
def console(browser: Any, gateway: Served) -> Iterator[ObservedPage]:
    observed = ObservedPage(browser, gateway.url)
    yield observed
    observed.context.close()
    policies = [text for text in observed.complaints if "Security Policy" in text or "Trusted" in text]
    assert [] == policies


def sign_in(page: Any, user: str, issuer: str = "staff") -> None:
    """Sign in as a person does, by the issuer's own pages."""
    page.get_by_role("button", name=f"Sign in with {issuer}").click()
    page.locator("input[name=login]").fill(user)
    page.locator("input[name=password]").fill("any")
    page.get_by_role("button", name="Sign-in").click()
    page.get_by_role("button", name="Continue").click()


def stored(page: Any) -> str:
    text: str = page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])")
    return text


def test_an_operator_signs_in_reloads_and_signs_out(console: ObservedPage, gateway: Served) -> None:
    page = console.page
    page.goto(f"{gateway.url}/ui#/upstreams")
    sign_in(page, "ada")
    page.wait_for_selector("#signed-in:has-text('staff:ada, operators')")
    # The page that the sign-in began on, without the code.
    assert f"{gateway.url}/ui#/upstreams" == page.url
    page.wait_for_selector("main table")
    assert "up" in page.inner_text("main")
    assert ("eyJ" in stored(page), "code" in stored(page)) == (False, False)

    page.reload()
    page.wait_for_selector("#signed-in:has-text('staff:ada')")
    page.wait_for_selector("main table")

    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("button", name="Yes, sign me out").click()
    page.get_by_role("button", name="Sign in with staff").wait_for()
    assert page.locator("#signed-in").count() == 0
    assert page.url.startswith(f"{gateway.url}/ui")
    page.get_by_role("button", name="Sign in with staff").click()
    # The issuer's own session has ended too: it asks who is there.
    page.locator("input[name=login]").wait_for()


def test_a_user_sees_own_limits_and_no_page_of_operators(console: ObservedPage) -> None:
    page = console.page
    sign_in(page, "tom")
    page.wait_for_selector("#signed-in:has-text('staff:tom, acme')")
    page.wait_for_selector("h1:text-is('My key')")
    page.get_by_text("77 requests per minute").wait_for()
    assert ["Batches", "Playground", "My key", "API"] == page.locator(".sidebar nav a").all_inner_texts()
    assert "staff:tom" in page.inner_text("main")


def test_a_stranger_is_told_why(console: ObservedPage) -> None:
    sign_in(console.page, "eve")
    console.page.wait_for_selector("#sign-on-problem")
    assert "no tenant is mapped" in console.page.inner_text("#sign-on-problem")
    assert console.page.locator("#signed-in").count() == 0


def test_a_person_who_cancels_is_told_so(console: ObservedPage) -> None:
    page = console.page
    page.get_by_role("button", name="Sign in with staff").click()
    page.get_by_text("Cancel").click()
    page.wait_for_selector("#sign-on-problem")
    assert "did not sign you in (access_denied)" in page.inner_text("#sign-on-problem")


@pytest.mark.parametrize("query", ["code=stolen&state=made-up", "error=x&state=", "code=a&state=b&iss=c"])
def test_an_answer_to_no_sign_in_of_this_tab_is_dropped(
    console: ObservedPage, gateway: Served, query: str
) -> None:
    posted: list[str] = []
    console.page.on(
        "request", lambda request: posted.append(request.url) if request.method == "POST" else None
    )
    console.page.goto(f"{gateway.url}/ui?{query}#/usage")
    console.page.wait_for_selector("#sign-on-problem")
    assert "not begun in this tab" in console.page.inner_text("#sign-on-problem")
    assert "?" not in console.page.url
    assert [] == posted


def test_a_sign_in_ends_with_its_token(console: ObservedPage) -> None:
    page = console.page
    sign_in(page, "tom", "brief")
    page.wait_for_selector("#sign-in-problem:has-text('has expired')")
    assert page.locator("#signed-in").count() == 0
    page.get_by_label("API key").wait_for()


def test_a_typed_key_follows_a_user(console: ObservedPage) -> None:
    page = console.page
    sign_in(page, "tom")
    page.wait_for_selector("#signed-in:has-text('staff:tom')")
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("button", name="Yes, sign me out").click()
    page.get_by_role("button", name="Sign in with staff").wait_for()
    console.use_key("sk-op")
    console.show("Upstreams")
    page.wait_for_selector("main table")
    assert "sign-on" not in stored(page)
