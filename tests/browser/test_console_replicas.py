"""The console with drained and compared replicas, many and long names, and a gateway that restarts."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.tenants.keyring import key_digest
from tests.browser.conftest import ObservedPage
from tests.browser.test_console import axe_script
from tests.fakes.hooks import RERANKER
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served
from tests.processes.test_admin_listener import free_port

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPERATOR = "sk-operator"
LONG, FROM_THE_RIGHT, HAN = "x" * 255, "نموذج-التضمين", "模型-埋め込み"
MANY = 1000
CONFIG = """
listen: 127.0.0.1:0
admin: {{listen: "{admin}", keys: [{{digest: "{operator}", id: ops, scopes: [{scopes}]}}]}}
state_dir: {state}
upstreams:
  pair: {{backend: tei, replicas: ["{one}", "{two}"]}}
  cross: {{backend: tei, replicas: ["{cross}"]}}
  half: {{backend: tei, replicas: ["{half}", "http://127.0.0.1:1"]}}
  leaving: {{backend: tei, replicas: ["{leaving}"]}}
models:
  bge: {{upstream: pair}}
  ranker: {{upstream: cross}}
  trial: {{upstream: leaving, canary: {{name: half, share: 0.5}}}}
{models}
"""


class Stand:
    """A gateway with two equal replicas, and its console on an address for operators."""

    def __init__(self, folder: Path, resources: ExitStack) -> None:
        servers = (FakeTei(), FakeTei(), FakeTei(model_type=RERANKER))
        self.one, self.two, cross = (resources.enter_context(serve_in_thread(server)) for server in servers)
        half = resources.enter_context(serve_in_thread(FakeTei()))
        self.leave = resources.enter_context(ExitStack())
        leaving = self.leave.enter_context(serve_in_thread(FakeTei()))
        admin = f"127.0.0.1:{free_port()}"
        self.console = f"http://{admin}"
        names = [LONG, FROM_THE_RIGHT, HAN, *(f"org/model-{number:04d}" for number in range(MANY))]
        self.path = folder / "router.yaml"
        self.path.write_text(
            CONFIG.format(
                admin=admin,
                operator=key_digest(OPERATOR),
                scopes="embed, rerank, tokenize, metrics, admin",
                state=folder / "state",
                one=self.one,
                two=self.two,
                cross=cross,
                half=half,
                leaving=leaving,
                models="\n".join(f"  '{name}': {{upstream: pair}}" for name in names),
            )
        )
        self.gateway = Served(self.path).wait_until_up()
        resources.callback(self.gateway.stop)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with ExitStack() as resources:
        yield Stand(tmp_path_factory.mktemp("replicas"), resources)


def opened(browser: Any, stand: Stand, view: str, **options: Any) -> ObservedPage:
    """Open the console with the operator's key."""
    observed = ObservedPage(browser, stand.console, view, **options)
    observed.use_key(OPERATOR)
    observed.page.wait_for_selector("#key-note:has-text('Key accepted')")
    # The browser reports that a key was asked for at first.
    observed.complaints.clear()
    return observed


@pytest.fixture
def console(browser: Any, stand: Stand) -> Iterator[ObservedPage]:
    observed = opened(browser, stand, "upstreams")
    yield observed
    observed.context.close()


def test_drains_a_replica_and_puts_it_back(console: ObservedPage, stand: Stand) -> None:
    page = console.page
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name=f"Drain {stand.one} of pair").click()
    page.wait_for_selector("#drain-answer:has-text('its server can be stopped')")
    page.wait_for_selector(f"#replicas tr:has-text('{stand.one}') .state:text-is('drained')")
    assert not console.complaints
    page.get_by_role("button", name=f"Drain {stand.two} of pair").click()
    page.wait_for_selector("#drain-answer .problem:has-text('the last replica')")
    console.show("Overview")
    page.wait_for_selector(f"#troubles:has-text('Replica {stand.one} of pair is drained')")
    console.show("Upstreams")
    page.get_by_role("button", name=f"Put back {stand.one} of pair").click()
    page.wait_for_selector(f"#replicas tr:has-text('{stand.one}') .state:text-is('up')")


def test_compares_the_vectors_of_replicas_by_keyboard(console: ObservedPage) -> None:
    page = console.page
    page.get_by_label("Upstream to compare").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#verify-findings:has-text('all that should agree does')")
    assert ["fits", "fits"] == page.locator("#verify-members .state").all_inner_texts()
    assert ["1", "1.00000", "1.00000", "1"] == page.locator("table.matrix td.number").all_inner_texts()
    assert "Done. The vectors agree." in page.locator("[role=status]").all_inner_texts()
    assert [] == console.complaints


