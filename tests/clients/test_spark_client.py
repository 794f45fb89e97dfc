"""Spark over `gateway.client`: two executors, one killed, and a gateway restarted midway; a pandas UDF."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.functions import pandas_udf

from gateway.client import Client
from tests.clients import cluster
from tests.clients.cluster import KEY, MODEL, Notes, StaticGateway

SCHEMA = "id long, embedding array<float>, error_kind string, error_message string"
BATCH_ROWS = 5000


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """Start a cluster of two executors on this machine."""
    # Otherwise the executors run the first `python3` of the path, which has none of these packages.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.executorEnv.PYTHONPATH", str(cluster.ROOT))
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", str(BATCH_ROWS))
        .config("spark.sql.files.maxPartitionBytes", "4m")
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[StaticGateway]:
    found = StaticGateway(tmp_path)
    found.start()
    yield found
    found.stop()


def test_every_row_has_its_vector_once(spark: SparkSession, gateway: StaticGateway, tmp_path: Path) -> None:
    cluster.write_rows(tmp_path / "rows")
    notes = Notes(tmp_path / "notes")
    client = Client(gateway.url, KEY, MODEL)

    def embed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            done = client.embed_rows(batch).select(["id", "embedding", "error_kind", "error_message"])
            notes.add(executor_of(os.getpid()), len(done))
            yield from done.to_batches()

    rows = spark.read.parquet(str(tmp_path / "rows"))
    with cluster.faults(gateway, notes):
        cluster.measured(
            "Spark", lambda: rows.mapInArrow(embed, SCHEMA).write.parquet(str(tmp_path / "embedded"))
        )
    cluster.check(tmp_path)


def executor_of(worker: int) -> int:
    """Return the executor of one of Spark's Python processes: the parent of the daemon that forked it."""
    return parent_of(parent_of(worker))


def parent_of(process: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_pandas_udf_returns_vectors(spark: SparkSession, gateway: StaticGateway, tmp_path: Path) -> None:
    client = Client(gateway.url, KEY, MODEL)

    @pandas_udf("array<float>")
    def embedding(texts: pd.Series) -> pd.Series:
        found: Any = client.embed_rows(pa.table({"text": pa.array(texts, pa.string())}))
        return pd.Series(found["embedding"].to_pylist())

    texts = ["one", None, "two"]
    found = (
        spark.createDataFrame([(text,) for text in texts], "text string").select(embedding("text")).collect()
    )
    vectors = [row[0] for row in found]
    assert vectors[1] is None
    expected = cluster.reference().embed(["one", "two"], norm=True)
    assert [pytest.approx(row, abs=1e-5) for row in expected.tolist()] == [vectors[0], vectors[2]]
