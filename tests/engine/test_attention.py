"""Packed attention against a plain implementation for single sequences."""

import pytest
import torch
from torch import Tensor

from backends.torch.networks import attention
from backends.torch.networks.attention import (
    CUTTINGS,
    Cutting,
    Piece,
    Visibility,
    attend,
    attend_joined,
    cut_blocks,
    fastest_cutting,
    group_runs,
    keys_of,
)

LENGTHS = (3, 7, 7, 1, 9)
TRIED = (Cutting(), Cutting(16), Cutting(64), Cutting(0, 4), Cutting(16, 16), Cutting(64, 16))


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int) -> Tensor:
    """Compute attention of one sequence in float64: (length, heads, dim)."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    for row in range(len(q)):
        for column in range(len(k)):
            is_far = window and abs(row - column) >= window
            if is_far or (causal and column > row):
                scores[:, row, column] = -torch.inf
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double()).float()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("cutting", TRIED)
def test_every_sequence_attends_only_to_itself(
    causal: bool, window: int, key_heads: int, cutting: Cutting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "fastest_cutting", lambda _: cutting)
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    q, k, v = (torch.randn(tokens, heads, 8) for heads in (4, key_heads, key_heads))
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)

    out = attend(q, k, v, starts, starts, max(LENGTHS), 0.3, causal, window)

    pieces = zip(*(tensor.split(LENGTHS) for tensor in (q, k, v)), strict=True)
    expected = torch.cat([attend_plainly(*piece, 0.3, causal, window) for piece in pieces])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_groups_neighbors_of_equal_lengths_into_one_run() -> None:
    runs = group_runs([0, 3, 10, 17, 18, 27], [0, 3, 8, 13, 14, 20])

    assert runs == [
        Piece(3, 3, 1),
        Piece(7, 5, 2),
        Piece(1, 1, 1),
        Piece(9, 6, 1),
    ]


def test_puts_short_neighbors_into_blocks() -> None:
    pieces = cut_blocks((0, 40, 43, 50, 57, 58, 67, 69), Cutting(20), torch.float32, Visibility())

    lengths = [(piece.length, piece.sequences, piece.mask is None) for piece in pieces]
    assert lengths == [(40, 1, True), (18, 1, False), (11, 1, False)]


def test_a_run_above_the_bound_is_no_block() -> None:
    pieces = cut_blocks((0, 7, 14, 21), Cutting(14), torch.float32, Visibility())

    assert pieces == (Piece(7, 7, 3),)


def test_a_token_of_a_block_sees_its_own_sequence() -> None:
    (piece,) = cut_blocks((0, 1, 4), Cutting(4), torch.float32, Visibility(causal=True, window=2))

    assert piece.mask is not None
    assert (piece.mask == 0).tolist() == [
        [True, False, False, False],
        [False, True, False, False],
        [False, True, True, False],
        [False, False, True, True],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finds_the_fastest_cutting_of_this_processor(dtype: torch.dtype) -> None:
    assert fastest_cutting(dtype) in CUTTINGS


def test_keys_fill_a_vector_unless_it_costs_more_than_it_gains() -> None:
    spare = {length: Cutting(0, 16).spare_keys(length) for length in (16, 18, 19, 31, 500, 508, 520)}

    assert {16: 0, 18: 0, 19: 13, 31: 1, 500: 12, 508: 4, 520: 0} == spare


def test_spare_keys_are_those_behind_a_sequence_and_hidden() -> None:
    tokens = torch.arange(25.0).view(25, 1, 1)
    pieces = cut_blocks((0, 5, 10, 18, 25), Cutting(0, 4), torch.float32, Visibility())
    assert [(5, 2, 0), (8, 1, 0), (7, 1, 1)] == [
        (piece.length, piece.sequences, piece.spare_keys) for piece in pieces
    ]
    run = Piece(5, 5, 2, spare_keys=3)

    assert [[*range(8)], [*range(5, 13)]] == keys_of(tokens, run, 0).squeeze().tolist()
    assert keys_of(tokens, run, 0).data_ptr() == tokens.data_ptr()
    at_the_end = keys_of(tokens, pieces[2], 18).squeeze().tolist()
    assert [[*range(18, 25), 0]] == [at_the_end]
    assert pieces[2].mask is not None
    assert [True] * 7 + [False] == (pieces[2].mask[0] == 0).tolist()


def test_runs_with_a_window_have_no_spare_keys_and_causal_ones_no_mask() -> None:
    def cut(visibility: Visibility) -> tuple[Piece, ...]:
        return cut_blocks((0, 7), Cutting(0, 16), torch.float32, visibility)

    assert (Piece(7, 7, 1),) == cut(Visibility(window=3))
    assert (Piece(7, 7, 1, spare_keys=9),) == cut(Visibility(causal=True))


@pytest.mark.parametrize("lengths", [(300, 300, 40), (300,), (257, 1030), (511, 5)])
@pytest.mark.parametrize("cutting", [Cutting(), Cutting(64, 16)])
def test_long_causal_sequences_are_computed_in_parts(
    lengths: tuple[int, ...], cutting: Cutting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "fastest_cutting", lambda _: cutting)
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 8) for heads in (4, 2, 2))
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)

    out = attend(q, k, v, starts, starts, max(lengths), 0.3, causal=True, window=0)

    for part, *piece in zip(
        out.split(lengths), *(tensor.split(lengths) for tensor in (q, k, v)), strict=True
    ):
        mask = torch.ones(len(part), len(part), dtype=torch.bool).tril()
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(tensor.double().transpose(0, 1) for tensor in piece), attn_mask=mask, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(part, expected.transpose(0, 1).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_queries_keys_and_values_give_the_same_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    joined = torch.randn(sum(LENGTHS), 3, 4, 8).to(dtype)
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    q, k, v = joined.unbind(1)

    out = attend_joined(joined, starts, max(LENGTHS), 0.3)

    assert out.dtype == dtype
    expected = attend(q, k, v, starts, starts, max(LENGTHS), 0.3, causal=False, window=0)
    torch.testing.assert_close(out, expected, atol=0, rtol=0)


@pytest.mark.parametrize("window", [0, 3])
def test_unattended_tokens_attend_to_the_others(window: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), 4, 8) for _ in range(3))
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    attended = [max(1, length - 2) for length in LENGTHS]
    key_starts = torch.tensor([0, *torch.tensor(attended).cumsum(0)], dtype=torch.int32)
    first = [piece[:n] for tensor in (k, v) for piece, n in zip(tensor.split(LENGTHS), attended, strict=True)]
    keys, values = first[: len(attended)], first[len(attended) :]

    out = attend(q, torch.cat(keys), torch.cat(values), starts, key_starts, max(LENGTHS), 0.3, False, window)

    pieces = zip(q.split(LENGTHS), keys, values, strict=True)
    expected = torch.cat([attend_plainly(*piece, 0.3, False, window) for piece in pieces])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 3])
def test_gpu_kernel_agrees_with_the_cpu(causal: bool, window: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), heads, 32, dtype=torch.bfloat16) for heads in (4, 2, 2))
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)

    on_cpu = attend(q.float(), k.float(), v.float(), starts, starts, max(LENGTHS), 0.2, causal, window)
    on_gpu = attend(
        q.cuda(), k.cuda(), v.cuda(), starts.cuda(), starts.cuda(), max(LENGTHS), 0.2, causal, window
    )

    torch.testing.assert_close(on_gpu.float().cpu(), on_cpu, atol=2e-2, rtol=2e-2)
