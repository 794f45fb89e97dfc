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
        with cluster.faults(gateway, notes):
            cluster.measured("Daft", lambda: run(tmp_path, gateway.url, notes))
    finally:
        gateway.stop()
    cluster.check(tmp_path)


def run(folder: Path, url: str, notes: Notes) -> None:
    """Embed all rows. The death of a worker ends Daft's query; the next one embeds the rows that are left."""
    with pytest.raises(RuntimeError, match="UDF process"):
        embed_files(folder, url, notes)
    embed_files(folder, url, notes)


def embed_files(folder: Path, url: str, notes: Notes) -> None:
    """Embed file by file the rows whose keys are not in the output."""
    target = folder / "embedded"
    for source in sorted((folder / "rows").iterdir()):
        rows = daft.read_parquet(str(source))
        if target.exists():
            rows = rows.join(daft.read_parquet(str(target)).select("id"), on="id", how="anti")
        rows.select("id", Embed(url, notes).rows(daft.col("text"))).write_parquet(str(target))
