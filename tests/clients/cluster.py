"""Run of an engine of big data over `gateway.client`: its rows, gateway, faults, and the check of its output.

The gateway serves the static model of the package wordllama, and the package itself computes the expected
vectors. Midway a worker of the engine is killed and the gateway restarted.
"""

import hashlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import wordllama

from tests.clients.conftest import ROOT, STOP_S, _free_port, _wait

# Rows of a run; a first try has fewer.
ROWS = int(os.environ.get("CLUSTER_ROWS", "200000"))
FILES = 8
KEY = "cluster-key"
MODEL = "static"
DIMENSIONS = 256
# Every so many rows, one has no text, and another one is longer than the model takes.
EMPTY_EVERY, LONG_EVERY = 1000, 5000
LONG = "word " * 33_000
CONFIG = """
listen: 127.0.0.1:{port}
logs: {{access: false}}
upstreams: {{static: {{backend: torch, model: {weights}}}}}
models: {{static: {{upstream: static, truncate: error}}}}
tenants: {{clients: {{keys: ["sha256:{digest}"]}}}}
"""
PATIENCE_S = 600.0


class StaticGateway:
    """Gateway with a static model, which can be killed and started again on its port."""

    def __init__(self, folder: Path) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._config, self._log = folder / "router.yaml", folder / "log"
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        weights = Path(wordllama.__file__).parent
        self._config.write_text(CONFIG.format(port=port, weights=weights, digest=digest))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until its model is loaded."""
        command = [ROOT / ".venv/bin/gateway", "serve", "-c", self._config]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        _wait(self.url, self._process, self._log)

    def stop(self) -> None:
        """Kill all its processes at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_S)


class Notes:
    """Notes of the engine's workers about their batches, in a folder: a file of a worker has a line a batch.

    A note has the process to kill for a fault of a worker.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, process: int, rows: int) -> None:
        """Note a batch that is complete. Runs in a worker."""
        with (self.folder / str(process)).open("a") as file:
            file.write(f"{rows}\n")

    def workers(self) -> dict[int, int]:
        """Return the rows that each worker has embedded."""
        return {int(path.name): sum(map(int, path.read_text().split())) for path in self.folder.iterdir()}

    def last_worker(self) -> int:
        """Return the worker that has embedded the last batch."""
        return int(max(self.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns).name)


def text_of(number: int) -> str | None:
    """Return the text of a row, which no other row has."""
    if number % EMPTY_EVERY == 7:
        return None
    if number % LONG_EVERY == 8:
        return f"{number} {LONG}"
    return f"row {number} of a corpus with the words {number * 7919 % 10007} and {number * 104729 % 1299709}"


def is_bad(number: int) -> bool:
    """Return whether a row cannot be embedded."""
    return number % EMPTY_EVERY == 7 or number % LONG_EVERY == 8


def write_rows(folder: Path, rows: int = ROWS) -> None:
    """Write Parquet files with the columns `id` and `text`."""
    folder.mkdir()
    for file in range(FILES):
        numbers = range(file, rows, FILES)
        columns = {"id": pa.array(numbers, pa.int64()), "text": pa.array(map(text_of, numbers), pa.string())}
        pq.write_table(pa.table(columns), folder / f"{file:02}.parquet")


@contextmanager
def faults(
    gateway: StaticGateway, notes: Notes, kill_at: float = 0.25, restart_at: float = 0.5
) -> Iterator[None]:
    """Kill a worker after a share of the rows, and restart the gateway after a larger one."""
    done: list[str] = []
    ended = threading.Event()

    def wait_for(share: float) -> bool:
        while sum(notes.workers().values()) < share * ROWS:
            if ended.wait(0.05):
                return False
        return True

    def harm() -> None:
        if wait_for(kill_at):
            os.kill(notes.last_worker(), signal.SIGKILL)
            done.append("worker killed")
        if wait_for(restart_at):
            gateway.stop()
            gateway.start()
            done.append("gateway restarted")

    thread = threading.Thread(target=harm)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PATIENCE_S)
    assert ["worker killed", "gateway restarted"] == done


def two_tables(folder: Path) -> None:
    """Write the rows that an engine has embedded to `vectors`, and the bad ones to `bad`."""
    embedded, is_bad = ds.dataset(folder / "embedded"), pc.field("error_kind").is_valid()
    for name, columns, kept in (
        ("vectors", ["id", "embedding"], ~is_bad),
        ("bad", ["id", "error_kind", "error_message"], is_bad),
    ):
        scanner = embedded.scanner(columns=columns, filter=kept)
        ds.write_dataset(scanner, folder / name, format="parquet")


def reference() -> Any:
    """Return the package's own computation of vectors."""
    return wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)


def check(folder: Path, rows: int = ROWS) -> None:
    """Check that each good row is there once with its own vector, and each bad one in a table of its own."""
    two_tables(folder)
    computes = reference()
    found = np.zeros(rows, np.int64)
    for batch in ds.dataset(folder / "vectors").to_batches(columns=["id", "embedding"]):
        ids = batch["id"].to_numpy()
        np.add.at(found, ids, 1)
        if len(ids):
            expected = computes.embed([text_of(number) for number in ids.tolist()], norm=True)
            actual = batch["embedding"].flatten().to_numpy().reshape(len(ids), DIMENSIONS)
            np.testing.assert_allclose(actual, expected, atol=1e-5)
    expected_bad = [number for number in range(rows) if is_bad(number)]
    assert [0 if is_bad(number) else 1 for number in range(rows)] == found.tolist()
    refused = ds.dataset(folder / "bad").to_table(columns=["id", "error_kind", "error_message"]).sort_by("id")
    assert expected_bad == refused["id"].to_pylist()
    kinds = [
        "empty_input" if number % EMPTY_EVERY == 7 else "invalid_request_error" for number in expected_bad
    ]
    assert kinds == refused["error_kind"].to_pylist()
    assert all(refused["error_message"].to_pylist())


def measured(name: str, run: Callable[[], None], rows: int = ROWS) -> None:
    """Run and print the rate, with the start of the engine."""
    started_s = time.perf_counter()
    run()
    seconds = time.perf_counter() - started_s
    print(f"{name}: {rows:,} rows in {seconds:.0f} s, {rows / seconds:,.0f} rows/s")  # noqa: T201
