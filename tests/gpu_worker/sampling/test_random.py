"""The counter-based generator: the same in any batch, uniform, and independent of its neighbours."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import stats

from gpu_worker.sampling.random import Purpose, gumbel_noise, keyed_gumbel, round_keys, uniform


def assert_uniform(u: np.ndarray, bins: int = 64) -> None:
    counts = np.histogram(u, bins=bins, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > 1e-4
    assert stats.kstest(u[:20_000], "uniform").pvalue > 1e-4


def assert_independent(a: np.ndarray, b: np.ndarray, bins: int = 8) -> None:
    table = np.histogram2d(a, b, bins=bins, range=((0, 1), (0, 1)))[0]
    assert stats.chi2_contingency(table).pvalue > 1e-4


def gumbel_to_uniform(noise: torch.Tensor) -> np.ndarray:
    return np.exp(-np.exp(-noise.double().numpy()))


def test_noise_is_a_function_of_seed_position_and_token_alone():
    """Bit for bit: alone, in a batch, with a longer vocabulary, for some ids in any order."""
    seeds = torch.tensor([3, -(2**63), 2**63 - 1, 3, 0, -1, 77])
    positions = torch.tensor([0, 5, 5, 1, 2**31, 9, 0])
    batch = gumbel_noise(seeds, positions, 1003)
    for i in range(len(seeds)):
        alone = gumbel_noise(seeds[i : i + 1], positions[i : i + 1], 49152)
        assert torch.equal(alone[0, :1003], batch[i])
    ids = torch.randint(0, 1003, (len(seeds), 17))
    assert torch.equal(gumbel_noise(seeds, positions, ids), batch.gather(1, ids))
    assert torch.equal(gumbel_noise(seeds[:, None][:, 0], positions, 7), batch[:, :7])


def test_noise_does_not_change_between_releases():
    """A resumed or replayed sequence relies on the very same numbers."""
    noise = gumbel_noise(torch.tensor([42, 43]), torch.tensor([0, 7]), 3)
    expected = [[_reference(42, 0, token) for token in range(3)], [_reference(43, 7, t) for t in range(3)]]
    torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def _reference(seed: int, position: int, token: int) -> float:
    """The documented construction in plain integers."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    key = seed
    for word in (int(Purpose.COUPLED), position):
        key = mix((key + (word + 1) * 0x9E3779B97F4A7C15) & mask)
    z = mix((key + (token + 1) * 0x9E3779B97F4A7C15) & mask)
    return -math.log(-math.log1p(-((z >> 12) + 0.5) * 2.0**-52))


def test_gumbel_moments_and_tail():
    noise = gumbel_noise(torch.arange(40), torch.arange(40) * 3, 50_000).double()
    assert abs(noise.mean().item() - 0.5772157) < 0.004
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.01
    assert torch.isfinite(noise).all()
    # Two million draws: the greatest is near log(2e6) = 14.5, finer than 24 bits of u could place it.
    assert 12 < noise.max().item() < 22
    top = noise.flatten().sort().values[-200:]
    assert len(top.unique()) == 200
    assert_uniform(gumbel_to_uniform(noise.flatten()))


def test_neighbouring_tokens_positions_and_seeds_are_independent():
    num = 100_000
    zeros = torch.zeros(num, dtype=torch.int64)
    counter = torch.arange(num)
    tokens = gumbel_to_uniform(gumbel_noise(torch.tensor([1]), torch.tensor([0]), num + 1)[0])
    assert_independent(tokens[:-1], tokens[1:])
    for seeds, positions in ((counter, zeros), (zeros, counter), (counter << 40, zeros)):
        column = gumbel_to_uniform(gumbel_noise(seeds, positions, 2))
        assert_uniform(column[:, 0])
        assert_independent(column[:-1, 0], column[1:, 0])
        assert_independent(column[:, 0], column[:, 1])
    # (seed + 1, position) against (seed, position + 1): sums of the words must not collide.
    diagonal = gumbel_noise(counter + 1, counter, 1), gumbel_noise(counter, counter + 1, 1)
    assert_independent(*(gumbel_to_uniform(d)[:, 0] for d in diagonal))


def test_round_draws_differ_in_every_argument():
    num = 50_000
    seeds, first, rows = torch.full((num,), 5), torch.arange(num), torch.zeros(num, dtype=torch.int64)
    base = uniform(seeds, first, rows, Purpose.ACCEPT)
    assert base.dtype == torch.float64
    assert (base > 0).all()
    assert (base < 1).all()
    assert_uniform(base.numpy())
    others = [
        uniform(seeds, first + 1, rows, Purpose.ACCEPT),
        uniform(seeds, first, rows + 1, Purpose.ACCEPT),
        uniform(seeds, first, rows, Purpose.ACCEPT, 1),
        uniform(seeds, first, rows, Purpose.TARGET),
        uniform(seeds + 1, first, rows, Purpose.ACCEPT),
    ]
    for other in others:
        assert_independent(base.numpy(), other.numpy())
    assert torch.equal(base[7:8], uniform(seeds[:1], first[7:8], rows[:1], Purpose.ACCEPT))


def test_gumbel_argmax_draws_the_softmax():
    p = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    num = 100_000
    counter = torch.arange(num)
    for keys in (
        round_keys(torch.zeros_like(counter), counter, counter * 0, Purpose.TARGET),
        round_keys(counter, torch.ones_like(counter), counter * 0 + 2, Purpose.DRAFT),
    ):
        drawn = (p.log() + keyed_gumbel(keys, 5)).argmax(dim=1)
        counts = torch.bincount(drawn, minlength=5).numpy()
        assert counts[4] == 0
        assert stats.chisquare(counts[:4], p[:4].numpy() * num).pvalue > 1e-4
