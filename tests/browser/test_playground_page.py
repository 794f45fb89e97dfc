"""The playground in a real browser: each tab with real calls, code that runs, mistakes beside their form."""

import math
import subprocess
from typing import Any

import pytest

from tests.browser.conftest import MARKUP, ObservedPage, contrast
from tests.pictures import encoded, noise
from tests.processes.conftest import KEY

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def text_of(page: Any, selector: str) -> str:
    """Return the visible text of an element."""
    return str(page.inner_text(selector))


def heat(page: Any, selector: str) -> list[list[str]]:
    """Return the texts of a heat map's cells, by row."""
    rows = page.query_selector_all(f"{selector} table.heat tbody tr")
    return [[cell.inner_text() for cell in row.query_selector_all("td")] for row in rows]


def choose(ready: ObservedPage, tab: str) -> Any:
    """Open a tab of the playground."""
    ready.page.get_by_role("tab", name=tab).click()
    return ready.page


def send(page: Any, verb: str) -> None:
    """Submit the form of the tab."""
    page.get_by_role("button", name=verb, exact=True).click()


def pictures(count: int) -> list[dict[str, Any]]:
    """Return files as a user chooses them."""
    return [
        {"name": f"{seed}.png", "mimeType": "image/png", "buffer": encoded(noise(40, 30, seed))}
        for seed in range(count)
    ]


def test_embeds_texts_and_draws_their_similarity(ready: ObservedPage) -> None:
    page = ready.page
    page.get_by_label("Texts, one a line").fill(f"one\ntwo\none\n{MARKUP}")
    send(page, "Embed")
    page.wait_for_selector("#embed-answer table.heat")
    cells = heat(page, "#embed-answer")
    colors = page.eval_on_selector_all(
        "#embed-answer table.heat tbody td", "all => all.map(cell => getComputedStyle(cell).backgroundColor)"
    )

    assert ["1.000"] * 3 == [cells[0][0], cells[1][1], cells[0][2]]
    assert cells[0][1] == cells[1][0] != "1.000"
    assert colors[0] == colors[2] != colors[1]
    facts = text_of(page, "#embed-answer .facts")
    assert "4 vectors of 8 numbers" in facts
    assert "in the gateway" in facts
    assert "tokens" in facts
    assert MARKUP in text_of(page, "#embed-answer")
    assert 0 == page.locator("img").count()
    assert [] == ready.complaints


def test_says_what_was_truncated_and_what_it_costs(ready: ObservedPage) -> None:
    listed = {
        "id": "bge",
        "operations": ["embed"],
        "state": "ready",
        "default_for": [],
        "price_per_million_tokens": 20,
        "currency": "EUR",
    }
    headers = {"x-truncated-inputs": "1", "server-timing": "total;dur=12.5"}
    reply = {"data": [{"index": 0, "embedding": [1, 0]}], "usage": {"total_tokens": 1000}}
    page = ready.page
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [listed]}))
    page.route("**/v1/embeddings", lambda route: route.fulfill(json=reply, headers=headers))
    page.reload()
    page.get_by_label("Texts, one a line").fill("one")
    send(page, "Embed")
    page.wait_for_selector("#embed-answer table.heat")
    facts = text_of(page, "#embed-answer .facts")

    assert "12.5 ms in the gateway" in facts
    assert "0.02 EUR" in facts
    assert "1 truncated" in facts


def test_offers_only_tabs_and_models_that_can(ready: ObservedPage) -> None:
    page = choose(ready, "Rerank")
    assert "cross" == page.get_by_label("Model", exact=True).input_value()
    offered = page.locator("#rerank-form option").all_inner_texts()
    assert "narrow" not in offered
    page.route(
        "**/v1/models",
        lambda route: route.fulfill(
            json={"data": [{"id": "only", "operations": ["rerank"], "state": "ready", "default_for": []}]}
        ),
    )
    page.reload()
    page.wait_for_selector("[role=tab]")
    tabs = page.get_by_role("tablist", name="Ways to use the models").get_by_role("tab")
    assert ["Rerank"] == tabs.all_inner_texts()


def test_ranks_documents(ready: ObservedPage) -> None:
    page = choose(ready, "Rerank")
    page.get_by_label("Documents, one a line").fill(f"first\nsecond\n{MARKUP}")
    send(page, "Rerank")
    page.wait_for_selector("#rerank-answer .hits li")
    scores = [float(text) for text in page.locator("#rerank-answer .hit-score").all_inner_texts()]
    texts = page.locator("#rerank-answer .hit-text").all_inner_texts()

    assert {"first", "second", MARKUP} == set(texts)
    assert scores == sorted(scores, reverse=True)
    assert [] == ready.complaints


