"""Memory that a forward pass frees is cheap to get again in an engine process, and is released on request."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.processes.engine_process import ENGINE_VARIABLES

# Prints the page faults in the second of two equal rounds, and the bytes released after it.
PROGRAM = """
import resource, torch
from pathlib import Path
from threading import Thread
from backends.torch.memory import release_to_system

def round_of():
    # Like the activations of a batch: tensors of several sizes, all of them freed at its end.
    for _ in range(20):
        tensors = [torch.ones(size * 256 * 1024) for size in (3, 12, 9, 6, 30, 12, 3, 24)]
        del tensors

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

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


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def gives_huge_pages() -> bool:
    """Return whether the system gives pages of 2 MiB to a process that asks for them as an engine does."""
    library, version = platform.libc_ver()
    is_able = library == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)
    return is_able and HUGE_PAGES.exists() and "[never]" not in HUGE_PAGES.read_text()


@pytest.mark.skipif(not gives_huge_pages(), reason="needs glibc 2.35 and pages of 2 MiB")
def test_memory_is_cheap_to_get_again_and_released_on_request() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | ENGINE_VARIABLES,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    pages, released = done.stdout.split()
    # In pages of 4 KiB, a third of what a round touches comes from the system anew.
    assert int(pages) < TOUCHED_PAGES / 10
    assert int(released) > 30 * 1024 * 1024