def test_a_replica_that_is_away_is_no_difference(console: ObservedPage) -> None:
    page = console.page
    page.get_by_label("Upstream to compare").select_option("half")
    page.get_by_role("button", name="Verify").click()
    page.wait_for_selector("#verify-findings.note:has-text('1 replica could not be compared.')")
    assert "Done. 1 replica could not be compared." in page.locator("[role=status]").all_inner_texts()


def test_a_model_whose_canary_is_left_alone_is_in_trouble(console: ObservedPage, stand: Stand) -> None:
    page = console.page
    stand.leave.close()
    console.show("Overview")
    page.wait_for_selector(
        "#troubles:has-text('Calls of trial fail: upstream leaving has no replica in use')"
    )
    console.show("Models")
    row = page.locator("#model-upstreams tr:has-text('leaving')")
    assert ["unavailable"] == row.locator(".state").all_inner_texts()
    assert "serving" in row.inner_text()
    page.get_by_label("Filter: Models").fill("canary")
    assert "leaving, half (canary)" == page.inner_text("#models tbody td:nth-child(3)")


def test_the_playground_works_on_the_address_of_operators(browser: Any, stand: Stand) -> None:
    observed = opened(browser, stand, "playground")
    page = observed.page
    page.get_by_role("button", name="Embed").click()
    page.wait_for_selector("#embed-answer table.heat")
    page.get_by_role("button", name="Rerank").click()
    page.wait_for_selector("#rerank-answer tbody tr")
    said = " ".join(page.locator("[role=status]").all_inner_texts())
    observed.show("My key")
    page.wait_for_selector("#own-key:has-text('ops')")
    addresses = [
        address for address in observed.addresses if not address.startswith(("blob:", stand.console))
    ]
    complaints = observed.complaints
    observed.context.close()

    assert "Done: 5 vectors of 8 numbers" in said
    assert "Done: 4 texts. Best, " in said
    assert ([], []) == (addresses, complaints)


@pytest.mark.parametrize("width", [360, 1280])
def test_many_and_long_names_fit(browser: Any, stand: Stand, width: int) -> None:
    observed = opened(browser, stand, "models", viewport={"width": width, "height": 800})
    page = observed.page
    page.wait_for_selector("#models tbody tr")
    rows = page.locator("#models tbody tr").count()
    found = []
    for name in (LONG, FROM_THE_RIGHT, HAN):
        page.get_by_label("Filter: Models").fill(name)
        page.wait_for_selector("span[role=status]:text-is('1–1 of 1')")
        found.append(page.inner_text("#models tbody td:first-child"))
    page.get_by_label("Filter: Models").fill("org/model-")
    page.wait_for_selector("span[role=status]:text-is('1–50 of 1,000')")
    page.get_by_role("button", name="Next").click()
    page.wait_for_selector("span[role=status]:text-is('51–100 of 1,000')")
    page.evaluate(axe_script())
    report = page.evaluate("axe.run()")
    violations = [(each["id"], each["nodes"][0]["target"]) for each in report["violations"]]
    widths = {}
    for title in ("Models", "Overview", "Upstreams", "Playground"):
        observed.show(title)
        page.wait_for_selector("main h3")
        widths[title] = page.evaluate("document.documentElement.scrollWidth")
    observed.context.close()

    assert [] == violations
    assert 50 == rows
    assert [LONG, FROM_THE_RIGHT, HAN] == found
    assert {width} == set(widths.values()), widths


def test_a_page_that_stays_open_over_a_restart_says_so(browser: Any, tmp_path: Path) -> None:
    with ExitStack() as resources:
        stand = Stand(tmp_path, resources)
        observed = opened(browser, stand, "upstreams")
        page = observed.page
        page.wait_for_selector("#replicas tbody tr")
        stand.gateway.stop()
        page.wait_for_selector("#status-problem:has-text('does not answer; asking again')")
        page.wait_for_selector("#status-line:has-text('everything below is from then')")
        shown = page.locator("#replicas tbody tr").count()
        # The new gateway has another key for operators.
        stand.path.write_text(stand.path.read_text().replace(key_digest(OPERATOR), key_digest("sk-next")))
        again = Served(stand.path).wait_until_up()
        resources.callback(again.stop)
        page.wait_for_selector("#status-problem:has-text('key')")
        page.wait_for_selector("#replicas", state="detached")
        observed.use_key("sk-next")
        page.wait_for_selector("#replicas tbody tr")
        observed.context.close()

    assert 6 == shown
