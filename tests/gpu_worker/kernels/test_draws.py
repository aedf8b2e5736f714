"""Draws on the CPU kernels are those of torch, bit for bit: same noise, same sums, same ties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.kernels import native
from gpu_worker.kernels.draws import gumbel_topk
from gpu_worker.kernels.native import KernelError, ThreadTeam
from gpu_worker.sampling.law import Law
from gpu_worker.sampling.random import keyed_gumbel

KERNELS = native.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="installed without a C++ compiler")


def _team(num_threads: int) -> ThreadTeam:
    assert KERNELS is not None
    return ThreadTeam(KERNELS, num_threads)


def _weights(rows: int, width: int, spread: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.randn(rows, width, generator=generator) * spread).log_softmax(dim=-1)
    weights[torch.rand(rows, width, generator=generator) < 0.1] = -torch.inf
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return weights, keys


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.sampled_from([1, 2, 5, 17, 511, 512, 513, 4095, 4097, 9000]),
    count=st.integers(1, 8),
    spread=st.sampled_from([0.0, 0.5, 4.0, 40.0]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_columns_and_sums_are_those_of_torch(
    rows: int, width: int, count: int, spread: float, threads: int, seed: int
) -> None:
    """Flat and peaked laws, removed ids, widths around the blocks' borders."""
    weights, keys = _weights(rows, width, spread, seed)
    count = min(count, width)
    noisy = weights + keyed_gumbel(keys, width)
    columns, values = gumbel_topk(_team(threads), weights, keys, count)
    expected, _ = noisy.topk(count, dim=-1)
    assert torch.equal(values, expected)
    possible = values > -torch.inf
    assert torch.equal(noisy.gather(1, columns)[possible], values[possible])


def test_candidates_keep_the_noise_of_their_ids() -> None:
    weights, keys = _weights(4, 300, 3.0, 1)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2)).expand(4, -1)
    team = _team(2)
    shuffled = Law(weights.gather(1, order), order, team).draw(keys)
    assert torch.equal(shuffled, Law(weights, None, team).draw(keys))
    assert torch.equal(shuffled, Law(weights, None).draw(keys))


def test_the_first_of_the_best_is_what_would_be_drawn() -> None:
    weights, keys = _weights(6, 1000, 2.0, 3)
    law = Law(weights, None, _team(2))
    ids, log_probs = law.best(5, keys)
    assert torch.equal(ids[:, 0], law.draw(keys))
    assert bool((log_probs[:, :-1] >= log_probs[:, 1:]).all())
    plain_ids, plain = Law(weights, None).best(5, keys)
    assert torch.equal(ids, plain_ids)
    torch.testing.assert_close(log_probs, plain)


def test_a_law_without_candidates_left_gives_nothing() -> None:
    columns, values = gumbel_topk(_team(1), torch.full((1, 4), -torch.inf), torch.tensor([1]), 2)
    assert columns.tolist() == [[0, 0]]
    assert bool((values == -torch.inf).all())


@pytest.mark.parametrize("count", [0, 5, 65])
def test_counts_that_cannot_be_served(count: int) -> None:
    with pytest.raises(KernelError, match=f"count: {count} of 4 columns"):
        gumbel_topk(_team(1), torch.zeros(1, 4), torch.tensor([1]), count)
