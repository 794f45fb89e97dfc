"""Layout of a padded batch's tokens when they are concatenated."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, MistralConfig

from backends.torch.networks.packing import PackedLayout
from backends.torch.networks.rounding import spare_tokens
from backends.torch.stock import packing
from tests.engine.checkpoints import DECODER
from tests.engine.model_types.comparison import Outcome, compare


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


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("model_type", "keys", "packed"),
    [
        ("phimoe", {}, False),
        ("qwen2_moe", {}, False),
        ("llama4_text", {}, False),
        # Its first weights are so small that an inspection took its convolutions for packed ones.
        ("lfm2_moe", {}, False),
        ("mistral", {}, True),
        ("modernbert", {}, True),
        # A text with the token of a mask has another factor of all its tokens.
        ("esm", {}, False),
        ("esm", {"token_dropout": False, "position_embedding_type": "rotary"}, True),
        # Texts after longer ones, of which some are longer than the network was made for.
        ("llama", {"max_position_embeddings": 64, "rope_parameters": DYNAMIC}, False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_texts_longer_than_a_window_or_the_first_length_are_as_in_transformers(
    model_type: str, keys: dict[str, Any], packed: bool, tmp_path: Path
) -> None:
    outcome = compare(model_type, tmp_path, **keys)

    assert Outcome(model_type, "equal", "1.000000", packed) == outcome


def test_a_window_is_probed_if_the_network_is_small_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    encoder = AutoModel.from_config(MistralConfig(**DECODER | {"sliding_window": 40})).eval()

    assert packing._lengths_beyond(encoder, {40, 90}, packing.PROBE_LENGTHS) == (5, 96, 3)
    assert packing._lengths_beyond(encoder, {40, 400}, packing.PROBE_LENGTHS) == (5, 46, 3)
    assert packing._lengths_beyond(encoder, {8}, packing.PROBE_LENGTHS) is None
    monkeypatch.setattr(packing, "PROBE_PRODUCTS_MAX", 1000)
    assert packing._lengths_beyond(encoder, {40}, packing.PROBE_LENGTHS) is None


def test_a_window_that_only_the_probe_beyond_it_shows_is_no_packed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    encoder = AutoModel.from_config(MistralConfig(**DECODER | {"sliding_window": 40})).eval()
    whole = packing.pack(encoder, None)
    attend = packing.PackedEncoder.compute_packed

    def without_window(self: packing.PackedEncoder, input_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        hidden = attend(self, input_ids, *rest)
        return hidden + (input_ids.shape[1] > 40)

    monkeypatch.setattr(packing.PackedEncoder, "compute_packed", without_window)
    encoder = AutoModel.from_config(MistralConfig(**DECODER | {"sliding_window": 40})).eval()

    assert whole is not None
    assert packing.pack(encoder, None) is None
