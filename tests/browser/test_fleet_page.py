"""The console's fleet: gateways on one Redis that differ, one that is taken out, and one that is alone."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.tenants.keyring import key_digest
from tests.browser.conftest import ObservedPage, axe_script
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served
from tests.quotas.redis_server import RedisServer

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPERATOR, READER = "sk-operator", "sk-reader"
CONFIG = """
listen: 127.0.0.1:0
{store}
upstreams: {{first: {{backend: tei, replicas: ["{url}"]}}}}
models: {{bge: {{upstream: first}}{more}}}
admin:
  keys:
    - {{digest: "{operator}", id: ops, scopes: [admin]}}
    - {{digest: "{reader}", id: reader, scopes: ["admin:read"]}}
"""


def started(folder: Path, url: str, store: str = "", more: str = "") -> Served:
    folder.mkdir(exist_ok=True)
    path = folder / "router.yaml"
    keys = {"operator": key_digest(OPERATOR), "reader": key_digest(READER)}
    store = store or f"state_dir: {folder}/state"
    path.write_text(CONFIG.format(store=store, url=url, more=more, **keys))
    return Served(path)


class Gateways:
    """Two gateways on one Redis, of which the second has a name of a model more, and one without a Redis."""

    def __init__(self, folder: Path, resources: ExitStack) -> None:
        url = resources.enter_context(serve_in_thread(FakeTei()))
        self.redis = RedisServer(folder)
        resources.callback(self.redis.stop)
        store = f'quotas: {{store: "{self.redis.url}"}}'
        served = (
            started(folder / "one", url, store),
            started(folder / "two", url, store, ", small: {upstream: first}"),
            started(folder / "alone", url),
        )
        for process in served:
            resources.callback(process.stop)
        self.one, self.two, self.alone = (process.wait_until_up() for process in served)


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    with ExitStack() as resources:
        yield Gateways(tmp_path_factory.mktemp("fleet"), resources)


def opened(browser: Any, gateway: Served, key: str = OPERATOR, **options: Any) -> ObservedPage:
    observed = ObservedPage(browser, gateway.url, "fleet", **options)
    # As after a reload: on a phone the buttons of the sidebar are hidden.
    observed.page.evaluate("key => sessionStorage.setItem('gateway.key', key)", key)
    observed.page.reload()
    observed.page.wait_for_selector("#fleet tbody tr")
    # The browser reports that a key was asked for at first.
    observed.complaints.clear()
    return observed


def port_of(gateway: Served) -> str:
    return gateway.url.rpartition(":")[2]


def test_marks_what_differs_and_who_answers(browser: Any, gateways: Gateways) -> None:
    observed = opened(browser, gateways.one)
    page = observed.page
    page.wait_for_selector("#fleet tbody tr:nth-child(2)")
    own = page.locator(f"#fleet tbody tr:has-text(':{port_of(gateways.one)}')")
    other = page.locator(f"#fleet tbody tr:has-text(':{port_of(gateways.two)}')")
    own.get_by_text("answers this page").wait_for()
    other.get_by_text("differs in models").wait_for()
    # A gateway reports every few seconds whether it is ready.
    page.wait_for_selector("#fleet-figures:has-text('2 of 2')")
    figures = page.inner_text("#fleet-figures")
    observed.context.close()

    assert "marked where a gateway differs" in figures
    assert [] == observed.complaints


def test_takes_the_gateway_out_and_puts_it_back(browser: Any, gateways: Gateways) -> None:
    observed = opened(browser, gateways.one)
    page = observed.page
    page.get_by_role("button", name="Take this gateway out").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    with gateways.one.client() as client:
        assert 200 == client.get("/readyz").status_code
        page.get_by_role("button", name="Take this gateway out").click()
        page.get_by_role("dialog").get_by_role("button", name="Take it out").click()
        page.wait_for_selector(".toast:has-text('was taken out')")
        page.wait_for_selector(f"#fleet tr:has-text(':{port_of(gateways.one)}') :text('drained')")
        assert 503 == client.get("/readyz").status_code
        page.get_by_role("button", name="Put this gateway back").click()
        page.get_by_role("dialog").get_by_role("button", name="Put it back").click()
        page.wait_for_selector(".toast:has-text('was put back')")
        page.get_by_role("button", name="Take this gateway out").wait_for()
        assert 200 == client.get("/readyz").status_code
    observed.context.close()
    assert [] == observed.complaints


def test_a_reader_sees_all_and_changes_nothing(browser: Any, gateways: Gateways) -> None:
    observed = opened(browser, gateways.one, READER)
    observed.page.wait_for_selector("#fleet tbody tr:nth-child(2)")
    observed.page.get_by_role("button", name="Take this gateway out").wait_for(state="detached")
    observed.context.close()


def test_a_gateway_without_redis_says_how_to_share_one(browser: Any, gateways: Gateways) -> None:
    observed = opened(browser, gateways.alone)
    page = observed.page
    page.wait_for_selector("#fleet-alone:has-text('store: redis://')")
    page.get_by_role("button", name="Take this gateway out").click()
    warned = page.inner_text("dialog[open]")
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    focused = page.evaluate("document.activeElement.innerText")
    observed.context.close()

    assert "the only gateway that is ready" in warned
    assert "Take this gateway out" in focused


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_is_accessible_and_no_wider_than_the_screen(
    browser: Any, gateways: Gateways, scheme: str, width: int
) -> None:
    script = axe_script()
    found, widths = {}, {}
    for name, served in (("shared", gateways.one), ("alone", gateways.alone)):
        observed = opened(browser, served, color_scheme=scheme, viewport={"width": width, "height": 800})
        observed.page.evaluate(script)
        report = observed.page.evaluate("axe.run()")
        found[name] = [(each["id"], each["nodes"][0]["target"]) for each in report["violations"]]
        widths[name] = observed.page.evaluate("document.documentElement.scrollWidth")
        observed.context.close()

    assert {"shared": [], "alone": []} == found
    assert {width} == set(widths.values())


def test_shows_why_the_others_are_not_known(browser: Any, gateways: Gateways) -> None:
    """Last of this file: it ends Redis."""
    observed = opened(browser, gateways.one)
    gateways.redis.stop()
    observed.page.wait_for_selector(
        "#fleet-problem:has-text('Other gateways are not known now')", timeout=30_000
    )
    rows = observed.page.locator("#fleet tbody tr").count()
    observed.show("Overview")
    observed.page.wait_for_selector(
        "#troubles a[href='#/fleet']:has-text('The quota store is unavailable')", timeout=30_000
    )
    observed.context.close()

    assert 1 == rows
