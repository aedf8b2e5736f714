"""The fused losses against dense ones and autograd."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.training.losses import LOSS_KINDS, LossKind, law_losses, step_weights

_ROWS, _WIDTH, _VOCABULARY, _KNOWN = 700, 16, 50, 6  # more rows than one block


def _dense(q: torch.Tensor, p: torch.Tensor, kind: LossKind) -> torch.Tensor:
    """Per row from whole laws q, p [R, V]; entries of p that are zero are unknown, not impossible."""
    cross_entropy = -(p * q.log()).sum(-1)
    overlap = torch.minimum(p, q).sum(-1)
    if kind == "cross-entropy":
        return cross_entropy
    if kind == "total-variation":
        return 1 - overlap
    weight = torch.exp(-3 * overlap).detach()
    return weight * cross_entropy + (1 - weight) * (1 - overlap)


@pytest.fixture
def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    normed = torch.randn(_ROWS, _WIDTH, generator=generator)
    head = torch.randn(_VOCABULARY, _WIDTH, generator=generator)
    columns = torch.stack([torch.randperm(_VOCABULARY, generator=generator)[:_KNOWN] for _ in range(_ROWS)])
    probs = torch.rand(_ROWS, _KNOWN, generator=generator).sort(-1, descending=True).values / _KNOWN
    probs[3, 2:], columns[3, 2:] = 0, 0  # ids that the draft vocabulary lacks
    probs[5], columns[5] = 0, 0  # all of them
    return normed, head, columns, probs


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_losses_and_gradients_equal_dense_ones(kind: LossKind, inputs: tuple[torch.Tensor, ...]) -> None:
    normed, head, columns, probs = inputs
    upstream = torch.rand(_ROWS, generator=torch.Generator().manual_seed(1))
    fused = [normed.clone().requires_grad_(), head.clone().requires_grad_()]
    found = law_losses(*fused, columns, probs, kind)
    (found.loss * upstream).sum().backward()
    plain = [normed.clone().requires_grad_(), head.clone().requires_grad_()]
    q = (plain[0] @ plain[1].T).softmax(-1)
    p = torch.zeros(_ROWS, _VOCABULARY).scatter_add_(1, columns, probs)
    expected = _dense(q, p, kind)
    (expected * upstream).sum().backward()
    torch.testing.assert_close(found.loss, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.overlap, torch.minimum(p, q).sum(-1), rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    assert torch.equal(found.hit, (q.argmax(-1) == columns[:, 0]) & (probs[:, 0] > 0))
    assert found.hit.any()


def test_a_frozen_head_gets_no_gradient(inputs: tuple[torch.Tensor, ...]) -> None:
    normed, head, columns, probs = inputs
    leaf = normed.clone().requires_grad_()
    law_losses(leaf, head, columns, probs).loss.sum().backward()
    assert leaf.grad is not None
    assert head.grad is None


def test_bfloat16_stays_close(inputs: tuple[torch.Tensor, ...]) -> None:
    normed, head, columns, probs = inputs
    exact = law_losses(normed, head, columns, probs)
    rough = law_losses(normed.bfloat16(), head.bfloat16(), columns, probs)
    torch.testing.assert_close(rough.loss, exact.loss, rtol=0.05, atol=0.1)


def test_step_weights_fall_and_sum_to_one() -> None:
    weights = step_weights(4, 0.8)
    assert sum(weights) == pytest.approx(1)
    assert weights[1] / weights[0] == pytest.approx(0.8)
