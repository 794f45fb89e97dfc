"""The console on an address for operators only, and one that stays open while its gateway restarts."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.tenants.keyring import key_digest
from tests.browser.conftest import ObservedPage
from tests.fakes.hooks import RERANKER
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served
from tests.processes.test_admin_listener import free_port

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPERATOR = "sk-operator"
CONFIG = """
listen: 127.0.0.1:0
admin: {{listen: "{admin}", keys: [{{digest: "{operator}", id: ops, scopes: [embed, rerank, admin]}}]}}
state_dir: {state}
upstreams:
  embedder: {{backend: tei, replicas: ["{embedder}"]}}
  cross: {{backend: tei, replicas: ["{cross}"]}}
models: {{bge: {{upstream: embedder}}, ranker: {{upstream: cross}}}}
"""


class Stand:
    """A gateway with its console on an address for operators."""

    def __init__(self, folder: Path, resources: ExitStack) -> None:
        servers = (FakeTei(), FakeTei(model_type=RERANKER))
        embedder, cross = (resources.enter_context(serve_in_thread(server)) for server in servers)
        admin = f"127.0.0.1:{free_port()}"
        self.console = f"http://{admin}"
        self.path = folder / "router.yaml"
        self.path.write_text(
            CONFIG.format(
                admin=admin,
                operator=key_digest(OPERATOR),
                state=folder / "state",
                embedder=embedder,
                cross=cross,
            )
        )
        self.gateway = Served(self.path).wait_until_up()
        resources.callback(self.gateway.stop)


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    with ExitStack() as resources:
        yield Stand(tmp_path, resources)


def opened(browser: Any, stand: Stand, view: str) -> ObservedPage:
    """Open the console with the operator's key."""
    observed = ObservedPage(browser, stand.console, view)
    observed.use_key(OPERATOR)
    # The browser reports that a key was asked for at first.
    observed.complaints.clear()
    return observed


def test_the_playground_works_on_the_address_of_operators(browser: Any, stand: Stand) -> None:
    observed = opened(browser, stand, "playground")
    page = observed.page
    page.get_by_role("button", name="Embed", exact=True).click()
    page.wait_for_selector("#embed-answer table.heat")
    page.get_by_role("tab", name="Rerank").click()
    page.get_by_role("button", name="Rerank", exact=True).click()
    page.wait_for_selector("#rerank-answer .hits li")
    observed.show("My key")
    page.get_by_text("ops", exact=True).first.wait_for()
    page.wait_for_load_state("networkidle")
    own = ("blob:", stand.console)
    addresses = [address for address in observed.addresses if not address.startswith(own)]
    problems = page.locator(".problem").all_inner_texts()
    complaints = observed.complaints
    observed.context.close()

    assert ([], [], []) == (addresses, problems, complaints)


def test_a_page_that_stays_open_over_a_restart_says_so(browser: Any, stand: Stand) -> None:
    observed = opened(browser, stand, "upstreams")
    page = observed.page
    page.get_by_text("embedder").first.wait_for()
    stand.gateway.stop()
    page.wait_for_selector("#status-problem:has-text('does not answer; asking again')")
    page.wait_for_selector("#status-problem:has-text('what is below is from then')")
    assert page.get_by_text("embedder").first.is_visible()
    # The new gateway has another key for operators.
    stand.path.write_text(stand.path.read_text().replace(key_digest(OPERATOR), key_digest("sk-next")))
    again = Served(stand.path).wait_until_up()
    try:
        page.wait_for_selector("#sign-in-problem")
        observed.use_key("sk-next")
        page.get_by_text("embedder").first.wait_for()
    finally:
        observed.context.close()
        again.stop()
