"""Ray Data over `gateway.client`: two workers, one killed, and a gateway restarted midway."""

import os
from pathlib import Path

import pyarrow as pa
import pytest
import ray

from gateway.client import Client
from tests.clients import cluster
from tests.clients.cluster import KEY, MODEL, Notes, StaticGateway


class Embed:
    """Embedder of blocks; each of Ray's actors has one."""

    def __init__(self, url: str, notes: Notes) -> None:
        self._client = Client(url, KEY, MODEL)
        self._notes = notes

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Return the rows with vectors and errors."""
        done = self._client.embed_rows(rows)
        self._notes.add(os.getpid(), len(done))
        return done.drop_columns(["text"])


def test_every_row_has_its_vector_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.write_rows(tmp_path / "rows")
    gateway, notes = StaticGateway(tmp_path), Notes(tmp_path / "notes")
    gateway.start()
    monkeypatch.setenv("PYTHONPATH", str(cluster.ROOT))
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        with cluster.faults(gateway, notes):
            cluster.measured("Ray Data", lambda: run(tmp_path, gateway.url, notes))
    finally:
        ray.shutdown()
        gateway.stop()
    cluster.check(tmp_path)


def run(folder: Path, url: str, notes: Notes) -> None:
    """Embed all rows with two workers."""
    embedded = ray.data.read_parquet(str(folder / "rows")).map_batches(
        Embed,
        fn_constructor_args=(url, notes),
        batch_format="pyarrow",
        batch_size=5000,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=0.5,
    )
    embedded.write_parquet(str(folder / "embedded"))
