"""Daft over `gateway.client`: two worker processes, one killed, and a gateway restarted midway."""

import os
from pathlib import Path
from typing import Any

import daft
import pytest
from daft import DataType, Series

from gateway.client import Client
from tests.clients import cluster
from tests.clients.cluster import KEY, MODEL, Notes, StaticGateway

RESULT = DataType.struct(
    {
        "embedding": DataType.list(DataType.float32()),
        "error_kind": DataType.string(),
        "error_message": DataType.string(),
    }
)
WORKERS = 2


@daft.cls(use_process=True, max_concurrency=WORKERS)
class Embed:
    """Embedder of batches; each worker process has one."""

    def __init__(self, url: str, notes: Notes) -> None:
        self._client = Client(url, KEY, MODEL)
        self._notes = notes

    @daft.method.batch(return_dtype=RESULT, unnest=True, batch_size=5000)
    def rows(self, texts: Series) -> Any:
        """Return vectors and errors."""
        done = self._client.embed_rows({"text": texts.to_arrow()})
        self._notes.add(os.getpid(), len(done))
        return done.select(["embedding", "error_kind", "error_message"]).to_struct_array().combine_chunks()


def test_every_row_has_its_vector_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.write_rows(tmp_path / "rows")
    monkeypatch.setenv("PYTHONPATH", str(cluster.ROOT))
    gateway, notes = StaticGateway(tmp_path), Notes(tmp_path / "notes")
    gateway.start()
    try:
        # Behind the first query, whose rows are not embedded again.
        with cluster.faults(gateway, notes, kill_at=0.6, restart_at=0.8):
            cluster.measured("Daft", lambda: run(tmp_path, gateway.url, notes))
    finally:
        gateway.stop()
    cluster.check(tmp_path)


def run(folder: Path, url: str, notes: Notes) -> None:
    """Embed all rows. The death of a worker ends Daft's query; the next one embeds the rows that are left."""
    with pytest.raises(RuntimeError, match="UDF process"):
        embed_halves(folder, url, notes)
    assert (folder / "embedded").exists()
    embed_halves(folder, url, notes)


def embed_halves(folder: Path, url: str, notes: Notes) -> None:
    """Embed with two queries the rows whose keys are not in the output."""
    target, sources = folder / "embedded", sorted(map(str, (folder / "rows").iterdir()))
    for half in (sources[::2], sources[1::2]):
        rows = daft.read_parquet(half)
        if target.exists():
            rows = rows.join(daft.read_parquet(str(target)).select("id"), on="id", how="anti")
        rows.select("id", Embed(url, notes).rows(daft.col("text"))).write_parquet(str(target))
