"""Draws by number: passes, augmentation, resumption."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.arrays import Split, split_from_puzzles
from data.generate import generate
from data.sampler import Batch, TrainSampler
from data.sudoku import Box, is_complete_solution
from data.symmetry import augment, row_key

BOX = Box(2, 3)
N = 37
SPLIT = split_from_puzzles(generate(BOX, N, seed=3))


def tensors(batch: Batch) -> list[torch.Tensor]:
    return [batch.inputs, batch.labels, batch.puzzle_ids, batch.base_ids, batch.noise_keys]


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def part(batch: Batch, rows: slice) -> Batch:
    return Batch(*(tensor[rows] for tensor in tensors(batch)))


@given(
    num_aug=st.sampled_from([None, 0, 5]),
    seed=st.integers(0, 2**31 - 1),
    first=st.integers(0, 10_000),
    cut=st.integers(0, 100),
)
def test_any_draw_can_be_asked_for_at_any_time(num_aug: int | None, seed: int, first: int, cut: int) -> None:
    whole = TrainSampler(SPLIT, BOX, num_aug, seed).draw(first, 100)
    other = TrainSampler(SPLIT, BOX, num_aug, seed)
    other.draw(5000, 3)  # what was drawn before does not matter
    assert same(other.draw(first + cut, 100 - cut), part(whole, slice(cut, None)))
    assert same(other.draw(first, cut), part(whole, slice(0, cut)))


@pytest.mark.parametrize("num_aug", [None, 0, 5])
def test_every_pass_takes_each_base_puzzle_once_in_its_own_order(num_aug: int | None) -> None:
    base = TrainSampler(SPLIT, BOX, num_aug, seed=1).draw(0, 4 * N).base_ids.reshape(4, N)
    assert all(sorted(row.tolist()) == list(range(N)) for row in base)
    assert len({tuple(row.tolist()) for row in base}) == 4
    assert base[0].tolist() != list(range(N))


@pytest.mark.parametrize("num_aug", [None, 3])
def test_another_seed_draws_otherwise(num_aug: int | None) -> None:
    a, b = (TrainSampler(SPLIT, BOX, num_aug, seed).draw(0, N) for seed in (0, 1))
    assert not torch.equal(a.base_ids, b.base_ids)
    assert not torch.equal(a.inputs, b.inputs)


def test_types_and_rows() -> None:
    ids = np.arange(N, dtype=np.int32)
    split = Split(SPLIT.inputs, SPLIT.labels, SPLIT.rating, ids)
    batch = TrainSampler(split, BOX, 0, seed=2).draw(10, 64)
    assert [tensor.dtype for tensor in tensors(batch)] == [
        torch.int64,
        torch.int64,
        torch.int32,
        torch.int64,
        torch.int64,
    ]
    assert batch.noise_keys.min() >= 0 and len(batch.noise_keys.unique()) == 64
    assert batch.inputs.shape == batch.labels.shape == (64, 36)
    assert batch.puzzle_ids.tolist() == batch.base_ids.tolist()
    assert torch.equal(batch.inputs, torch.from_numpy(SPLIT.inputs)[batch.base_ids].long())  # no augmentation at all
    assert torch.equal(batch.labels, torch.from_numpy(SPLIT.labels)[batch.base_ids].long())


def test_endless_augmentation_is_valid_and_fresh_every_time() -> None:
    batch = TrainSampler(SPLIT, BOX, None, seed=4).draw(0, 20 * N)
    assert is_complete_solution(batch.labels - 1, batch.inputs - 1, BOX).all()
    for base in range(N):
        rows = batch.inputs[batch.base_ids == base]
        assert len(torch.unique(rows, dim=0)) > 15  # a puzzle may have symmetries of its own
    assert not (batch.inputs == torch.from_numpy(SPLIT.inputs)[batch.base_ids]).all(dim=1).any()


def test_fixed_rows_are_functions_of_data_seed_base_and_k() -> None:
    num_aug, data_seed = 4, 9
    base, k = np.repeat(np.arange(N), num_aug + 1), np.tile(np.arange(num_aug + 1), N)
    rows, labels = augment(SPLIT.inputs[base], SPLIT.labels[base], row_key(data_seed, base, k), BOX)
    table = {(b, row.tobytes()): label.tobytes() for b, row, label in zip(base.tolist(), rows, labels, strict=True)}
    assert (rows[k == 0] == SPLIT.inputs).all()
    for seed in (0, 1):
        batch = TrainSampler(SPLIT, BOX, num_aug, seed, data_seed).draw(0, 60 * N)
        drawn = {
            (b, x.numpy().astype(np.uint8).tobytes()): y.numpy().astype(np.uint8).tobytes()
            for b, x, y in zip(batch.base_ids.tolist(), batch.inputs, batch.labels, strict=True)
        }
        assert drawn == table, "all of the fixed rows occur, and no other"


def test_fixed_rows_are_drawn_evenly() -> None:
    num_aug = 3
    draws = TrainSampler(SPLIT, BOX, num_aug, seed=5).draw(0, 400 * N)
    original = (draws.inputs == torch.from_numpy(SPLIT.inputs)[draws.base_ids]).all(dim=1)
    assert abs(original.float().mean().item() - 1 / (num_aug + 1)) < 0.015


def test_fewer_puzzles_than_the_batch() -> None:
    small = Split(SPLIT.inputs[:3], SPLIT.labels[:3], SPLIT.rating[:3], SPLIT.puzzle_ids[:3])
    base = TrainSampler(small, BOX, None, seed=0).draw(1, 64).base_ids
    assert torch.bincount(base).tolist() in ([21, 21, 22], [21, 22, 21], [22, 21, 21])
