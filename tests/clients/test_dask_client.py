"""The examples for Dask and DuckDB, run on 2,000 rows."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

from tests.clients import cluster
from tests.clients.cluster import KEY, MODEL, ROOT, StaticGateway

ROWS = 2000


def run(example: str, *words: str) -> None:
    """Run an example."""
    environment = {**os.environ, "KEY": KEY, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "examples" / example, *words, "--model", MODEL]
    subprocess.run(command, check=True, env=environment, timeout=cluster.PATIENCE_S)


@pytest.fixture
def gateway(tmp_path: Path) -> StaticGateway:
    found = StaticGateway(tmp_path)
    found.start()
    yield found
    found.stop()


def assert_rows(vectors: pa.Table, bad: pa.Table) -> None:
    """Check the rows with vectors, and the bad ones."""
    numbers = range(ROWS)
    vectors = vectors.sort_by("id")
    assert [number for number in numbers if not cluster.is_bad(number)] == vectors["id"].to_pylist()
    expected = cluster.reference().embed(vectors["text"].to_pylist(), norm=True)
    found = vectors["embedding"].combine_chunks().flatten().to_numpy().reshape(len(vectors), -1)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert [number for number in numbers if cluster.is_bad(number)] == sorted(bad["id"].to_pylist())
    assert all(bad["error_message"].to_pylist())


def test_dask(gateway: StaticGateway, tmp_path: Path) -> None:
    cluster.write_rows(tmp_path / "rows", ROWS)
    words = (str(tmp_path / "rows"), str(tmp_path / "vectors"), "--url", gateway.url)
    run("dask_rows.py", *words)
    rows = ds.dataset(tmp_path / "vectors").to_table()
    is_good = pc.is_null(rows["error_kind"])
    assert_rows(rows.filter(is_good), rows.filter(pc.invert(is_good)))


def test_duckdb(gateway: StaticGateway, tmp_path: Path) -> None:
    cluster.write_rows(tmp_path / "rows", ROWS)
    target = tmp_path / "vectors.parquet"
    run("duckdb_rows.py", f"{tmp_path}/rows/*.parquet", str(target), "--url", gateway.url)
    assert_rows(ds.dataset(target).to_table(), ds.dataset(f"{target}.bad").to_table())
