"""Copies between host memory and a GPU: from and to pinned memory, which a GPU reads and writes by itself.

Without a GPU nothing is copied.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. The copy of a host tensor runs after the work that the GPU already has."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Return the numbers of a tensor, once the work that the GPU has by now is done."""
    if tensor.is_cuda:
        # The memory of such a copy is pinned.
        copy, is_done = tensor.to("cpu", non_blocking=True), torch.cuda.Event()
        is_done.record(torch.cuda.current_stream(tensor.device))
        is_done.synchronize()
        return copy.numpy()
    return tensor.cpu().numpy()
