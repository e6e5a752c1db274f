"""Noise as a function of key and step: normal, independent, the same wherever a row is."""

import pytest
import torch
from torch import Tensor

from models.noise import advance, normal, streams

SHAPE = (24, 32)
ZERO = torch.zeros(64, dtype=torch.int64)
KEYS = {
    "small": torch.arange(64),
    "high_word": torch.arange(64) << 32,
    "complements": torch.cat((torch.arange(32), ~torch.arange(32))),
    "random": torch.randint(0, 2**63 - 1, (64,), generator=torch.Generator().manual_seed(0)),
}


def keyed_normal(keys: Tensor, steps: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Numbers [B, *shape] of each row's own step."""
    at = [streams(keys)]
    for _ in range(int(steps.max())):
        at.append(advance(at[-1]))
    return normal(torch.stack([at[step][row] for row, step in enumerate(steps.tolist())]), shape)


def largest_correlation(rows: Tensor) -> float:
    """Between any two rows of [N, count]."""
    return (torch.corrcoef(rows) - torch.eye(len(rows))).abs().max().item()


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS.keys())
def test_moments_of_the_normal(keys: Tensor) -> None:
    """Mean, variance, skewness and kurtosis within four standard errors, and tails as thick as they should be."""
    z = keyed_normal(keys, ZERO, SHAPE).double()
    n = z.numel()
    for power, expected, deviation in ((1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert abs((z**power).mean() - expected) < 4 * deviation / n**0.5, power
    for limit, share in ((1, 0.3173), (2, 0.0455), (3, 0.0027)):
        assert abs((z.abs() > limit).double().mean() - share) < 4 * (share / n) ** 0.5
    assert 3.5 < z.abs().max() < 5.42 and torch.isfinite(z).all()


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS.keys())
def test_rows_steps_and_places_are_independent(keys: Tensor) -> None:
    """Neighbouring keys, steps and places alike: no correlation beyond chance (five standard errors over all pairs)."""
    count = SHAPE[0] * SHAPE[1]
    assert largest_correlation(keyed_normal(keys, ZERO, SHAPE).flatten(1)) < 5 / count**0.5
    steps = keyed_normal(keys[1].expand(64), torch.arange(64), SHAPE).flatten(1)
    assert largest_correlation(steps) < 5 / count**0.5
    assert largest_correlation(steps.T[:64]) < 5 / 64**0.5
    assert largest_correlation(steps.abs()) < 5 / count**0.5
    assert len(steps.unique()) > 0.99 * steps.numel()


def test_both_words_of_a_stream_count() -> None:
    """Words exchanged, or one of them changed: other numbers, not the same in another order either."""
    rows = normal(torch.tensor([[2**20, 2**21], [2**21, 2**20], [2**20, 2**20], [2**21, 2**21]]), SHAPE).flatten(1)
    for one in range(4):
        for other in range(one):
            assert len(torch.cat((rows[one], rows[other])).unique()) > 1.99 * rows.shape[1]


def test_a_row_is_the_same_in_any_batch_and_order() -> None:
    keys, steps = KEYS["random"], torch.arange(64) % 5
    whole = keyed_normal(keys, steps, SHAPE)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(keyed_normal(keys[order], steps[order], SHAPE), whole[order])
    for row in (0, 17, 63):
        assert torch.equal(keyed_normal(keys[row : row + 1], steps[row : row + 1], SHAPE)[0], whole[row])


def test_numbers_stay_what_they_are() -> None:
    """A run must repeat after an update of this project: the first numbers of two streams, written down."""
    got = keyed_normal(torch.tensor([1, 2**40]), torch.tensor([0, 3]), (3,))
    expected = torch.tensor([[0.859953, 0.870238, -0.614652], [-1.205653, -1.245938, 0.849083]])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    keyed_normal(KEYS["small"], ZERO, SHAPE)
    assert torch.equal(torch.get_rng_state(), before)
