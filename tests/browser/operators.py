"""A gateway with keys of operators, and what the tests of their pages do with a page."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.tenants.keyring import key_digest
from tests.browser.conftest import ObservedPage
from tests.processes.conftest import Served

OPERATOR = "sk-operator"
READER = "sk-reader"
AXE = Path(__file__).parents[2] / "gateway/api/operators/console/node_modules/axe-core/axe.min.js"
PHONE = {"width": 400, "height": 800}
DESK = {"width": 1280, "height": 800}
# Pixels of a page on a phone: twenty screens.
HEIGHT_MAX = 20 * 800
LONG = "a" * 200
FROM_THE_RIGHT = "حساب العميل الأول"
HAN = "租户一号"
MARKUP = "<img src=x onerror=document.title=1>"
CONFIG = """
listen: 127.0.0.1:0
workers: {workers}
quotas: {{store: "{store}"}}
state_dir: {state}
upstreams: {{first: {{backend: tei, replicas: ["{url}"]}}}}
currency: EUR
models: {{bge: {{upstream: first, price_per_million_tokens: 20}}, small: {{upstream: first}}}}
tenants: {{filed: {{limits: {{budget_per_month: 250, tokens_per_day: 1000}}, keys: ["{filed}"]}}}}
admin:
  keys:
    - {{digest: "{operator}", id: ops, scopes: [embed, rerank, tokenize, metrics, admin]}}
    - {{digest: "{reader}", id: watch, scopes: ["admin:read"]}}
"""


def write_config(folder: Path, upstream: str, store: str = "memory", workers: int = 1) -> Path:
    """Write a configuration with two keys of operators, and a tenant of its own."""
    path = folder / "router.yaml"
    path.write_text(
        CONFIG.format(
            workers=workers,
            store=store,
            state=folder / "state",
            url=upstream,
            filed=key_digest("sk-filed"),
            operator=key_digest(OPERATOR),
            reader=key_digest(READER),
        )
    )
    return path


def opened(browser: Any, gateway: Served, view: str, key: str = OPERATOR, **options: Any) -> ObservedPage:
    """Open a page with a key, also on a phone, whose button to sign out is not in sight."""
    observed = ObservedPage(browser, gateway.url, view, **options)
    observed.page.evaluate("key => sessionStorage.setItem('gateway.key', key)", key)
    observed.page.reload()
    observed.page.wait_for_selector("main h1")
    # The browser reports that a key was asked for at first.
    observed.complaints.clear()
    return observed


def as_operator(gateway: Served) -> httpx.Client:
    """Return a client with an operator's key."""
    client = gateway.client()
    client.headers["authorization"] = f"Bearer {OPERATOR}"
    return client


def call_until(client: httpx.Client, key: str, status: int) -> httpx.Response:
    """Call until a worker answers with a status: the others learn of a change within a second."""
    deadline_s = time.monotonic() + 5
    while True:
        reply = client.post(
            "/v1/embeddings",
            json={"model": "bge", "input": "a"},
            headers={"authorization": f"Bearer {key}"},
        )
        if reply.status_code == status or time.monotonic() > deadline_s:
            return reply


def violations(page: Any) -> list[Any]:
    """Return what axe-core finds on a page, with the first element; skip the test without axe-core."""
    if not AXE.exists():
        pytest.skip("make .venv/installed-browser installs axe-core with npm")
    page.evaluate(AXE.read_text())
    report = page.evaluate("axe.run()")
    return [(each["id"], each["nodes"][0]["target"]) for each in report["violations"]]


def size_of(page: Any) -> tuple[int, int]:
    """Return the width and the height of the whole page in pixels."""
    width, height = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
    )
    return width, height


def toast(page: Any, text: str) -> None:
    """Wait for a message about a change."""
    page.wait_for_selector(f".toast:has-text('{text}')")
