"""What a measured run starts: a stub TEI, redis-servers and gateways, each a process of its own.

Knows nothing of what is measured. Everything listens on loopback, on a port that is free.
"""

import asyncio
import json
import multiprocessing
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import uvicorn
from httpx_aiohttp import AiohttpTransport

INFO = {
    "model_id": "stub",
    "model_type": {"embedding": {"pooling": "cls"}},
    "max_input_length": 512,
    "max_client_batch_size": 32,
    "max_concurrent_requests": 512,
    "auto_truncate": True,
    "version": "1.9.3",
}
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 40
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """One that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    """TEI's /info and /v1/embeddings; a text `slow` takes a minute."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    reply: Any = INFO
    if scope["path"] != "/info":
        texts = json.loads(body)["input"]
        if "slow" in texts:
            await asyncio.sleep(60)
        data = [{"index": n, "embedding": "AACAPwAAAAA="} for n in range(len(texts))]
        reply = {"data": data, "usage": {"prompt_tokens": 3 * len(texts)}}
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(reply).encode()})


def _serve_stub(port: int) -> None:
    config = uvicorn.Config(_answer, port=port, lifespan="off", log_config=None, access_log=False)
    uvicorn.Server(config).run()


@contextmanager
def stub() -> Iterator[str]:
    """A TEI that answers at once; yields its URL."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=_serve_stub, args=(port,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join(10)


class GatewayProcess:
    """`gateway serve`. lines: its log so far, without the lines that each call has."""

    def __init__(self, config: Path, environment: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self.calls_logged = 0
        self._up = threading.Event()
        self._banner = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", "-c", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._readers = [
            threading.Thread(target=one, daemon=True) for one in (self._read_out, self._read_log)
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        """Return when it can be called."""
        if not self._up.wait(START_TIMEOUT_S) or "http://" not in self._banner:
            self.stop()
            raise SystemExit("the gateway did not start:\n" + "\n".join(self.lines))
        return self

    def __exit__(self, *_: object) -> None:
        """End it in order."""
        self.stop()

    @property
    def url(self) -> str:
        """Where it listens."""
        found = re.search(r"http://[\d.]+:\d+", self._banner)
        assert found is not None
        return found[0]

    @property
    def processes(self) -> list[int]:
        """It and its children."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return [self._process.pid, *(int(pid) for pid in children.split())]

    def cpu_s(self) -> float:
        """CPU that it and its children have used."""
        return sum(cpu_s(pid) for pid in self.processes)

    def kill(self) -> None:
        """SIGKILL to all of it at once."""
        for pid in self.processes:
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL where that does not end it."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        for reader in self._readers:
            reader.join(5)

    def _read_out(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as out:
            for line in out:
                self._banner += line
                if "curl " in line:
                    self._up.set()
        self._up.set()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as log:
            for line in log:
                if re.search(r" (GET|POST|DELETE) /", line):
                    self.calls_logged += 1
                else:
                    self.lines.append(line.rstrip())


def cpu_s(pid: int) -> float:
    """CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


def client(url: str, key: str) -> httpx.AsyncClient:
    """One that costs little itself, so that it does not measure itself."""
    return httpx.AsyncClient(
        base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=30, transport=AiohttpTransport()
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Of a few values, the nearest; 0 of none."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
