"""A run stops the processes that it starts, and sums the usage of those that it watches."""

import os
import sys
import time
from pathlib import Path

import pytest

from loadtest.processes import PinnedProcess, family, process_group, usage
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

# A parent whose child ignores SIGTERM; the parent prints the child's id.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print(1, flush=True); time.sleep(60)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_child_that_ignores_sigterm_ends_with_its_group(tmp_path: Path) -> None:
    log = tmp_path / "parent.log"
    with process_group() as processes:
        running = PinnedProcess([sys.executable, "-c", PARENT], 0, log)
        processes.append(running)
        running.wait_until(lambda: log.read_text().strip() != "")
        child = int(log.read_text())

        assert set(family(running.process.pid)) == {running.process.pid, child}
        assert running.usage().rss_bytes > 1_000_000

    end_s = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{child}").exists() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()


def test_usage_counts_this_process_and_ignores_ended_ones() -> None:
    used = usage([os.getpid(), 2**22 + 1])

    assert used.cpu_s > 0
    assert used.rss_bytes > 10_000_000


def test_process_that_ends_at_start_is_reported_with_its_log(tmp_path: Path) -> None:
    running = PinnedProcess(
        [sys.executable, "-c", "raise SystemExit('no such luck')"], 0, tmp_path / "server.log"
    )

    with pytest.raises(RuntimeError, match="no such luck"):
        running.wait_until(lambda: False)
