"""How often the candidate of each rank is the target's choice, by draft step: what fixed trees are built from."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from gpu_worker.drafting.tree_shape import measure_hit_rates
from gpu_worker.training.batches import TrainingBatch
from gpu_worker.training.objective import DraftObjective

_NUM_RANKS = 8
_BLOCK_ROWS = 512

HitRates = tuple[tuple[float, ...], ...]  # [steps][_NUM_RANKS]


@torch.no_grad()
def hit_rates(module: DraftObjective, batches: Iterable[TrainingBatch], steps: int) -> HitRates:
    """Each step is fed with the conversation's own tokens, so that the path above it is right by construction."""
    ranks: list[torch.Tensor] = []  # [R, steps] of each batch; -1 where the step has no target
    module.eval()
    for batch in batches:
        of_batch = torch.full((batch.num_rows, steps), -1, device=batch.rows.device)
        for k, step in enumerate(module.head.unroll(batch, module.embedding, steps)):
            ahead = k + module.head.lookahead
            rows = batch.rows_with_target(ahead)
            own = module.head.output_rows(k)
            weights = module.output_rows if own is None else own.to(step.normed.dtype)
            for block in torch.split(rows, _BLOCK_ROWS):
                wanted = batch.columns[block + ahead, 0]
                logits = step.normed[block] @ weights.T
                found = (logits > logits.gather(1, wanted[:, None])).sum(-1)
                # an id outside the draft vocabulary is no candidate of any rank
                known = batch.probs[block + ahead, 0] > 0
                of_batch[block, k] = torch.where(known, found, logits.shape[1])
        ranks.append(of_batch)
    module.train()
    if not ranks:
        return ()
    rates = measure_hit_rates(torch.cat(ranks).cpu().numpy(), _NUM_RANKS)
    # Cut and not rounded: no sum of them may come out above one.
    return tuple(tuple(math.floor(rate * 10_000) / 10_000 for rate in of_step) for of_step in rates)
