"""The page at /docs in a real browser: contents, search, links, a real call, and the samples of code.

The samples in curl and Python run for real.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.tenants.keyring import key_digest
from tests.browser.conftest import MARKUP, until
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import KEY, Served

pytestmark = [pytest.mark.browser, pytest.mark.slow]

AXE = Path(__file__).parents[2] / "gateway/api/operators/console/node_modules/axe-core/axe.min.js"
EMBEDDINGS = "#POST/v1/embeddings"
LANGUAGES = {
    "curl": "curl --globoff",
    "Python": "from openai import OpenAI",
    "TypeScript": "await fetch(",
    "Go": "http.NewRequest(",
    "Java": "HttpRequest.newBuilder(",
}
ARABIC = "نموذج"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a gateway with models whose names contain markup and are written from the right."""
    path = tmp_path_factory.mktemp("docs") / "router.yaml"
    with serve_in_thread(FakeTei()) as url:
        path.write_text(
            f"""
listen: 127.0.0.1:0
upstreams: {{one: {{backend: tei, replicas: ["{url}"]}}}}
models: {{served: {{upstream: one}}, '{MARKUP}': {{upstream: one}}, {ARABIC}: {{upstream: one}}}}
defaults: {{embed: served}}
tenants: {{acme: {{keys: ["{key_digest(KEY)}"]}}}}
"""
        )
        process = Served(path).wait_until_up()
        yield process
        process.stop()


