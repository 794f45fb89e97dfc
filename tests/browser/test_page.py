"""The console at /ui in a real browser: status, playground, safety and accessibility."""

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.tenants.keyring import key_digest
from tests.browser.conftest import MARKUP, ObservedPage
from tests.pictures import encoded, noise
from tests.processes.conftest import KEY, Served

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def text_of(page: Any, selector: str) -> str:
    """Return the visible text of an element."""
    return str(page.inner_text(selector))


def heat(page: Any, selector: str) -> list[list[str]]:
    """Return the texts of a heat map's cells, by row."""
    rows = page.query_selector_all(f"{selector} table.heat tbody tr")
    return [[cell.inner_text() for cell in row.query_selector_all("td")] for row in rows]


def test_shows_the_status_without_console_errors(watched: ObservedPage) -> None:
    watched.page.wait_for_selector("#lanes tbody tr")
    troubles = text_of(watched.page, "#troubles")
    watched.show("Upstreams")
    replicas = text_of(watched.page, "#replicas")
    watched.show("Models")
    models = text_of(watched.page, "#models")
    watched.show("Playground")

    assert "no connection to the replica" in troubles
    assert "up" in replicas
    assert "no connection to the replica" in replicas
    assert "bge" in models
    assert "Type an API key" in text_of(watched.page, "#models-problem")
    assert [] == watched.complaints


def test_shows_the_models_of_the_host(watched: ObservedPage, gateway: Served) -> None:
    with gateway.client() as client:
        added = client.post("/admin/registry", json={"model_id": "org/listed"})
    watched.show("Models")
    watched.page.wait_for_selector("#registry tbody tr")
    rows = [row.split("\t") for row in text_of(watched.page, "#registry tbody").splitlines()]

    assert added.status_code in (200, 201)
    assert ["org/listed", "available", "–"] in [row[:3] for row in rows]
    assert [] == watched.complaints


def test_loads_everything_from_the_gateway(ready: ObservedPage, gateway: Served) -> None:
    for title in ("Upstreams", "Models", "Tenants and keys", "Recent calls", "My key", "Overview"):
        ready.show(title)
    ready.page.wait_for_selector("#lanes tbody tr")

    assert ready.addresses
    assert [] == [address for address in ready.addresses if not address.startswith(f"{gateway.url}/")]


def test_policy_blocks_what_the_page_does_not_need(watched: ObservedPage, gateway: Served) -> None:
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


def test_embeds_texts_and_draws_their_similarity(ready: ObservedPage) -> None:
    ready.page.get_by_label("Texts, one a line", exact=True).fill("one\ntwo\none")
    ready.page.get_by_role("button", name="Embed").click()
    ready.page.wait_for_selector("#embed-answer table.heat")
    cells = heat(ready.page, "#embed-answer")
    colors = ready.page.eval_on_selector_all(
        "#embed-answer table.heat tbody td", "all => all.map(cell => getComputedStyle(cell).backgroundColor)"
    )

    assert ["1.000"] * 3 == [cells[0][0], cells[1][1], cells[0][2]]
    assert cells[0][1] == cells[1][0] != "1.000"
    assert colors[0] == colors[2] != colors[1]
    assert "3 vectors of 8 numbers" in text_of(ready.page, "#embed-answer")
    assert [] == ready.complaints


def pictures(count: int) -> list[dict[str, Any]]:
    """Return files as a user chooses them."""
    return [
        {"name": f"{seed}.png", "mimeType": "image/png", "buffer": encoded(noise(40, 30, seed))}
        for seed in range(count)
    ]


def test_compares_images_with_texts(ready: ObservedPage) -> None:
    page = ready.page
    page.set_input_files("#images-files", pictures(3))
    page.get_by_label("Captions, one a line").fill("a cat\na dog")
    page.get_by_role("button", name="Compare images").click()
    page.wait_for_selector("#images-answer table.heat")
    widths = page.eval_on_selector_all(
        "#images-answer thead img", "all => all.map(image => image.complete && image.naturalWidth)"
    )

    assert [40] * 3 == widths
    cells = heat(page, "#images-answer")
    assert [3, 3] == [len(row) for row in cells]
    assert "5 vectors of 8 numbers" in text_of(page, "#images-answer")
    assert [] == ready.complaints


