"""Draw images of `gateway status` and of the console at /ui under load, for docs/images.

    .venv/bin/python -m tests.browser.draw_images --folder docs/images

The gateway has the built-in engine with the default model, three stubs, one of them stopped, and three
tenants, one of them over its limit. Needs `requirements/browser.txt` and a Chromium.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from rich.console import Console

from gateway.cli.gateway_client import GatewayClient
from gateway.cli.status import PATH, StatusDisplay
from gateway.telemetry.snapshot import Snapshot
from gateway.tenants.keyring import key_digest
from loadtest.processes import PinnedProcess, process_group
from loadtest.servers import start_gateway, start_stub

KEYS = {name: f"sk-{name}" for name in ("search", "ingest", "trial", "ops")}
ENGINE, STUB = "all-minilm-l6-v2", "bge-m3"
# Time under load before an image is taken, in which windows and rates settle and the charts get points.
SETTLE_S = 100.0
CANCEL_AFTER_S = 25.0
WIDE = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}
TERMINAL_COLUMNS = 124
TEXT = "what people ask a search for, of which there are many "


def config(stubs: list[int], state: Path) -> str:
    """Return a configuration with two upstreams, three tenants and an operator. state: of stored keys."""
    replicas = ", ".join(f"'http://127.0.0.1:{port}'" for port in stubs)
    limited = "limits: {requests_per_minute: 30}"
    scopes = "scopes: [embed, rerank, tokenize, admin]"
    return (
        f"logs: {{access: false}}\nstate_dir: {state}\nbatches: {{dir: {state}/batches}}\ncurrency: EUR\n"
        "upstreams:\n"
        "  minilm: {backend: torch, model: sentence-transformers/all-MiniLM-L6-v2}\n"
        f"  bge: {{backend: tei, replicas: [{replicas}], in_flight_batches: 2}}\n"
        f"models: {{{ENGINE}: {{upstream: minilm}}, small: {{upstream: minilm}}, "
        f"{STUB}: {{upstream: bge, price_per_million_tokens: 0.02}}}}\n"
        f"tenants:\n  search: {{keys: ['{key_digest(KEYS['search'])}'], weight: 2}}\n"
        f"  ingest: {{keys: ['{key_digest(KEYS['ingest'])}'], priority: bulk}}\n"
        f"  trial: {{keys: ['{key_digest(KEYS['trial'])}'], {limited}}}\n"
        f"  ops: {{keys: [{{digest: '{key_digest(KEYS['ops'])}', {scopes}}}]}}\n"
    )


async def keep_calling(client: httpx.AsyncClient, tenant: str, texts: int, pause_s: float) -> None:
    """Send calls until cancelled, whether they succeed or are refused."""
    number = 0
    while True:
        number += 1
        body = {"model": STUB, "input": [f"{TEXT}{tenant} {number} {index}" for index in range(texts)]}
        await client.post("/v1/embeddings", json=body, headers={"authorization": f"Bearer {KEYS[tenant]}"})
        await asyncio.sleep(pause_s)


async def create_batch(client: httpx.AsyncClient, lines: int, model: str = STUB) -> str:
    """Upload a file of lines, create a batch of it, and return its id."""
    request = {"method": "POST", "url": "/v1/embeddings", "body": {"model": model, "input": TEXT}}
    content = "".join(json.dumps({"custom_id": str(number), **request}) + "\n" for number in range(lines))
    headers = {"authorization": f"Bearer {KEYS['ingest']}"}
    files = {"file": ("input.jsonl", content.encode())}
    uploaded = await client.post("/v1/files", data={"purpose": "batch"}, files=files, headers=headers)
    body = {
        "input_file_id": uploaded.raise_for_status().json()["id"],
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    }
    created = await client.post("/v1/batches", json=body, headers=headers)
    return str(created.raise_for_status().json()["id"])


async def run_batches(client: httpx.AsyncClient) -> None:
    """Run a batch to its end, one that is cancelled, one that fails and one that goes on."""
    await create_batch(client, 200)
    cancelled = await create_batch(client, 4_000)
    await create_batch(client, 20, model="bge-m4")
    await asyncio.sleep(CANCEL_AFTER_S)
    path = f"/admin/batches/{cancelled}"
    (await client.post(f"{path}/cancel")).raise_for_status()
    while (await client.get(path)).json()["batch"]["status"] != "cancelled":  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(1)
    await create_batch(client, 50_000)


@contextlib.asynccontextmanager
async def load(url: str) -> AsyncIterator[None]:
    """Run callers of three tenants: many with one text, a few with many, and one over its limit."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        callers = [keep_calling(client, "search", 1, 0.05) for _ in range(12)]
        callers += [keep_calling(client, "ingest", 256, 0.0) for _ in range(4)]
        callers += [keep_calling(client, "trial", 1, 0.1)]
        tasks = [asyncio.create_task(caller) for caller in callers]
        tasks.append(asyncio.create_task(run_batches(client)))
        try:
            await asyncio.sleep(SETTLE_S)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def draw_terminal(url: str, folder: Path) -> None:
    """Draw the live view after two updates, as an SVG."""
    display, client = StatusDisplay(url), GatewayClient(url, None)
    for _ in range(2):
        display.update(await asyncio.to_thread(client.get, PATH, Snapshot))
        await asyncio.sleep(1)
    client.close()
    console = Console(record=True, width=TERMINAL_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(display)
    console.print()
    # Remove the fonts, which a browser would load from another host.
    drawn = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="gateway status"), flags=re.DOTALL)
    await asyncio.to_thread((folder / "status.svg").write_text, drawn, encoding="utf-8")


