"""Headless Chromium, and a gateway whose model and tenant names contain markup."""

import os
import re
import shutil
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.tenants.keyring import key_digest
from tests.engine.families.checkpoint import write_checkpoint
from tests.engine.families.pages import FAMILIES
from tests.fakes.hooks import RERANKER
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.fakes.vllm import FakeVllm
from tests.processes.conftest import KEY, Served
from tests.waiting import PATIENCE_S

# Set where a browser must be there: a test that is skipped fails then.
IS_REQUIRED = os.environ.get("BROWSER_REQUIRED") == "1"

MARKUP = "<img src=x onerror=document.title=1>"
CONFIG = """
listen: 127.0.0.1:0
manager: {{listen: "127.0.0.1:0"}}
state_dir: {state}
upstreams:
  wide: {{backend: tei, replicas: ["{wide}", "http://127.0.0.1:1"]}}
  narrow: {{backend: tei, replicas: ["{narrow}"]}}
  cross: {{backend: tei, replicas: ["{cross}"]}}
  seeing: {{backend: vllm, replicas: ["{seeing}"]}}
  pages: {{backend: torch, model: {pages}}}
models:
  bge: {{upstream: wide}}
  '{markup}': {{upstream: wide}}
  narrow: {{upstream: narrow, rerank: false}}
  cross: {{upstream: cross}}
  clip: {{upstream: seeing}}
  colqwen2: {{upstream: pages}}
defaults: {{embed: bge, rerank: cross}}
tenants:
  '{markup}': {{keys: [{{digest: "{digest}", scopes: [embed, rerank, classify, tokenize, admin]}}]}}
"""


class NarrowTei(FakeTei):
    """Fake TEI with vectors of half the width."""

    def _vector(self, text: str, body: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
        half = super()._vector(text, body)[:4]
        return half / np.linalg.norm(half)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("ui") / "router.yaml"
    with ExitStack() as fakes:
        servers = {
            "wide": FakeTei(),
            "narrow": NarrowTei(),
            "cross": FakeTei(model_type=RERANKER),
            "seeing": FakeVllm(images=True),
        }
        urls = {name: fakes.enter_context(serve_in_thread(server)) for name, server in servers.items()}
        (family,) = (family for family in FAMILIES if family.name == "colqwen2")
        pages = write_checkpoint(family, tmp_path_factory.mktemp("pages") / "colqwen2")
        path.write_text(
            CONFIG.format(**urls, pages=pages, state=path.parent, markup=MARKUP, digest=key_digest(KEY))
        )
        process = Served(path).wait_until_up()
        yield process
        process.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped test of this folder into a failed one where a browser is required."""
    report = yield
    if IS_REQUIRED and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"BROWSER_REQUIRED=1 allows no skipped test. {reason}"
    return report


def chromium() -> str:
    """Return the path of Chromium, or skip the test if there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium on the path: apt-get install chromium")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start one browser process for all pages."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install -r requirements/browser.txt")
    executable = chromium()
    # Chromium's sandbox does not run as root.
    arguments = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with api.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=executable, args=arguments)
        yield launched
        launched.close()


AXE = Path(__file__).parents[2] / "gateway/api/operators/console/node_modules/axe-core/axe.min.js"


def axe_script() -> str:
    """Return the script that finds violations of the rules of accessibility, or skip the test without it."""
    if not AXE.is_file():
        pytest.skip("no axe-core: make test-browser installs it")
    return AXE.read_text()


def contrast(first: str, second: str) -> float:
    """Return WCAG's contrast ratio of two colors."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def until(page: Any, condition: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until an expression of the page is true. Playwright's own way is against the page's policy."""
    deadline_s = time.monotonic() + patience_s
    while not page.evaluate(f"Boolean({condition})"):
        assert time.monotonic() < deadline_s, condition
        page.wait_for_timeout(100)


class ObservedPage:
    """The console at /ui. complaints: errors and warnings of the browser, with policy violations.

    view: the page of the console that is opened.
    """

    def __init__(self, browser: Any, base: str, view: str = "overview", **options: Any) -> None:
        # Moving placeholders would occupy a core, which draws them without a GPU.
        self.context = browser.new_context(reduced_motion="reduce", **options)
        self.context.set_default_timeout(1000 * PATIENCE_S if IS_REQUIRED else 15_000)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.addresses: list[str] = []
        self.page.on("console", self._collect)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.addresses.append(request.url))
        self.page.goto(f"{base}/ui#/{view}")

    def use_key(self, key: str) -> None:
        """Sign in with a key, like a user. Where the page shows without one, its button leads there."""
        field = self.page.get_by_label("API key")
        self.page.wait_for_selector("h1")
        if not field.is_visible():
            self.page.get_by_role("button", name="Sign in").click()
        field.fill(key)
        self.page.get_by_role("button", name="Sign in", exact=True).click()
        self.page.get_by_role("button", name="Sign out").wait_for()

    def show(self, title: str) -> None:
        """Follow the link to another page of the console."""
        self.page.get_by_role("navigation").get_by_role("link", name=title, exact=True).click()
        self.page.wait_for_selector(f"h1:text-is('{title}')")

    def _collect(self, message: Any) -> None:
        # A store that is late on a busy machine: the page shows it, and asks again.
        is_late = message.text.startswith("Failed to load resource") and " 503 " in message.text
        if message.type in ("error", "warning") and not is_late:
            self.complaints.append(f"{message.text} {message.location.get('url', '')}".strip())

    @staticmethod
    def hash_of(title: str) -> str:
        """Return the part of the address that names a page."""
        return "#/" + {"Recent calls": "calls", "My key": "usage"}.get(title, title.lower())


@pytest.fixture
def watched(browser: Any, gateway: Served) -> Iterator[ObservedPage]:
    """Open a page without a key."""
    observed = ObservedPage(browser, gateway.url)
    yield observed
    observed.context.close()


@pytest.fixture
def ready(watched: ObservedPage) -> ObservedPage:
    """Open the playground with a key, and wait for its lists of models."""
    watched.use_key(KEY)
    watched.show("Playground")
    watched.page.wait_for_selector("#embed-form")
    return watched
