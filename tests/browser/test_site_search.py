"""Search of the documentation site when its pages are opened from a file, without a server or a network."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
BUILD_TIMEOUT_S = 300


def test_search_finds_pages_from_a_file(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("material", reason="make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=BUILD_TIMEOUT_S)
    page = browser.new_page()
    page.set_default_timeout(60_000)
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    for name in ("index.html", "decisions/index.html"):
        page.goto((tmp_path / "site" / name).as_uri())
        page.locator(".md-search__input").click()
        page.locator(".md-search__input").press_sequentially("fingerprint")
        page.wait_for_selector(".md-search-result__item a[href*='vector-space.html']", state="attached")
    page.close()

    assert [] == [address for address in addresses if not address.startswith("file:")]
