"""The loss of one batch for any head kind, and how much of its drafts would be accepted; what DDP or FSDP wraps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from gpu_worker.training.batches import DraftVocabulary, Span, TrainingBatch
from gpu_worker.training.losses import LossKind, law_losses, step_weights
from gpu_worker.training.modules.decoder_head import DecoderHead
from gpu_worker.training.modules.draft_model import DraftModel
from gpu_worker.training.modules.medusa import MedusaHeads

# Columns of BatchOutcome.sums; each is a sum over the rows that the step has a target for.
ROWS, LAW_LOSS, REGRESSION, ACCEPTED, REACHED = range(5)


@dataclass(frozen=True)
class Objective:
    """What is minimised: sum over steps of decay^k (law_weight * law loss + regression_weight * regression)."""

    unroll: int
    loss: LossKind = "cross-entropy"
    decay: float = 0.8
    law_weight: float = 1.0
    regression_weight: float = 0.0  # SmoothL1 between the recycled hidden state and the target's
    feature_noise: float = 0.0  # uniform on +- this, in units of the features' root mean square


@dataclass
class BatchOutcome:
    """loss is a scalar; sums [steps, 5] float64 with the columns named above, without gradient.

    ACCEPTED counts rows whose greedy draft equals the target's choice at this and every earlier step; REACHED adds up
    the chance that a draft sampled from the head is accepted that far (product of the overlaps of both laws).
    """

    loss: torch.Tensor
    sums: torch.Tensor


class DraftObjective(nn.Module):
    """A head, the target's frozen tables in the compute dtype, and the loss between them."""

    embedding: torch.Tensor  # [num_embeddings, h]
    output_rows: torch.Tensor  # [V, h]

    def __init__(
        self,
        head: DecoderHead | MedusaHeads | DraftModel,
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
        vocabulary: DraftVocabulary,
        objective: Objective,
        dtype: torch.dtype,
    ) -> None:
        """embedding, lm_head [num_embeddings, h]; only the rows of the draft vocabulary are kept of lm_head."""
        super().__init__()
        self.head = head
        self.objective = objective
        self.register_buffer("embedding", embedding.to(dtype), persistent=False)
        self.register_buffer("output_rows", lm_head[vocabulary.ids].to(dtype), persistent=False)

    def forward(self, batch: TrainingBatch, steps: int) -> BatchOutcome:
        """Unrolls `steps` draft steps. In eval mode nothing but the noise differs."""
        settings, head = self.objective, self.head
        if self.training and settings.feature_noise:
            batch = _noisy(batch, settings.feature_noise)
        weights = step_weights(steps, settings.decay)
        loss = torch.zeros((), device=batch.token_ids.device)
        sums = torch.zeros(steps, 5, dtype=torch.float64, device=batch.token_ids.device)
        alive = torch.ones(batch.num_rows, dtype=torch.bool, device=batch.token_ids.device)
        reached = torch.ones(batch.num_rows, device=batch.token_ids.device)
        for k, step in enumerate(head.unroll(batch, self.embedding, steps)):
            ahead = k + head.lookahead
            rows = batch.rows_with_target(ahead)
            if not len(rows):
                break
            targets = rows + ahead
            own = head.output_rows(k)
            losses = law_losses(
                step.normed[rows],
                self.output_rows if own is None else own,
                batch.columns[targets],
                batch.probs[targets],
                settings.loss,
            )
            law = losses.loss.mean()
            part = settings.law_weight * law
            regression = torch.zeros((), device=law.device)
            if settings.regression_weight and step.recycled is not None:
                regression = _regression(step.recycled[rows], batch, targets)
                part = part + settings.regression_weight * regression
            loss = loss + weights[k] * part
            still = torch.zeros_like(alive)
            still[rows] = alive[rows] & losses.hit
            alive = still
            chance = torch.zeros_like(reached)
            chance[rows] = reached[rows] * losses.overlap
            reached = chance
            count = len(rows)
            sums[k] = torch.stack(
                [
                    torch.tensor(float(count), dtype=torch.float64, device=law.device),
                    law.detach().double() * count,
                    regression.detach().double() * count,
                    alive.sum().double(),
                    reached.sum().double(),
                ]
            )
        return BatchOutcome(loss, sums)


def unrolled_logits(
    objective: DraftObjective, token_ids: torch.Tensor, features: torch.Tensor, steps: int
) -> torch.Tensor:
    """The training forward as plain logits, to hold against the serving head.

    token_ids [T] int64 of one sequence; features [T, F], row i what the target computed for token i. Returns
    [steps, T - steps + 1, V]: at [k, i] the logits of draft step k of a chain that starts with token i (whose pair is
    features of token i - 1), fed with the sequence's own tokens i + 1 .. i + k.
    """
    count = len(token_ids) - steps + 1
    dtype = objective.embedding.dtype
    shifted = torch.zeros(features.shape, dtype=dtype)
    shifted[1:] = features[:-1]
    rows = torch.arange(count)
    empty = torch.zeros(count, 1)
    batch = TrainingBatch(
        token_ids=token_ids,
        positions=torch.arange(len(token_ids)),
        features=shifted,
        spans=(Span(0, len(token_ids), 0, count),),
        rows=rows,
        room=(count - 1 - rows).numpy(),
        columns=empty.long(),
        probs=empty,
        hidden=features[:count].to(dtype),
    )
    logits = []
    for k, step in enumerate(objective.head.unroll(batch, objective.embedding, steps)):
        own = objective.head.output_rows(k)
        weights = objective.output_rows if own is None else own.to(dtype)
        logits.append(step.normed @ weights.T)
    return torch.stack(logits)


def _regression(recycled: torch.Tensor, batch: TrainingBatch, targets: torch.Tensor) -> torch.Tensor:
    """SmoothL1 in units of the target's root mean square, so that one weight suits models of any scale."""
    assert batch.hidden is not None, "read with the last hidden state"
    wanted = batch.hidden[targets].float()
    scale = wanted.square().mean().sqrt()
    return F.smooth_l1_loss(recycled.float() / scale, wanted / scale)


def _noisy(batch: TrainingBatch, noise: float) -> TrainingBatch:
    scale = batch.features.float().square().mean().sqrt().to(batch.features.dtype) * noise
    return replace(batch, features=batch.features + torch.empty_like(batch.features).uniform_(-1, 1) * scale)