def test_marks_the_patches_of_a_page(ready: ObservedPage) -> None:
    page = ready.page
    page.wait_for_selector("#pages-model option:has-text('colqwen2')", state="attached", timeout=60_000)
    (picture,) = pictures(1)
    page.set_input_files("#pages-file", picture)
    page.fill("#pages-query", "a cat on a mat")
    page.get_by_role("button", name="Mark the page").click()
    page.wait_for_selector("#pages-answer canvas")
    corner = "canvas => [...canvas.getContext('2d').getImageData(5, 5, 1, 1).data]"
    canvas = page.locator("#pages-answer canvas")

    assert "score" in text_of(page, "#pages-answer")
    assert "2 × 3 patches" in text_of(page, "#pages-answer")
    assert (canvas.get_attribute("aria-label") or "").startswith("best patch: row ")
    assert [] == ready.complaints
    labels = set()
    for token in range(1, page.locator("#pages-token option").count()):
        page.select_option("#pages-token", str(token))
        labels.add((*canvas.evaluate(corner), canvas.get_attribute("aria-label")))
    assert len(labels) > 1


def test_takes_dropped_images_and_refuses_other_files(ready: ObservedPage) -> None:
    page = ready.page
    page.evaluate(
        """() => {
            const files = new DataTransfer();
            files.items.add(new File(["x"], "a.txt", { type: "text/plain" }));
            files.items.add(new File([new Uint8Array(5e6)], "large.png", { type: "image/png" }));
            for (let n = 0; n < 14; n++) files.items.add(new File(["x"], `${n}.png`, { type: "image/png" }));
            const drop = new DragEvent("drop", { dataTransfer: files, cancelable: true });
            document.getElementById("images-drop").dispatchEvent(drop);
        }"""
    )
    problem = text_of(page, "#images-problem")

    assert 12 == page.locator("#images-chosen img").count()
    for part in ("larger than 4 MB: large.png", "at most 12 images", "only images are taken"):
        assert part in problem
    page.get_by_role("button", name="Compare images").click()
    page.wait_for_selector("#images-answer .problem")
    assert "none of these formats" in text_of(page, "#images-answer")
    page.get_by_role("button", name="Remove all images").click()
    assert 0 == page.locator("#images-chosen img").count()


def test_every_shade_of_the_heat_map_is_readable(ready: ObservedPage) -> None:
    # Vectors at angles from none to a half turn, whose cosines cover the whole scale.
    def answer(route: Any) -> None:
        angles = [math.pi * index / 39 for index in range(40)]
        data = [
            {"index": index, "embedding": [math.cos(angle), math.sin(angle)]}
            for index, angle in enumerate(angles)
        ]
        route.fulfill(json={"data": data, "usage": {"total_tokens": 40}})

    ready.page.route("**/v1/embeddings", answer)
    ready.page.get_by_label("Texts, one a line", exact=True).fill("\n".join(map(str, range(40))))
    ready.page.get_by_role("button", name="Embed").click()
    ready.page.wait_for_selector("#embed-answer table.heat")
    pairs = ready.page.eval_on_selector_all(
        "#embed-answer table.heat tbody td",
        """all => all.map(cell => {
            const { color, backgroundColor } = getComputedStyle(cell);
            return [color, backgroundColor];
        })""",
    )

    assert 1600 == len(pairs)
    assert len({tuple(pair) for pair in pairs}) > 15
    assert 4.5 <= min(contrast(*pair) for pair in pairs)