class Docs:
    """The page at /docs. complaints: errors and warnings of the browser, with violations of the policy."""

    def __init__(
        self, browser: Any, gateway: Served, place: str = "", width: int = 1280, **options: Any
    ) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        # The document is built when it is first asked for.
        self.context.set_default_timeout(60_000)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.addresses: list[str] = []
        self.page.on("console", self._collect)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.addresses.append(request.url))
        self.open(f"{gateway.url}/docs{place}")

    def open(self, address: str) -> None:
        """Open an address, and wait for the document."""
        self.page.goto(address)
        self.page.wait_for_selector("main h1, main .empty")

    def heading(self, text: str) -> None:
        """Wait until the page shows an operation."""
        self.page.locator("main h1", has_text=text).wait_for()

    @property
    def search(self) -> Any:
        """The field of the search that is shown."""
        return self.page.get_by_role("combobox").locator("visible=true").first

    def send(self, key: str = KEY) -> str:
        """Type a key, send the form, and return the shown reply."""
        form = self.page.get_by_role("region", name="Try it")
        form.get_by_label("API key").fill(key)
        form.get_by_label("API key").press("Tab")
        form.get_by_role("button", name="Send").click()
        form.locator(".reply, .problem").first.wait_for()
        return str(form.inner_text())

    def sample(self, language: str) -> str:
        """Return the code of the shown request in a language."""
        code = self.page.get_by_role("region", name="Code")
        code.get_by_role("tab", name=language, exact=True).click()
        return str(code.locator("pre").text_content())

    def violations(self) -> list[str]:
        """Return the rules of accessibility that the page breaks."""
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("axe.run()")["violations"]
        return [f"{rule['id']}: {rule['nodes'][0]['html']}" for rule in found]

    def _collect(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@pytest.fixture
def docs(browser: Any, gateway: Served) -> Iterator[Docs]:
    """Open the embeddings of OpenAI."""
    opened = Docs(browser, gateway, EMBEDDINGS)
    yield opened
    assert [] == opened.complaints
    assert all(address.startswith((gateway.url, "data:")) for address in opened.addresses)
    assert not any(KEY in address for address in opened.addresses)
    opened.context.close()


def test_frame_is_there_before_the_document(browser: Any, gateway: Served) -> None:
    context = browser.new_context()
    page = context.new_page()
    held: list[Any] = []

    # Playwright takes no built-in method.
    def hold(route: Any) -> None:
        held.append(route)

    page.route("**/docs/openapi.json", hold)
    page.goto(f"{gateway.url}/docs{EMBEDDINGS}")
    page.wait_for_selector("main .skeleton")
    brand = page.locator(".sidebar .brand").inner_text()
    until(page, "performance.getEntriesByName('first-contentful-paint').length === 1")
    held[0].fulfill(status=503, body="")
    page.wait_for_selector("#document-problem")
    page.unroute("**/docs/openapi.json")
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector("main h1:has-text('Turn texts into vectors')")
    context.close()

    assert "Embedding gateway" == brand


def test_contents_mark_the_operation_and_follow_the_way_back(docs: Docs) -> None:
    page = docs.page
    contents = page.get_by_role("navigation", name="Contents")
    current = contents.locator("[aria-current=page]")
    assert "/v1/embeddings" in current.inner_text()
    contents.get_by_text("Cohere and Jina").click()
    contents.get_by_role("link", name="POST /v2/rerank").click()
    docs.heading("Cohere's v2 API")
    assert page.url.endswith("#POST/v2/rerank")
    assert "/v2/rerank" in current.inner_text()
    # Only the chosen operation is rendered.
    assert 1 == page.locator("article").count()
    page.go_back()
    docs.heading("Turn texts into vectors")
    page.locator(".sidebar .brand").click()
    docs.heading("API reference")
    page.get_by_role("link", name="Console").click()
    page.wait_for_url("**/ui*")


def test_alias_and_unknown_operations_have_addresses(browser: Any, gateway: Served, docs: Docs) -> None:
    docs.page.get_by_text("The same at").first.wait_for()
    docs.page.get_by_role("link", name="/models/{name}/v1/embeddings").click()
    docs.page.wait_for_selector("main .path-line code:text-is('/models/{name}/v1/embeddings')")
    shared = Docs(browser, gateway, docs.page.url.partition("/docs")[2])
    name = shared.page.get_by_role("region", name="Try it").get_by_label("name")
    assert 1 == name.count()
    assert "Turn texts into vectors" == shared.page.inner_text("h1")
    shared.open(f"{gateway.url}/docs#GET/nowhere")
    shared.page.wait_for_selector(".empty:has-text('There is no operation GET/nowhere')")
    shared.context.close()


def test_search_by_keyboard(browser: Any, gateway: Served, docs: Docs) -> None:
    page = docs.page
    page.keyboard.press("/")
    page.keyboard.type("relevance_score")
    page.wait_for_selector("[role=option]")
    first = page.locator("[role=option]").first.inner_text()
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(".sidebar [role=option]:nth-child(2)[aria-selected=true]")
    second = page.locator(".sidebar [role=option][aria-selected=true] .result-path").inner_text()
    active = page.evaluate(
        "document.getElementById(document.activeElement.getAttribute('aria-activedescendant'))?.innerText"
    )
    page.keyboard.press("Enter")
    page.wait_for_selector(f"main .path-line code:text-is('{second}')")
    shared = Docs(browser, gateway, page.url.partition("/docs")[2])
    found = shared.search.input_value()
    shared.search.press("Escape")
    shared.page.wait_for_selector("nav.contents:visible")
    shared.search.fill("/embed_sparse")
    ranked = shared.page.locator("[role=option]").first.inner_text()
    shared.search.fill("zzzz")
    shared.page.get_by_text("Nothing found.").locator("visible=true").wait_for()
    shared.context.close()

    assert "relevance_score" in first
    assert second in active
    assert "relevance_score" == found
    assert "/embed_sparse" in ranked


def test_body_and_answers_are_described(docs: Docs) -> None:
    page = docs.page
    body = page.get_by_role("region", name="Body", exact=True)
    dimensions = body.locator(".field-row", has=page.locator("code:text-is('dimensions')")).inner_text()
    task = body.locator(".field-row", has=page.locator("code:text-is('task')"))
    assert "retrieval.query" in task.inner_text()
    task.get_by_role("button", name=re.compile("and .* more")).click()
    task.get_by_role("button", name="show fewer").wait_for()
    body.get_by_role("button", name="8 fields of InputObject").click()
    nested = body.locator(".nested .field-row").count()
    answers = page.get_by_role("region", name="Answers")
    answers.locator("summary", has_text="429").click()
    answers.locator("details", has_text="429").get_by_text('"auth_throttled"').first.wait_for()
    limited = answers.locator("details", has_text="429").inner_text()
    answers.locator("details", has_text="200").get_by_text('"embedding": [0.0213').first.wait_for()
    answered = answers.locator("details", has_text="200").inner_text()

    assert "integer" in dimensions
    assert "Width to which vectors are cut" in dimensions
    assert 8 == nested
    assert "A limit is used up" in limited
    assert '"code": "auth_throttled"' in limited
    assert "One entry for each input" in answered
    assert '"embedding": [0.0213' in answered


def test_form_gives_a_vector_and_keeps_the_key_in_the_tab(docs: Docs, gateway: Served) -> None:
    reply = docs.send()
    stored = docs.page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])")
    docs.open(f"{gateway.url}/docs#POST/embed")
    docs.heading("Turn texts into vectors")
    key = docs.page.get_by_label("API key").input_value()

    assert "200 OK" in reply
    assert " ms" in reply
    assert re.search(r'"embedding": \[-?0\.\d+, ', reply)
    # The model of the example is not here: a served one took its place.
    assert '"model": "served"' in reply
    assert 1 == stored.count(KEY)
    assert f'"gateway.key":"{KEY}"' in stored
    assert KEY == key


