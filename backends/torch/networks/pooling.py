"""Pooling of token vectors to one vector per text, as sentence-transformers defines it.

hidden: (batch, tokens, dim), any float dtype, on the model's device. mask: (batch, tokens), 1 = counts.
Every function returns (batch, dim) float32: a sum in half precision loses the tail of long inputs.
Source: sentence-transformers 6, `Pooling`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from backends.recipe.recipe import PoolingMode


def cls_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the first token that counts."""
    first = mask.long().argmax(dim=1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), first].float()


def last_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the last token that counts."""
    last = mask.shape[1] - 1 - mask.long().flip(1).argmax(dim=1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last].float()


def max_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the largest value of each component."""
    return hidden.float().masked_fill(mask.unsqueeze(-1) == 0, -torch.inf).amax(dim=1)


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the average token."""
    return _weighted_sum(hidden, mask.float()) / mask.float().sum(dim=1, keepdim=True).clamp(min=1e-9)


def mean_sqrt_len_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of tokens divided by the square root of their number."""
    count = mask.float().sum(dim=1, keepdim=True).clamp(min=1e-9)
    return _weighted_sum(hidden, mask.float()) / count.sqrt()


def weighted_mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the average token, each weighted by its position, counted from 1."""
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    weights = mask.float() * positions
    return _weighted_sum(hidden, weights) / weights.sum(dim=1, keepdim=True).clamp(min=1e-9)


POOLINGS: dict[PoolingMode, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": cls_pool,
    "lasttoken": last_pool,
    "max": max_pool,
    "mean": mean_pool,
    "mean_sqrt_len_tokens": mean_sqrt_len_pool,
    "weightedmean": weighted_mean_pool,
}


def pool(hidden: Tensor, mask: Tensor, modes: tuple[PoolingMode, ...]) -> Tensor:
    """Return the vectors of every mode, concatenated: (batch, dim · len(modes)) float32."""
    return torch.cat([POOLINGS[mode](hidden, mask) for mode in modes], dim=1)


def _weighted_sum(hidden: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("btd,bt->bd", hidden.float(), weights)
