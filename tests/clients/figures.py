"""Rates of `gateway embed` and of two processes with a client, on the rows of the engines' runs.

.venv/bin/python -m tests.clients.figures
"""

import os
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq

from gateway.client import Client
from tests.clients import cluster
from tests.clients.cluster import KEY, MODEL, ROOT, StaticGateway

WORKERS = 2


def embed_command(folder: Path, url: str) -> None:
    """Run the command."""
    words = ["embed", folder / "rows", "--to", folder / "out.parquet", "--url", url, "--model", MODEL]
    leaving_out = ["--on-empty", "skip", "--on-bad", "skip", "--json"]
    environment = {**os.environ, "GATEWAY_API_KEY": KEY}
    command = [ROOT / ".venv/bin/gateway", *words, *leaving_out]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def embed_file(client: Client, source: Path) -> None:
    """Embed the rows of a file."""
    pq.write_table(client.embed_table(pq.read_table(source), key="id").table, f"{source}.vectors")


def embed_processes(folder: Path, url: str) -> None:
    """Embed with processes that share nothing."""
    files = sorted((folder / "rows").glob("*.parquet"))
    with ProcessPoolExecutor(WORKERS) as pool:
        list(pool.map(embed_file, [Client(url, KEY, MODEL)] * len(files), files))


def main() -> None:
    """Print the rates."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster.write_rows(folder / "rows")
        gateway = StaticGateway(folder)
        gateway.start()
        try:
            cluster.measured("gateway embed", lambda: embed_command(folder, gateway.url))
            cluster.measured(f"{WORKERS} processes", lambda: embed_processes(folder, gateway.url))
        finally:
            gateway.stop()


if __name__ == "__main__":
    main()
