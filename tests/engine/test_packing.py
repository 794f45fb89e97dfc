"""Layout of a padded batch's tokens when they are concatenated."""

from itertools import pairwise

import pytest
import torch

from backends.torch.packing import PackedLayout
from backends.torch.rounding import spare_tokens


def test_rounds_batches_to_few_numbers_of_tokens() -> None:
    numbers = {tokens + spare_tokens(tokens) for tokens in range(1, 1025)}

    assert len(numbers) < 80
    # A few words are computed as they are.
    assert all(spare_tokens(tokens) == 0 for tokens in range(1, 16))
    assert all(0 <= spare_tokens(tokens) <= tokens / 8 for tokens in range(1, 5000))


@pytest.mark.parametrize("lengths", [(1,), (9,), (5, 33, 2), (3,) * 300, (130, 127), (31, 1)])
def test_unpacking_restores_the_packed_batch(lengths: tuple[int, ...]) -> None:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()
    ids = torch.arange(1, mask.numel() + 1).view(mask.shape) * mask
    layout = PackedLayout(mask, mask.device)

    tokens = layout.pack(ids)

    whole = layout.unpack(tokens.unsqueeze(-1).float()).squeeze(-1)
    assert (whole == ids).all()
    assert tokens.shape == layout.positions().shape == (1, sum(lengths) + spare_tokens(sum(lengths)))
    starts = layout.starts.tolist()
    assert starts == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert layout.longest >= max(end - start for start, end in pairwise(starts))


def test_attended_tokens_are_indexed_by_sequence() -> None:
    tokens = (torch.arange(20) < torch.tensor([20, 13, 8]).unsqueeze(1)).long()
    attended = (torch.arange(20) < torch.tensor([4, 13, 5]).unsqueeze(1)).long()
    layout = PackedLayout(tokens, tokens.device)

    options = layout.key_options(attended)

    assert spare_tokens(41) > 0
    assert options["attended"].tolist() == [*range(4), *range(20, 33), *range(33, 38)]
    assert options["cu_seq_lens_k"].tolist() == [0, 4, 17, 22]
