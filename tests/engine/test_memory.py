"""Memory freed by a forward pass stays with the process, and is released on request."""

import subprocess
import sys

import pytest

# Prints the page faults in the second of two equal rounds, and the bytes released after it.
PROGRAM = """
import resource, torch
from pathlib import Path
from threading import Thread
from backends.torch.memory import release_to_system, keep_freed

def round_of():
    # Like the activations of a batch: tensors of several sizes, all of them freed at its end.
    for _ in range(20):
        tensors = [torch.ones(size * 256 * 1024) for size in (3, 12, 9, 6, 30, 12, 3, 24)]
        del tensors

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


# Pages of 4 KiB that a round touches: 20 times 99 MiB.
TOUCHED_PAGES = 20 * 99 * 256


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc's allocator")
def test_memory_is_reused_between_passes_and_released_on_request() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )

    pages, released = done.stdout.split()
    # By default glibc requests much of it from the system again.
    assert int(pages) < TOUCHED_PAGES / 10
    assert int(released) > 30 * 1024 * 1024
