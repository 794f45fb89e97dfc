"""Gateway with many kinds of upstreams and models, for the pages of the console about them."""

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.tenants.keyring import key_digest
from tests.browser.conftest import MARKUP, ObservedPage
from tests.fakes.hooks import RERANKER
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served
from tests.waiting import PATIENCE_S

OPERATOR, READER = "sk-operator", "sk-reader"
LONG = "x" * 200
SLASHED = f"org/{MARKUP}"
AXE = Path(__file__).parents[2] / "gateway/api/operators/console/node_modules/axe-core/axe.min.js"
CONFIG = """
listen: 127.0.0.1:0
manager: {{listen: "127.0.0.1:0"}}
state_dir: {state}
currency: EUR
admin:
  keys:
    - {{digest: "{operator}", id: ops, scopes: [embed, rerank, tokenize, admin]}}
    - {{digest: "{reader}", id: reader, scopes: ["admin:read"]}}
upstreams:
  pair: {{backend: tei, replicas: ["{one}", "{two}"], in_flight_batches: 2, limits: {{tokens_per_day: 9000}}}}
  '{long}': {{backend: tei, replicas: ["{two}"]}}
  half: {{backend: tei, replicas: ["{half}", "http://127.0.0.1:1"]}}
  many: {{backend: tei, replicas: [{many}]}}
  leaving: {{backend: tei, replicas: ["{leaving}"]}}
  cross: {{backend: tei, replicas: ["{cross}"]}}
models:
  bge: {{upstream: pair, price_per_million_tokens: 20}}
  '{slashed}': {{upstream: pair}}
  '{long}': {{upstream: '{long}'}}
  ranker: {{upstream: cross}}
  trial: {{upstream: leaving, canary: {{name: half, share: 0.5}}}}
"""


class Stand:
    """A gateway and its servers.

    released: until it is set, the first replica of `pair` answers no text "slow". leave: closes the server of
    `leaving`.
    """

    def __init__(self, folder: Path, resources: ExitStack) -> None:
        self.released = threading.Event()
        self.released.set()
        first = FakeTei()
        first.hook = self._hold
        self.one = resources.enter_context(serve_in_thread(first))
        self.two = resources.enter_context(serve_in_thread(FakeTei()))
        half = resources.enter_context(serve_in_thread(FakeTei()))
        cross = resources.enter_context(serve_in_thread(FakeTei(model_type=RERANKER)))
        self.leave = resources.enter_context(ExitStack())
        leaving = self.leave.enter_context(serve_in_thread(FakeTei()))
        self.path = folder / "router.yaml"
        self.path.write_text(
            CONFIG.format(
                state=folder / "state",
                operator=key_digest(OPERATOR),
                reader=key_digest(READER),
                one=self.one,
                two=self.two,
                half=half,
                cross=cross,
                leaving=leaving,
                many=", ".join(f'"http://127.0.0.1:{port}"' for port in range(1, 61)),
                long=LONG,
                slashed=SLASHED,
            )
        )
        self.gateway = Served(self.path).wait_until_up()
        resources.callback(self.gateway.stop)

    async def _hold(self, _: str, sent: dict[str, Any]) -> None:
        if "slow" in str(sent):
            await asyncio.to_thread(self.released.wait, PATIENCE_S)


def opened(browser: Any, stand: Stand, view: str, key: str = OPERATOR, **options: Any) -> ObservedPage:
    """Open the console with a key of an operator."""
    # A narrow screen has the way out in a drawer: the key is typed on a wide one.
    size = options.pop("viewport", None)
    observed = ObservedPage(browser, stand.gateway.url, view, **options)
    observed.use_key(key)
    if size is not None:
        observed.page.set_viewport_size(size)
    # The browser reports that a key was asked for at first.
    observed.complaints.clear()
    return observed


def violations(page: Any) -> list[tuple[str, Any]]:
    """Return what axe finds on a page: rule and element."""
    if not AXE.exists():
        pytest.skip("make .venv/installed-browser installs axe-core with npm")
    page.evaluate(AXE.read_text())
    report = page.evaluate("axe.run()")
    return [(each["id"], each["nodes"][0]["target"]) for each in report["violations"]]


def width_of(page: Any) -> int:
    """Return the width of a page's content."""
    return int(page.evaluate("document.documentElement.scrollWidth"))