def test_send_waits_for_the_names_of_models(docs: Docs) -> None:
    page = docs.page
    body = page.get_by_role("textbox", name="Body", exact=True)
    example = body.input_value()
    held: list[Any] = []
    sent: list[Any] = []

    # Playwright takes no built-in method.
    def hold(route: Any) -> None:
        held.append(route)

    page.route("**/v1/models", hold)
    page.on("request", lambda request: sent.append(request.post_data_json) if request.post_data else None)
    form = page.get_by_role("region", name="Try it")
    form.get_by_label("API key").fill(KEY)
    form.get_by_role("button", name="Send").click()
    page.get_by_text("Waiting for the reply").wait_for()
    early = len(sent)
    held[0].continue_()
    form.locator(".reply").wait_for()
    shown = body.input_value()
    first = form.inner_text()
    body.fill('{"model": "typed", "input": "a"}')
    body.press("Tab")
    edited = docs.send()
    kept = body.input_value()
    # The browser writes each reply of an error to its console.
    docs.complaints.clear()

    assert '"model": "YOUR_MODEL"' in example
    assert 0 == early
    assert '"model": "served"' in shown
    assert "200 OK" in first
    assert ["served", "typed"] == [call["model"] for call in sent]
    assert '"model": "typed"' in kept
    assert "404" in edited


def test_form_shows_errors_and_markup_as_text(browser: Any, gateway: Served) -> None:
    docs = Docs(browser, gateway, EMBEDDINGS)
    body = docs.page.get_by_role("textbox", name="Body", exact=True)
    refused = docs.send("wrong-key")
    body.fill('{"model"')
    broken = docs.send()
    answers = []
    for name in (MARKUP, ARABIC):
        body.fill(f'{{"model": "{name}", "input": "a"}}')
        answers.append(docs.send())
    docs.open(f"{gateway.url}/docs#POST/models/{{name}}/v1/embeddings")
    docs.page.wait_for_selector("main .path-line code:has-text('{name}')")
    nameless = docs.send()
    title = docs.page.title()
    images = docs.page.locator("img").count()
    docs.context.close()

    assert "401 Unauthorized" in refused
    assert "not JSON" in broken
    assert MARKUP in answers[0]
    assert ARABIC in answers[1]
    assert "type a value for it" in nameless
    assert 0 == images
    assert title.startswith("POST /models/{name}/v1/embeddings")


def test_samples_are_complete_in_five_languages(docs: Docs, gateway: Served, tmp_path: Path) -> None:
    docs.page.get_by_role("textbox", name="Body", exact=True).fill(
        '{"model": "served", "input": "it\'s `a` \\"text\\""}'
    )
    samples = {language: docs.sample(language) for language in LANGUAGES}
    docs.open(f"{gateway.url}/docs#POST/embed")
    docs.page.wait_for_selector("main .path-line code:text-is('/embed')")
    docs.page.get_by_role("textbox", name="Body", exact=True).fill(
        '{"inputs": ["one", "two"], "truncate": true}'
    )
    httpx = docs.sample("Python")
    python = tmp_path / "call.py"
    environment = {**os.environ, "GATEWAY_API_KEY": KEY, "NO_PROXY": "*"}
    outputs = []
    for text in (samples["Python"], httpx):
        python.write_text(text)
        run = subprocess.run(
            [sys.executable, str(python)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        outputs.append(run.stdout or run.stderr)

    for language, part in LANGUAGES.items():
        assert part in samples[language], language
        assert f"{gateway.url}/v1" in samples[language], language
        assert KEY not in samples[language], language
    assert re.match(r"0 \[-?0\.\d+", outputs[0]), outputs[0]
    assert outputs[1].startswith("[["), outputs[1]
    if shutil.which("curl"):
        run = subprocess.run(
            ["bash", "-c", samples["curl"]],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert '"embedding":[' in run.stdout, run.stderr


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_fits_the_screen_and_breaks_no_rule_of_accessibility(
    browser: Any, gateway: Served, width: int, scheme: str
) -> None:
    if not AXE.exists():
        pytest.skip("no axe-core: make console")
    docs = Docs(browser, gateway, EMBEDDINGS, width, color_scheme=scheme)
    page = docs.page
    docs.send()
    page.locator(".answers summary", has_text="400").click()
    found = {"operation": docs.violations()}
    if width == 400:
        page.get_by_role("button", name="Open the contents").click()
        page.wait_for_selector("dialog[open] nav.contents")
        found["contents"] = docs.violations()
    docs.search.fill("dimensions")
    page.locator("[role=option]:visible").first.wait_for()
    found["search"] = docs.violations()
    page.locator("[role=option]:visible").last.click()
    docs.open(f"{gateway.url}/docs")
    docs.heading("API reference")
    found["start"] = docs.violations()
    widest = page.evaluate("document.documentElement.scrollWidth")
    docs.context.close()

    assert {} == {place: rules for place, rules in found.items() if rules}
    assert widest <= width


def test_without_javascript_a_sentence_links_to_the_document(browser: Any, gateway: Served) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{gateway.url}/docs")
    text = page.inner_text("body")
    address = page.get_attribute("#document", "href")
    context.close()

    assert "needs its script" in text
    assert "docs/openapi.json" == address
