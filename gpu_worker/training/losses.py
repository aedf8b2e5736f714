"""Losses between a draft's logits and the target's stored law, with their gradient, without ever keeping logits.

The law of a row is sparse: its k likeliest ids. Any loss that looks only at the draft's probabilities q_j of those ids
has, by g_j = dL/d log q_j, the gradient dL/dz_v = g_v - q_v * sum_j g_j at the logits z. So logits are computed a
block of rows at a time, turned into their gradient in place, multiplied back, and forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

LossKind = Literal["cross-entropy", "total-variation", "hybrid"]
LOSS_KINDS: tuple[LossKind, ...] = ("cross-entropy", "total-variation", "hybrid")

_BLOCK_LOGITS = 1 << 22  # of one block of rows: what stays in a CPU's cache
_HYBRID_DECAY = 3.0
_SMALLEST = 1e-37  # a probability that rounds to zero still has a logarithm


@dataclass
class LawLosses:
    """Per row of R; all but `loss` carry no gradient."""

    loss: torch.Tensor  # [R] float32
    overlap: torch.Tensor  # [R] sum of min(p, q): how often this draft is accepted when it is sampled
    hit: torch.Tensor  # [R] bool: the target's likeliest id is the draft's too (or as likely as the draft's)


def law_losses(
    normed: torch.Tensor,
    head: torch.Tensor,
    columns: torch.Tensor,
    probs: torch.Tensor,
    kind: LossKind = "cross-entropy",
) -> LawLosses:
    """normed [R, h] (behind the last norm), head [V, h]; the target's law at columns [R, k] of the head.

    The likeliest id comes first. Entries outside the draft vocabulary have column 0 and probability 0. The
    probabilities are not normalised over the draft vocabulary, so a row counts by the part of its law that the draft
    could ever reach. Gradients flow to `normed`, and to `head` where it asks for them.
    """
    loss, overlap, hit = _LawLoss.apply(normed, head, columns, probs, kind)  # type: ignore[no-untyped-call]
    return LawLosses(loss, overlap, hit)


def sparse_loss(log_q: torch.Tensor, p: torch.Tensor, kind: LossKind) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, k] each -> the loss [R] and its gradient by log_q [R, k].

    "cross-entropy": -sum p log q. "total-variation": 1 - sum min(p, q). "hybrid" blends the two by how good the row
    already is, weight exp(-3 a) on cross-entropy with a the overlap (the weight is not differentiated): cross-entropy
    moves a draft that is far off, total variation is what acceptance measures.
    """
    cross_entropy, by_cross_entropy = -(p * log_q).sum(-1), -p
    if kind == "cross-entropy":
        return cross_entropy, by_cross_entropy
    q = log_q.exp()
    overlap = torch.minimum(p, q).sum(-1)
    variation, by_variation = 1.0 - overlap, -q * (q < p)
    if kind == "total-variation":
        return variation, by_variation
    weight = torch.exp(-_HYBRID_DECAY * overlap)
    loss = weight * cross_entropy + (1.0 - weight) * variation
    return loss, weight[:, None] * by_cross_entropy + (1.0 - weight)[:, None] * by_variation


class _LawLoss(torch.autograd.Function):
    """Forward computes the gradients too; backward scales them by the rows' upstream gradients.

    Scaling a row's gradient afterwards is exact, because a row's loss depends on that row alone; only the head's own
    gradient mixes rows, so a trained head is multiplied in backward from the rows that were kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        normed: torch.Tensor,
        head: torch.Tensor,
        columns: torch.Tensor,
        probs: torch.Tensor,
        kind: LossKind,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = len(normed)
        wants_normed, wants_head = ctx.needs_input_grad[:2]
        weights = head.to(normed.dtype)
        loss, overlap = (
            normed.new_empty(rows, dtype=torch.float32),
            normed.new_empty(rows, dtype=torch.float32),
        )
        hit = torch.empty(rows, dtype=torch.bool, device=normed.device)
        grad_normed = torch.empty_like(normed) if wants_normed else None
        kept: list[torch.Tensor] = []
        block_rows = max(64, _BLOCK_LOGITS // len(head))
        for first in range(0, rows, block_rows):
            block = slice(first, first + block_rows)
            logits = normed[block] @ weights.T
            q = logits.softmax(-1)  # in the compute dtype, summed in float32
            columns_of, p = columns[block], probs[block]
            q_of = q.gather(1, columns_of)
            hit[block] = (q_of[:, 0] == q.amax(-1)) & (
                p[:, 0] > 0
            )  # finding the place of the best costs far more
            log_q = q_of.float().clamp_min_(_SMALLEST).log_()
            overlap[block] = torch.minimum(p, log_q.exp()).sum(-1)
            loss[block], sparse = sparse_loss(log_q, p, kind)
            if not (wants_normed or wants_head):
                continue
            # dL/dz = g - q sum(g) = -sum(g) (q - g / sum(g)): the row's factor is left for the smaller side
            total = sparse.sum(-1, keepdim=True)
            inverse = torch.where(total == 0, 0.0, 1.0 / total)
            grad = q.scatter_add_(1, columns_of, (sparse * -inverse).to(q.dtype))
            if grad_normed is not None:
                grad_normed[block] = (grad @ weights).mul_(-total.to(q.dtype))
            if wants_head:
                kept.append(grad.mul_(-total.to(q.dtype)))
        ctx.save_for_backward(normed, grad_normed, *kept)
        ctx.mark_non_differentiable(overlap, hit)
        return loss, overlap, hit

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normed, grad_normed, *kept = ctx.saved_tensors
        scale = upstream[:, None].to(normed.dtype)
        grad_head = None
        if kept:
            scaled = torch.cat(kept) * scale
            grad_head = (scaled.T @ normed).float()
        if grad_normed is not None:
            grad_normed = grad_normed * scale
        return grad_normed, grad_head, None, None, None


def step_weights(steps: int, decay: float) -> list[float]:
    """decay^k for k = 0 .. steps - 1, summing to 1."""
    raw = [decay**k for k in range(steps)]
    return [weight / sum(raw) for weight in raw]