def test_ranks_documents(ready: ObservedPage) -> None:
    ready.page.select_option("#rerank-model", "cross")
    ready.page.get_by_label("Documents, one a line").fill("first\nsecond\nthird")
    ready.page.get_by_role("button", name="Rerank").click()
    ready.page.wait_for_selector("#rerank-answer tbody tr")
    rows = [row.split("\t") for row in text_of(ready.page, "#rerank-answer tbody").splitlines()]
    scores = [float(row[1]) for row in rows]

    assert {"first", "second", "third"} == {row[-1] for row in rows}
    assert scores == sorted(scores, reverse=True)
    assert [] == ready.complaints


def test_does_not_compare_models_of_unequal_width(ready: ObservedPage) -> None:
    ready.page.get_by_role("button", name="Compare", exact=True).click()
    ready.page.wait_for_selector("#compare-answer table.heat")
    cells = heat(ready.page, "#compare-answer")

    assert "1.000" == cells[0][1]
    assert "8 ≠ 4" == cells[0][2]
    assert "cannot be compared" in text_of(ready.page, "#compare-answer")
    assert [] == ready.complaints


def test_wrong_key_shows_a_clear_error(watched: ObservedPage) -> None:
    watched.use_key("wrong")
    watched.show("Playground")
    watched.page.wait_for_selector("#models-problem.problem")

    assert "Incorrect API key provided" in text_of(watched.page, "#models-problem")
    # The status needs no key from this machine; a wrong one is refused all the same.
    watched.use_key("")
    watched.show("Overview")
    watched.page.wait_for_selector("#lanes tbody tr")


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a gateway whose status needs an operator's key, and which has no batches."""
    path = tmp_path_factory.mktemp("closed") / "router.yaml"
    path.write_text(
        f"""
listen: 127.0.0.1:0
admin: {{keys: ["{key_digest("operator-key")}"]}}
upstreams: {{one: {{backend: tei, replicas: ["http://127.0.0.1:1"]}}}}
models: {{bge: {{upstream: one}}}}
tenants: {{acme: {{keys: ["{key_digest(KEY)}"]}}}}
"""
    )
    gateway = Served(path).wait_until_up()
    yield gateway
    gateway.stop()


def test_shows_no_error_before_anything_went_wrong(browser: Any, closed: Served) -> None:
    watched = ObservedPage(browser, closed.url)
    page = watched.page
    for title in ("Jobs", "My key", "Overview"):
        watched.show(title)
        page.wait_for_selector("main .note:text-is('Type an API key above.')")
        assert 0 == page.locator(".problem").count(), title
    watched.use_key("operator-key")
    page.wait_for_selector('#key-note:has-text("Operator\'s key accepted: it calls no models.")')
    watched.show("Jobs")
    page.wait_for_selector("#jobs-problem.note:has-text('add the section `batches`')")
    titles = page.locator("nav a").all_inner_texts()
    watched.context.close()

    assert "Playground" not in titles
    assert "Tenants and keys" in titles


def test_rejected_key_is_not_tried_again(browser: Any, closed: Served) -> None:
    watched = ObservedPage(browser, closed.url)
    # The test moves the page's clock: no timer of the page fires by itself.
    watched.page.clock.install()
    watched.use_key("operator-key")
    watched.page.wait_for_selector("#lanes tbody tr")
    watched.use_key(KEY)
    watched.page.wait_for_selector("h2:text-is('My key')")
    asked = len(watched.addresses)
    watched.page.clock.fast_forward(10_000)
    watched.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    watched.use_key("operator-key")
    watched.show("Overview")
    watched.page.wait_for_selector("#lanes tbody tr", state="visible")
    again = [address for address in watched.addresses[asked:] if address.endswith("/admin/status")]
    watched.context.close()

    assert 1 == len(again)


def test_key_that_no_header_can_hold_shows_a_clear_error(watched: ObservedPage) -> None:
    watched.use_key("schlüssel mit leerzeichen")
    watched.show("Playground")
    watched.page.wait_for_selector("#models-problem.problem")

    assert "plain letters" in text_of(watched.page, "#models-problem")


