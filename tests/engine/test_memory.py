"""What a forward pass frees stays with the process, and goes back when that is asked for."""

import subprocess
import sys

import pytest

# Prints how many pages the second of two equal rounds asked for anew, and how much was given back after it.
PROGRAM = """
import resource, torch
from pathlib import Path
from threading import Thread
from backends.torch.memory import release_to_system, keep_freed

def round_of():
    # As much as a batch's activations: pieces of several sizes, all of them gone at its end.
    for _ in range(20):
        kept = [torch.ones(size * 256 * 1024) for size in (3, 12, 9, 6, 30, 12, 3, 24)]
        del kept

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

keep_freed()
def run(function):
    thread = Thread(target=function)
    thread.start()
    thread.join()

run(round_of)
before = pages()
run(round_of)
after = pages()
full = held()
release_to_system()
print(after - before, full - held())
"""


# What a round touches, in pages of 4 KiB: 20 times 99 MiB.
TOUCHED_PAGES = 20 * 99 * 256


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is asked")
def test_memory_is_kept_between_passes_and_given_back_when_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )

    pages, given_back = done.stdout.split()
    # By default glibc has much of it anew from the system.
    assert int(pages) < TOUCHED_PAGES / 10
    assert int(given_back) > 30 * 1024 * 1024
