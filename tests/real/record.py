"""Recorder of conversations with real servers, stored in tests/golden.

Usage: `python -m tests.real.record [vllm [embed]]`.
Each file is one conversation: every exchange between adapter and server, the adapter's outcomes, and the
server's refusals of requests that no adapter sends. Run it when a server's release or an adapter's requests
change.
"""

import asyncio
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from backends.contract import ReplicaSpec, TokenizerSource
from tests.conftest import remote_backend
from tests.engine.cross_encoder import make_cross_encoder
from tests.real.classifier import make_classifier
from tests.real.outcomes import outcome_of
from tests.real.servers import HOME, PACKAGES, Server, serve_command, serve_model
from tests.real.works import REFUSALS, WORKS, Task

GOLDEN = Path(__file__).parents[1] / "golden"
# Headers that change between runs or carry no information.
QUIET = {"date", "content-length", "connection", "server", "vary"}
# The only metric that an adapter reads.
METRIC = "vllm:num_requests_waiting"


class Recording(httpx.AsyncHTTPTransport):
    """Transport that records every request with its response."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and record the exchange."""
        sent = await request.aread()
        headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"content-length"]
        whole = httpx.Request(request.method, request.url, headers=headers, content=sent)
        response = await super().handle_async_request(whole)
        content = await response.aread()
        body = json.loads(sent) if sent else None
        self.exchanges.append(exchange(request.method, request.url.path, body, response, content))
        return httpx.Response(response.status_code, headers=response.headers, content=content)


def exchange(method: str, path: str, body: Any, response: httpx.Response, content: bytes) -> dict[str, Any]:
    """Return a request and its response, with JSON bodies decoded."""
    headers = {name: value for name, value in response.headers.items() if name not in QUIET}
    return {
        "request": {"method": method, "path": path, "body": body},
        "response": {"status": response.status_code, "headers": headers} | _decode_content(content),
    }


def _decode_content(content: bytes) -> dict[str, Any]:
    # The recording does not contain paths of this machine.
    content = content.replace(str(HOME / "models").encode(), b"/models")
    try:
        return {"json": json.loads(content)}
    except ValueError:
        lines = [line for line in content.decode().splitlines() if not line or METRIC in line]
        return {"text": "\n".join(lines)}


def make_models(folder: Path) -> dict[Task, Path]:
    """Make the checkpoints to serve below folder; their folders have the names of the served models."""
    from backends.checkpoints.locations import DEFAULT_MODEL, locate_checkpoint

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
    """Return the replica as an operator would configure it; Infinity needs the tokenizer."""
    return ReplicaSpec(url, tokenizer=TokenizerSource(str(model)) if server == "infinity" else None)


async def conversation(server: Server, task: Task, url: str, model: Path) -> dict[str, Any]:
    """Run all works against a server and return the content of one golden file."""
    transport = Recording()
    backend = remote_backend(server, replica_spec(server, url, model), transport)
    capabilities = await backend.describe(60.0)
    outcomes = {
        name: await outcome_of(lambda item: backend.run(item, 60.0), work)
        for name, work in WORKS[task].items()
    }
    await backend.queue_depth(5.0)  # type: ignore[attr-defined]
    await backend.aclose()
    return {
        "package": PACKAGES[server],
        "command": " ".join(serve_command(server, Path(model.name), 8000)),
        "torch": version("torch"),
        "described": {
            "model_id": capabilities.model_id,
            "operations": sorted(capabilities.operations),
            "max_input_tokens": capabilities.max_input_tokens,
            "dimensions": capabilities.dimensions,
            "outputs": sorted(capabilities.outputs),
            "labels": list(capabilities.labels),
            "notes": list(capabilities.notes),
        },
        "outcomes": outcomes,
        "exchanges": transport.exchanges,
        "refusals": _refusals(server, url),
    }


def _refusals(server: Server, url: str) -> dict[str, Any]:
    """Record the server's refusals, without the inputs that they repeat."""
    refusals = {}
    for name, (path, body) in REFUSALS[server].items():
        response = httpx.post(url + path, json=body, timeout=60.0)
        entry = exchange("POST", path, None, response, response.content)
        for detail in entry["response"].get("json", {}).get("detail", []):
            if isinstance(detail, dict):
                detail.pop("input", None)
        refusals[name] = entry
    return refusals


def record(server: Server, selected: str | None = None) -> None:
    """Record the conversations of all kinds of model, or of the selected kind."""
    for task, model in make_models(HOME / "models").items():
        if selected not in (None, task):
            continue
        with serve_model(server, model) as url:
            recording = asyncio.run(conversation(server, task, url, model))
        target = GOLDEN / server / f"{model.name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(recording, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    arguments = sys.argv[1:3]
    for name in arguments[:1] or PACKAGES:
        record(name, *arguments[1:])  # type: ignore[arg-type]