def test_the_key_is_in_no_storage_and_no_address(ready: ObservedPage) -> None:
    ready.page.get_by_role("button", name="Embed").click()
    ready.page.wait_for_selector("#embed-answer table.heat")
    storage = ready.page.evaluate(
        "async () => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href, "
        "history.state, await indexedDB.databases(), await caches.keys()])"
    )

    assert KEY not in storage
    assert [] == ready.context.cookies()
    assert [] == [address for address in ready.addresses if KEY in address]
    ready.page.reload()
    assert "" == ready.page.input_value("#key")


def test_shows_markup_in_names_and_texts_as_text(ready: ObservedPage) -> None:
    ready.page.get_by_label("Texts, one a line", exact=True).fill(f"{MARKUP}\nother")
    ready.page.get_by_role("button", name="Embed").click()
    ready.page.wait_for_selector("#embed-answer table.heat")
    ready.page.get_by_label("Documents, one a line").fill(MARKUP)
    ready.page.get_by_role("button", name="Rerank").click()
    ready.page.wait_for_selector("#rerank-answer tbody tr")
    for place in ("#embed-answer", "#rerank-answer"):
        assert MARKUP in text_of(ready.page, place), place
    assert MARKUP in ready.page.eval_on_selector_all("#embed-model option", "all => all.map(o => o.text)")
    for title, place in (("Tenants and keys", "#tenants"), ("Models", "#models"), ("Recent calls", "#calls")):
        ready.show(title)
        ready.page.wait_for_selector(f"{place} tbody tr")
        assert MARKUP in text_of(ready.page, place), place
    assert 0 == ready.page.locator("img").count()
    assert "Recent calls · Embedding gateway" == ready.page.title()
    assert [] == ready.complaints


def test_shows_errors_next_to_their_form(ready: ObservedPage) -> None:
    ready.page.get_by_label("Texts, one a line", exact=True).fill("\n \n")
    ready.page.get_by_role("button", name="Embed").click()
    ready.page.wait_for_selector("#embed-answer .problem")

    assert "at least one text" in text_of(ready.page, "#embed-answer")
    ready.page.get_by_label("Texts, one a line", exact=True).fill("one")
    ready.page.get_by_role("button", name="Embed").click()
    ready.page.wait_for_selector("#embed-answer table.heat")
    assert not ready.page.is_visible("#embed-answer .problem")


def test_works_from_the_keyboard(watched: ObservedPage) -> None:
    watched.page.keyboard.press("Tab")
    assert "Skip to the content" == watched.page.evaluate("document.activeElement.textContent")
    watched.page.keyboard.press("Tab")
    assert "key" == watched.page.evaluate("document.activeElement.id")
    watched.page.keyboard.type(KEY)
    watched.page.keyboard.press("Enter")
    for _ in range(8):
        watched.page.keyboard.press("Tab")
    assert "Playground" == watched.page.evaluate("document.activeElement.textContent")
    watched.page.keyboard.press("Enter")
    watched.page.wait_for_selector("h2:focus:text-is('Playground')")
    watched.page.wait_for_selector("#embed-model option", state="attached")


def test_every_control_has_a_name(ready: ObservedPage) -> None:
    for title in (
        "Playground",
        "Overview",
        "Upstreams",
        "Models",
        "Jobs",
        "Tenants and keys",
        "Recent calls",
        "My key",
    ):
        ready.show(title)
        nameless = ready.page.evaluate(
            "[...document.querySelectorAll('input, select, textarea, button')]"
            ".filter(control => !(control.labels?.length || control.textContent.trim()))"
            ".map(control => control.outerHTML)"
        )
        assert [] == nameless, title


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(browser: Any, gateway: Served, scheme: str) -> None:
    watched = ObservedPage(browser, gateway.url, "upstreams", color_scheme=scheme)
    watched.page.wait_for_selector("#replicas tbody tr")
    pairs = {
        selector: watched.page.evaluate(
            """(selector) => {
                const element = document.querySelector(selector);
                let ground = element;
                const clear = "rgba(0, 0, 0, 0)";
                while (getComputedStyle(ground).backgroundColor === clear) ground = ground.parentElement;
                return [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor];
            }""",
            selector,
        )
        for selector in (
            "h1",
            ".note",
            "#replicas td",
            ".state.good",
            ".state.bad",
            "button",
            "a",
        )
    }
    watched.context.close()

    # WCAG AA for normal text.
    assert {} == {name: pair for name, pair in pairs.items() if contrast(*pair) < 4.5}


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


