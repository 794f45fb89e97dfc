"""`gateway embed` as a process on a real gateway: killed at any moment, interrupted, and what it loads."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.fakes.embedder import FakeEmbedder
from tests.fakes.tei import FakeTei, vector_of
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import KEY, Served
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

ROWS = 3000
TEXTS = [f"text {number} " + "long word " * (number % 40) for number in range(ROWS)]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("embed")
    with serve_in_thread(FakeTei(max_tokens=1000)) as url:
        config = folder / "router.yaml"
        config.write_text(
            f"listen: 127.0.0.1:0\nlogs: {{access: false}}\n"
            f"upstreams: {{fake: {{backend: tei, replicas: ['{url}']}}}}\n"
            "models: {fake: {upstream: fake}}\n"
        )
        served = Served(config).wait_until_up()
        try:
            yield served
        finally:
            served.stop()


def start(gateway: Served | None, folder: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "gateway", "embed", "in.jsonl", "--to", "out.parquet", "--json", *words]
    # A shell starts tests in the background with a SIGINT that is ignored, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        command if gateway is None else [*command, "--url", gateway.url],
        cwd=folder,
        env={**os.environ, "GATEWAY_API_KEY": KEY, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def write_input(folder: Path) -> None:
    lines = [json.dumps({"number": number, "text": text}) for number, text in enumerate(TEXTS)]
    (folder / "in.jsonl").write_text("\n".join(lines))


def wait_for_parts(folder: Path, count: int, process: "subprocess.Popen[str]") -> int:
    """Wait until a run has stored so many parts or has ended; return how many there are."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s and process.poll() is None:
        found = len(list((folder / "out.parquet.parts").glob("part-*.arrow")))
        if found >= count:
            return found
        time.sleep(0.01)
    assert process.poll() is not None, "no part was stored"
    return 0


def assert_complete(folder: Path) -> None:
    table = pq.read_table(folder / "out.parquet")
    assert list(range(ROWS)) == table["number"].to_pylist()
    assert TEXTS == table["text"].to_pylist()
    found = table["embedding"].combine_chunks().flatten().to_numpy().reshape(ROWS, -1)
    np.testing.assert_allclose(found, np.stack([vector_of(text) for text in TEXTS]), atol=1e-6)
    assert ["in.jsonl", "out.parquet"] == sorted(path.name for path in folder.glob("[!.]*"))


def test_a_killed_run_is_completed_by_the_next_ones(gateway: Served, tmp_path: Path) -> None:
    write_input(tmp_path)
    kills = parts = 0
    while True:
        process = start(gateway, tmp_path, "--batch-inputs", "16", "--concurrency", "2")
        # Killed behind the part that this run has stored, while further chunks are in flight.
        parts = wait_for_parts(tmp_path, parts + 1, process)
        if not parts:
            break
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        kills += 1
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert kills > 0
    assert json.loads(output)["rows"] == ROWS
    assert_complete(tmp_path)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_stores_what_is_complete(
    gateway: Served, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    write_input(tmp_path)
    process = start(gateway, tmp_path, "--batch-inputs", "4", "--concurrency", "1")
    assert wait_for_parts(tmp_path, 1, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "run the same command again to continue" in errors) == (status, True)
    process = start(gateway, tmp_path)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert "continuing after" in errors
    assert_complete(tmp_path)


def test_a_run_interrupted_before_its_first_part_has_kept_nothing(tmp_path: Path) -> None:
    write_input(tmp_path)
    called, ended = threading.Event(), threading.Event()

    def hold(_: Sequence[str]) -> None:
        called.set()
        ended.wait(PATIENCE_S)

    server = FakeEmbedder()
    server.hook = hold
    with serve_in_thread(server) as url:
        process = start(None, tmp_path, "--url", url)
        assert called.wait(PATIENCE_S)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
        ended.set()
    assert (process.returncode, "nothing was kept" in errors) == (130, True)


def test_a_run_interrupted_while_it_asks_for_the_model_ends_with_a_line(tmp_path: Path) -> None:
    write_input(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        process = start(None, tmp_path, "--url", f"http://127.0.0.1:{listener.getsockname()[1]}")
        connection, _ = listener.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert errors == "stopped by a signal; nothing was kept, and the same command starts from the beginning\n"


def test_the_command_line_loads_nothing_heavy() -> None:
    script = "import sys, gateway.cli.main as line; line.parser_of('embed'); print(*sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=PATIENCE_S
    )
    loaded: set[Any] = set(ended.stdout.split())
    assert "gateway.cli.embed.options" in loaded
    assert not {"pyarrow", "lance", "gateway.cli.embed.run"} & loaded
