"""Choice between equal computations, by their processor time on one thread.

That time hardly depends on other work of the machine.
"""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

Name = TypeVar("Name")
ROUNDS = 5


@torch.inference_mode()
def fastest(contenders: Mapping[Name, Callable[[], object]], rounds: int = ROUNDS) -> Name:
    """Return the name of the computation with the least processor time, after some rounds in turns.

    A round before them is not measured, because oneDNN generates code in it.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = [[_seconds(compute) for compute in contenders.values()] for _ in range(rounds + 1)]
    finally:
        torch.set_num_threads(threads_before)
    best = [min(tries) for tries in zip(*measured[1:], strict=True)]
    return min(zip(contenders, best, strict=True), key=lambda pair: pair[1])[0]


def _seconds(compute: Callable[[], object]) -> float:
    started_s = time.thread_time()
    compute()
    return time.thread_time() - started_s