# Name of the file, colors, address behind #, what is waited for.
PICTURES = (
    ("ui-overview", "light", "overview?range=15m", ".plot canvas"),
    ("ui-dark", "dark", "overview?range=15m", ".plot canvas"),
    ("ui-calls", "light", "calls", "tbody tr"),
    ("ui-tenants", "light", "tenants", "tbody tr"),
    ("ui-tenant", "light", "tenants/ingest?range=15m", ".plot canvas"),
    ("ui-keys", "light", "keys", "tbody tr"),
    ("ui-models", "light", "models", "tbody tr"),
    ("ui-upstreams", "light", "upstreams", "main .badge"),
    ("ui-batches", "light", "batches", "tbody tr"),
    ("ui-audit", "light", "audit", "tbody tr"),
    ("ui-playground", "light", "playground", "#embed-answer table"),
    ("ui-usage", "light", "usage?range=15m", ".plot canvas"),
    ("ui-phone", "light", "overview?range=15m", ".plot canvas"),
)


async def draw_pages(url: str, folder: Path) -> None:
    """Draw each page of the console, one in dark colors and one on a phone."""
    from playwright.async_api import async_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as running:
        browser = await running.chromium.launch(executable_path=chromium(), args=arguments)
        for name, scheme, address, awaited in PICTURES:
            size = PHONE if name == "ui-phone" else WIDE
            context = await browser.new_context(viewport=size, color_scheme=scheme)
            key = KEYS["search" if name == "ui-usage" else "ops"]
            await context.add_init_script(f"sessionStorage.setItem('gateway.key', '{key}')")
            page = await context.new_page()
            await page.goto(f"{url}/ui#/{address}")
            if name == "ui-playground":
                await page.get_by_role("button", name="Embed", exact=True).click()
            await page.wait_for_selector(awaited)
            # A rate needs a second update.
            await page.wait_for_timeout(4500)
            await page.screenshot(path=str(folder / f"{name}.png"))
            await context.close()
        await browser.close()


async def store_keys(url: str) -> None:
    """Make a tenant and two keys, as the page of tenants does."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        settings = {"limits": {"tokens_per_day": 5_000_000, "requests_per_minute": 600}}
        (await client.put("/admin/tenants/analytics", json=settings)).raise_for_status()
        for key in ({"id": "notebook"}, {"id": "nightly", "expires": "2027-12-31", "models": [STUB]}):
            (await client.post("/admin/keys", json={"tenant": "analytics", **key})).raise_for_status()


def chromium() -> str:
    """Return the path of the browser.

    Raises: SystemExit if there is none.
    """
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        sys.exit("no chromium on the path")
    return path


async def draw(url: str, folder: Path, stopped_stub: PinnedProcess) -> None:
    """Draw all images under load. stopped_stub: a stub that is stopped once the load runs."""
    await store_keys(url)
    async with load(url):
        await asyncio.to_thread(stopped_stub.stop)
        await asyncio.sleep(2)
        await draw_terminal(url, folder)
        await draw_pages(url, folder)


def main() -> None:
    """Start the servers and draw all images."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("loadtest-results"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, process_group() as processes:
        stubs = [
            start_stub(
                Path(name), "--base-ms", "15", "--input-ms", "0.5", "--parallel", "2", name=f"stub-{number}"
            )
            for number in range(3)
        ]
        stopped_stub = stubs.pop()
        processes += [stub.process for stub in (*stubs, stopped_stub)]
        ports = [stub.target.port for stub in (*stubs, stopped_stub)]
        gateway = start_gateway(Path(name), config(ports, Path(name) / "state"))
        processes.append(gateway.process)
        gateway.process.unpin()
        url = f"http://127.0.0.1:{gateway.target.port}"
        asyncio.run(draw(url, arguments.folder, stopped_stub.process))


if __name__ == "__main__":
    main()
