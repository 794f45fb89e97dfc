"""Writes tests/golden: what real servers said to the adapters. `python -m tests.real.record [vllm [embed]]`.

One file is one conversation: every exchange between adapter and server, what the adapter made of it, and how
the server refuses what no adapter sends. Run it when a server's release or an adapter's requests change.
"""

import asyncio
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from backends.contract import ReplicaSpec
from tests.conftest import remote_backend
from tests.engine.cross_encoder import make_cross_encoder
from tests.real.classifier import make_classifier
from tests.real.outcomes import outcome_of
from tests.real.servers import HOME, PACKAGES, Server, serve_command, serve_model
from tests.real.works import REFUSALS, WORKS, Task

GOLDEN = Path(__file__).parents[1] / "golden"
# Headers that change from run to run, or say nothing.
QUIET = {"date", "content-length", "connection", "server", "vary"}
# Of /metrics only what is read.
METRIC = "vllm:num_requests_waiting"


class Recording(httpx.AsyncHTTPTransport):
    """Passes requests on and keeps each with its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One exchange."""
        response = await super().handle_async_request(request)
        content = await response.aread()
        body = json.loads(request.content) if request.content else None
        self.exchanges.append(exchange(request.method, request.url.path, body, response, content))
        return httpx.Response(response.status_code, headers=response.headers, content=content)


def exchange(method: str, path: str, body: Any, response: httpx.Response, content: bytes) -> dict[str, Any]:
    """A request and its answer, bodies as JSON where they are."""
    headers = {name: value for name, value in response.headers.items() if name not in QUIET}
    asked = {"method": method, "path": path, "body": body}
    return {
        "request": asked,
        "response": {"status": response.status_code, "headers": headers} | _shown(content),
    }


def _shown(content: bytes) -> dict[str, Any]:
    # Where this machine keeps the checkpoints is nobody's business.
    content = content.replace(str(HOME / "models").encode(), b"/models")
    try:
        return {"json": json.loads(content)}
    except ValueError:
        lines = [line for line in content.decode().splitlines() if not line or METRIC in line]
        return {"text": "\n".join(lines)}


def make_models(folder: Path) -> dict[Task, Path]:
    """The checkpoints that are served, below folder: their names are the served ones."""
    from backends.checkpoints import DEFAULT_MODEL, locate_checkpoint

    folder.mkdir(parents=True, exist_ok=True)
    embed, rerank = folder / "all-MiniLM-L6-v2", folder / "cross-encoder"
    if not embed.exists():
        embed.symlink_to(locate_checkpoint(DEFAULT_MODEL).resolve(), target_is_directory=True)
    if not (rerank / "model.safetensors").exists():
        rerank.mkdir(exist_ok=True)
        make_cross_encoder(embed.resolve(), rerank)
    classify = folder / "classifier"
    if not (classify / "model.safetensors").exists():
        classify.mkdir(exist_ok=True)
        make_classifier(embed.resolve(), classify)
    return {"embed": embed, "rerank": rerank, "classify": classify}


def replica_spec(server: Server, url: str, model: Path) -> ReplicaSpec:
    """As an operator would configure it: Infinity needs the tokenizer."""
    return ReplicaSpec(url, tokenizer=str(model) if server == "infinity" else None)


async def conversation(server: Server, task: Task, url: str, model: Path) -> dict[str, Any]:
    """Everything, in one file's shape."""
    transport = Recording()
    backend = remote_backend(server, replica_spec(server, url, model), transport)
    told = await backend.describe(60.0)
    outcomes = {
        name: await outcome_of(lambda asked: backend.run(asked, 60.0), work)
        for name, work in WORKS[task].items()
    }
    await backend.queue_depth(5.0)  # type: ignore[attr-defined]
    await backend.aclose()
    return {
        "package": PACKAGES[server],
        "command": " ".join(serve_command(server, Path(model.name), 8000)),
        "torch": version("torch"),
        "described": {
            "model_id": told.model_id,
            "operations": sorted(told.operations),
            "max_input_tokens": told.max_input_tokens,
            "dimensions": told.dimensions,
            "outputs": sorted(told.outputs),
            "labels": list(told.labels),
            "notes": list(told.notes),
        },
        "outcomes": outcomes,
        "exchanges": transport.exchanges,
        "refusals": _refusals(server, url),
    }


def _refusals(server: Server, url: str) -> dict[str, Any]:
    """How it says no, without the inputs that it repeats."""
    found = {}
    for name, (path, body) in REFUSALS[server].items():
        response = httpx.post(url + path, json=body, timeout=60.0)
        shown = exchange("POST", path, None, response, response.content)
        for detail in shown["response"].get("json", {}).get("detail", []):
            if isinstance(detail, dict):
                detail.pop("input", None)
        found[name] = shown
    return found


def record(server: Server, wanted: str | None = None) -> None:
    """All kinds of model, or one, one after the other."""
    for task, model in make_models(HOME / "models").items():
        if wanted not in (None, task):
            continue
        with serve_model(server, model) as url:
            talk = asyncio.run(conversation(server, task, url, model))
        target = GOLDEN / server / f"{model.name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(talk, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    asked = sys.argv[1:3]
    for one in asked[:1] or PACKAGES:
        record(one, *asked[1:])  # type: ignore[arg-type]
