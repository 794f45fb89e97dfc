"""`gateway batch` against a gateway in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.batches import line
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import KEY, Served
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("batches")
    with serve_in_thread(FakeTei()) as url:
        (folder / "router.yaml").write_text(
            f"listen: 127.0.0.1:0\nbatches: {{dir: {folder}/files}}\n"
            f"upstreams: {{one: {{backend: tei, replicas: ['{url}']}}}}\nmodels: {{bge: {{upstream: one}}}}\n"
        )
        served = Served(folder / "router.yaml").wait_until_up()
        yield served
        served.stop()


@pytest.fixture
def run(gateway: Served, tmp_path: Path) -> Run:
    def run_command(*words: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
        action, *rest = words
        return subprocess.run(
            [sys.executable, "-m", "gateway", "batch", action, "--url", gateway.url, *rest],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "GATEWAY_API_KEY": key, "PYTHONPATH": str(Path(__file__).parents[2])},
        )

    return run_command


def write_lines(path: Path, count: int, model: str = "bge") -> None:
    path.write_text("\n".join(line(str(number), "text", model=model) for number in range(count)))


def test_submits_waits_and_fetches(run: Run, tmp_path: Path) -> None:
    write_lines(tmp_path / "input.jsonl", 200)

    submitted = run("submit", "input.jsonl", "--wait")
    batch, summary = submitted.stdout.splitlines()
    status = run("status", batch)
    fetched = run("fetch", batch, "--to", "out.jsonl")

    assert submitted.returncode == status.returncode == fetched.returncode == 0
    assert summary == f"{batch} is completed: 200 of 200 lines completed, 0 failed"
    assert status.stdout.strip() == summary
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(text)["custom_id"] for text in lines] == [str(n) for n in range(200)]
    assert list(tmp_path.glob("*.part")) == []


def test_reports_a_broken_file_with_its_line(run: Run, tmp_path: Path) -> None:
    write_lines(tmp_path / "input.jsonl", 2, "ada")

    ended = run("submit", "input.jsonl", "--wait")

    assert ended.returncode == 1
    assert "is failed" in ended.stdout
    assert "line 1: there is no model 'ada'" in ended.stderr


def test_reports_what_the_gateway_refuses(run: Run, tmp_path: Path) -> None:
    write_lines(tmp_path / "input.jsonl", 1)
    batch = run("submit", "input.jsonl").stdout.strip()
    run("status", batch, "--wait")

    late = run("cancel", batch)
    unknown = run("status", "batch_unknown")
    refused = run("submit", "input.jsonl", key="wrong")
    missing = run("submit", "none.jsonl")

    assert {ended.returncode for ended in (late, unknown, refused, missing)} == {1}
    assert "the batch is completed: it cannot be cancelled" in late.stderr
    assert "there is no batch 'batch_unknown'" in unknown.stderr
    assert "401" in refused.stderr
    assert "none.jsonl: No such file" in missing.stderr