def test_searches_a_file_and_embeds_it_once(ready: ObservedPage) -> None:
    page = choose(ready, "Search a file")
    content = "".join(f'{{"text": "row {number} is about {number * 7}"}}\n' for number in range(200))
    page.set_input_files(
        "#search-form input[type=file]",
        {"name": "rows.jsonl", "mimeType": "application/jsonl", "buffer": content.encode()},
    )
    page.get_by_label("Search for").fill("row 137 is about 959")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    send(page, "Search")
    page.wait_for_selector("#search-answer .hits li")
    best = page.locator("#search-answer .hits li").first.inner_text()
    first = len(sent)
    page.get_by_label("Search for").fill("row 42 is about 294")
    send(page, "Search")
    page.get_by_text("only the query was sent").wait_for()

    assert "row 137 is about 959" in best
    assert "line 138" in best
    assert (3, 1) == (first, len(sent) - first)
    assert [] == ready.complaints


def test_compares_images_with_texts(ready: ObservedPage) -> None:
    page = choose(ready, "Pictures")
    page.set_input_files("#images-form input[type=file]", pictures(3))
    page.get_by_label("Captions, one a line").fill("a cat\na dog")
    send(page, "Compare images")
    page.wait_for_selector("#images-answer table.heat")
    widths = page.eval_on_selector_all(
        "#images-answer thead img", "all => all.map(image => image.complete && image.naturalWidth)"
    )

    assert [40] * 3 == widths
    assert [3, 3] == [len(row) for row in heat(page, "#images-answer")]
    assert "5 vectors of 8 numbers" in text_of(page, "#images-answer")
    assert [] == ready.complaints


def test_takes_dropped_images_and_refuses_other_files(ready: ObservedPage) -> None:
    page = choose(ready, "Pictures")
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
    send(page, "Compare images")
    page.wait_for_selector("#images-answer .problem")
    assert "none of these formats" in text_of(page, "#images-answer")
    page.get_by_role("button", name="Remove all images").click()
    assert 0 == page.locator("#images-chosen img").count()


def test_marks_the_patches_of_a_page(ready: ObservedPage) -> None:
    page = ready.page
    for _ in range(30):
        # The engine loads the model meanwhile; its tab appears with it.
        if page.get_by_role("tab", name="Pages").count():
            break
        page.wait_for_timeout(1000)
        page.reload()
        page.wait_for_selector("[role=tab]")
    choose(ready, "Pages")
    (picture,) = pictures(1)
    page.set_input_files("#pages-form input[type=file]", picture)
    page.get_by_label("Question").fill("a cat on a mat")
    send(page, "Mark the page")
    page.wait_for_selector("#pages-answer canvas")
    corner = "canvas => [...canvas.getContext('2d').getImageData(5, 5, 1, 1).data]"
    canvas = page.locator("#pages-answer canvas")

    assert "score" in text_of(page, "#pages-answer")
    assert "2 × 3 patches" in text_of(page, "#pages-answer")
    assert (canvas.get_attribute("aria-label") or "").startswith("best patch: row ")
    assert [] == ready.complaints
    labels = set()
    tokens = page.get_by_label("Mark by")
    for token in range(1, tokens.locator("option").count()):
        tokens.select_option(str(token))
        labels.add((*canvas.evaluate(corner), canvas.get_attribute("aria-label")))
    assert len(labels) > 1


def test_does_not_compare_models_of_unequal_width(ready: ObservedPage) -> None:
    page = choose(ready, "Models side by side")
    send(page, "Compare")
    page.wait_for_selector("#compare-answer table.heat")
    cells = heat(page, "#compare-answer")

    assert "1.000" == cells[0][1]
    assert "8 ≠ 4" == cells[0][2]
    assert "cannot be compared" in text_of(page, "#compare-answer")
    assert [] == ready.complaints


def test_shows_errors_next_to_their_form(ready: ObservedPage) -> None:
    page = ready.page
    page.get_by_label("Texts, one a line").fill("\n \n")
    send(page, "Embed")
    page.wait_for_selector("#embed-answer .problem")
    assert "at least one text" in text_of(page, "#embed-answer")
    page.get_by_label("Texts, one a line").fill("one")
    send(page, "Embed")
    page.wait_for_selector("#embed-answer table.heat")
    assert not page.is_visible("#embed-answer .problem")


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
    ready.page.get_by_label("Texts, one a line").fill("\n".join(map(str, range(40))))
    send(ready.page, "Embed")
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


def test_the_code_of_a_call_runs(ready: ObservedPage) -> None:
    page = ready.page
    page.get_by_label("Texts, one a line").fill('it\'s one\ntwo "quoted"')
    codes = {}
    for language in page.get_by_role("tablist", name="Language").get_by_role("tab").all():
        language.click()
        codes[language.inner_text()] = text_of(page, ".code pre")

    assert {"curl", "Python", "TypeScript", "Go", "Java"} == codes.keys()
    environment = {"GATEWAY_API_KEY": KEY, "PATH": "/usr/bin:/bin"}
    shell = subprocess.run(
        ["sh", "-c", codes["curl"]], env=environment, capture_output=True, text=True, check=True, timeout=30
    )
    assert 2 == shell.stdout.count('"embedding":[')
    compile(codes["Python"], "sample", "exec")
    assert KEY not in "".join(codes.values())
