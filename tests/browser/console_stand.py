"""A gateway for tests of the console: an operator, tenants with odd names, and an upstream that fails."""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from gateway.tenants.keyring import key_digest
from tests.browser.conftest import ObservedPage
from tests.fakes.hooks import tei_with_hook
from tests.fakes.tei import FakeTei, is_probe
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served

OPERATOR = "sk-operator"
READER = "sk-reader"
WORDS = "CUDA out of memory: tried to allocate 20 GiB"
LONG = "a" * 200
FROM_THE_RIGHT = "حساب العميل الأول"
HAN = "租户一号"
MARKUP = "<img src=x onerror=document.title=1>"
# Until all workers of a busy machine know a key.
KEY_PATIENCE_S = 60
ODD_NAMES = (LONG, FROM_THE_RIGHT, HAN, MARKUP)
AXE = Path(__file__).parents[2] / "gateway/api/operators/console/node_modules/axe-core/axe.min.js"
CONFIG = """
listen: 127.0.0.1:0
workers: {workers}
quotas: {{store: "{store}"}}
state_dir: {state}
batches: {{dir: {state}/batches}}
currency: EUR
upstreams:
  first: {{backend: tei, replicas: ["{good}"]}}
  failing: {{backend: tei, replicas: ["{failing}"]}}
models:
  bge: {{upstream: first, price_per_million_tokens: 20}}
  broken: {{upstream: failing}}
admin:
  keys:
    - {{digest: "{operator}", id: ops, scopes: [embed, rerank, tokenize, admin]}}
    - {{digest: "{reader}", id: reader, scopes: ["admin:read"]}}
"""


async def _fail(path: str, sent: dict[str, Any]) -> tuple[int, bytes] | None:
    """Answer calls with an error, and let the gateway's own questions pass."""
    if path in ("/embed", "/v1/embeddings") and not is_probe(sent):
        return 500, json.dumps({"error": WORDS, "error_type": "Backend"}).encode()
    return None


class ConsoleStand:
    """A gateway with its operator. url: of the console too."""

    def __init__(
        self, folder: Path, resources: ExitStack, *, workers: int = 1, store: str = "memory"
    ) -> None:
        good = resources.enter_context(serve_in_thread(FakeTei()))
        failing = resources.enter_context(serve_in_thread(tei_with_hook(_fail)))
        path = folder / "router.yaml"
        settings = {"workers": workers, "store": store, "state": folder / "state"}
        keys = {"operator": key_digest(OPERATOR), "reader": key_digest(READER)}
        path.write_text(CONFIG.format(good=good, failing=failing, **settings, **keys))
        self.gateway = Served(path).wait_until_up()
        resources.callback(self.gateway.stop)
        self.url = self.gateway.url

    def client(self, key: str = OPERATOR) -> httpx.Client:
        """Return a client that sends a key."""
        client = self.gateway.client()
        client.headers["authorization"] = f"Bearer {key}"
        return client

    def make_tenant(self, name: str, **limits: float) -> str:
        """Make a tenant with a key, wait until every worker knows it, and return the key."""
        with self.client() as client:
            client.put(f"/admin/tenants/{quote(name, safe='')}", json={"limits": limits}).raise_for_status()
            made = client.post("/admin/keys", json={"tenant": name})
            made.raise_for_status()
        text = str(made.json()["key"])
        in_a_row, end_s = 0, time.monotonic() + KEY_PATIENCE_S
        while in_a_row < 4 and time.monotonic() < end_s:
            # Each connection may come to another worker.
            with self.client(text) as own:
                in_a_row = in_a_row + 1 if own.get("/v1/models").status_code == 200 else 0
        return text

    def patch(self, name: str, change: dict[str, Any]) -> None:
        """Change a stored tenant."""
        with self.client() as client:
            client.patch(f"/admin/tenants/{name}", json=change).raise_for_status()

    def call(self, key: str, model: str = "bge", **headers: str) -> httpx.Response:
        """Embed a text, once the worker that is reached knows the key."""
        end_s = time.monotonic() + KEY_PATIENCE_S
        while True:
            with self.client(key) as client:
                body = {"model": model, "input": "a b c"}
                reply = client.post("/v1/embeddings", json=body, headers=headers)
            if reply.status_code != 401 or time.monotonic() > end_s:
                return reply

    def opened(self, browser: Any, view: str, key: str = OPERATOR, **options: Any) -> ObservedPage:
        """Open a page of the console with a key."""
        observed = ObservedPage(browser, self.url, view, **options)
        observed.page.evaluate(f"sessionStorage.setItem('gateway.key', {json.dumps(key)})")
        observed.page.reload()
        observed.page.wait_for_selector("main h1")
        # The browser reports that a key was asked for at first.
        observed.complaints.clear()
        return observed


def line(custom_id: str, **fields: Any) -> str:
    """Return a line of a batch."""
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings"}
    return json.dumps({**request, "body": {"model": "bge", "input": "x"} | fields}) + "\n"


def create_batch(client: httpx.Client, content: str) -> str:
    """Upload a file, create a batch of it, and return its id."""
    upload = {"file": ("input.jsonl", content.encode())}
    file = until_known(lambda: client.post("/v1/files", data={"purpose": "batch"}, files=upload))["id"]
    body = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    return str(until_known(lambda: client.post("/v1/batches", json=body))["id"])


def run_batch(client: httpx.Client, content: str) -> str:
    """Run a batch to its end, and return its id."""
    batch = create_batch(client, content)
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        if until_known(lambda: client.get(f"/v1/batches/{batch}"))["status"] in {"completed", "failed"}:
            return batch
    raise AssertionError("the batch has not ended")


def until_known(send: Callable[[], httpx.Response]) -> Any:
    """Return the reply once every worker knows the key."""
    end_s = time.monotonic() + 10
    while (reply := send()).status_code in {401, 403} and time.monotonic() < end_s:
        pass
    assert reply.status_code == 200, reply.text
    return reply.json()


def violations(page: Any) -> list[tuple[str, str]]:
    """Return what axe-core finds, and whether the page is wider than the screen."""
    if not AXE.exists():
        pytest.skip("make .venv/installed-browser installs axe-core with npm")
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    report = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    found = [(each["id"], node["html"][:200]) for each in report["violations"] for node in each["nodes"]]
    width = page.evaluate("document.documentElement.scrollWidth")
    if width > page.viewport_size["width"]:
        found.append(("size", str(width)))
    return found
