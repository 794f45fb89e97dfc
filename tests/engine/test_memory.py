"""Memory freed by a forward pass stays with an engine process, and is released on request."""

import os
import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

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
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    pages, released = done.stdout.split()
    # By default glibc requests much of it from the system again.
    assert int(pages) < TOUCHED_PAGES / 10
    assert int(released) > 30 * 1024 * 1024


# Prints how many threads tokenizing starts in an engine process, before it reads its boot message.
TOKENIZING = """
import os, sys, torch
from pathlib import Path
from unittest.mock import patch
from backends.torch.serving import server

def threads():
    return len(os.listdir("/proc/self/task"))

with patch.object(torch.cuda, "is_available", lambda: sys.argv[1] == "cuda"), patch.object(
    server.msgspec.json, "decode", side_effect=EOFError
):
    try:
        server.main()
    except EOFError:
        pass
from tokenizers import Tokenizer, models
tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
before = threads()
tokenizer.encode_batch_fast(["a"] * 64)
print(threads() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc's allocator")
@pytest.mark.parametrize(("device", "has_threads"), [("cpu", False), ("cuda", True)])
def test_a_tokenizer_has_threads_of_its_own_only_next_to_a_gpu(device: str, *, has_threads: bool) -> None:
    # They would wait for each other in the one arena that forward passes on a processor need.
    done = subprocess.run(
        [sys.executable, "-c", TOKENIZING, device],
        env={name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )

    assert has_threads == (int(done.stdout) > 0)