LONG_PROBLEM = "no replica of this model can be reached: http://replica-0.of.a.long.name.example.org:8080"


@pytest.mark.parametrize("width", [360, 400, 1280])
def test_fits_the_width_of_the_screen(browser: Any, gateway: Served, width: int) -> None:
    watched = ObservedPage(browser, gateway.url, "playground", viewport={"width": width, "height": 740})
    page = watched.page

    def fail_one_model(route: Any) -> None:
        if '"narrow"' in route.request.post_data:
            route.fulfill(status=503, json={"error": {"message": LONG_PROBLEM}})
        else:
            route.continue_()

    page.route("**/v1/embeddings", fail_one_model)
    watched.use_key(KEY)
    page.wait_for_selector("#embed-model option", state="attached")
    page.set_input_files("#images-files", pictures(12))
    for name in ("embed", "search", "images", "rerank", "compare"):
        page.locator(f"#{name}-form button").last.click()
        page.wait_for_selector(f"#{name}-answer table")
    problem = page.locator("#compare-answer td.problem").bounding_box()
    widest = {"Playground": page.evaluate("document.documentElement.scrollWidth")}
    for title in ("Overview", "Upstreams", "Models", "Tenants and keys", "Recent calls", "My key"):
        watched.show(title)
        page.wait_for_selector("table:visible")
        widest[title] = page.evaluate("document.documentElement.scrollWidth")
    watched.context.close()

    assert {} == {title: pixels for title, pixels in widest.items() if pixels > width}
    # Several words a line.
    assert problem["width"] > 150


def test_states_of_models_are_in_sight_on_a_phone(browser: Any, gateway: Served) -> None:
    watched = ObservedPage(browser, gateway.url, "models", viewport={"width": 390, "height": 844})
    watched.page.wait_for_selector("#models tbody tr")
    place = watched.page.locator("#models").bounding_box()
    state = watched.page.locator("#models .state").first.bounding_box()
    heights = {
        row.inner_text().split()[0]: row.bounding_box()["height"]
        for row in watched.page.query_selector_all("#models tbody tr")
    }
    watched.context.close()

    # Left of the shadow at the edge.
    assert state["x"] + state["width"] < place["x"] + place["width"] - 12
    # Two lines of operations.
    assert heights["bge"] < 60


def test_preselects_the_default_model(ready: ObservedPage) -> None:
    assert "bge" in text_of(ready.page, "#rerank-model")
    assert "cross" == ready.page.input_value("#rerank-model")


def test_reports_an_unreachable_gateway_and_recovers(ready: ObservedPage) -> None:
    ready.show("Overview")
    ready.page.wait_for_selector("#lanes tbody tr")
    ready.context.set_offline(True)
    ready.page.wait_for_selector("#status-problem")
    assert "does not answer; asking again" in text_of(ready.page, "#status-problem")
    assert "Last seen at" in text_of(ready.page, "#status-line")
    ready.context.set_offline(False)
    ready.page.wait_for_selector("#status-problem", state="detached")


def test_keeps_the_selection_while_the_status_changes(watched: ObservedPage) -> None:
    watched.page.wait_for_selector("#lanes tbody tr")
    watched.page.evaluate("getSelection().selectAllChildren(document.getElementById('lanes'))")
    selected = watched.page.evaluate("String(getSelection())")
    for _ in range(2):
        with watched.page.expect_response(lambda reply: reply.url.endswith("/admin/status")):
            pass
    assert "attempt p50" in selected
    assert selected == watched.page.evaluate("String(getSelection())")
