"""Temperature and truncation: adjusted logits to the law p (top-k, then top-p, then min-p)."""

from __future__ import annotations

import torch

from gpu_worker.sampling.law import Law

# Candidates looked at first, and next when truncation keeps more; then the whole vocabulary is sorted.
_CANDIDATES = (256, 4096)


def tempered(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """[n, V] log-weights (logits - row maximum) / temperature; temperature [n] > 0. The maximum is 0.

    The maximum is taken off first so that a tiny temperature cannot overflow.
    """
    return logits.sub(logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])


def truncate(log_weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> Law:
    """The law that top-k, top-p and min-p leave of log_weights [n, V] (row maxima 0).

    top_k [n] int64 (0: off), top_p [n] and min_p [n] float32 (1 and 0: off). What is kept is always
    everything at or above one value per row: tokens that tie with the last one kept are kept too, so that the
    set depends on the logits alone and not on how a sort breaks ties. top-p counts within what top-k left,
    renormalised; it keeps the smallest set of most probable tokens whose mass reaches top_p. min-p keeps p >=
    min_p * max p.
    """
    num_tokens = log_weights.shape[1]
    for width in (*_CANDIDATES, num_tokens):
        width = min(width, num_tokens)
        values, token_ids = log_weights.topk(width, dim=-1)
        floor = torch.maximum(
            _floor(values, log_weights, top_k, top_p), min_p.log()
        )  # log(0) = -inf: min-p off
        # The first candidate that is not kept proves that nothing beyond the candidates is.
        if width == num_tokens or bool((values[:, -1] < floor).all()):
            break
    kept = values >= floor[:, None]
    most = int(kept.sum(dim=-1).max())
    values, token_ids, kept = values[:, :most], token_ids[:, :most], kept[:, :most]
    return Law(values.masked_fill(~kept, -torch.inf), token_ids)


def _floor(
    values: torch.Tensor, log_weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """[n] least log-weight that top-k and top-p keep; -inf where `values` [n, width] are too few."""
    width, num_tokens = values.shape[1], log_weights.shape[1]
    minus_inf = values.new_full((), -torch.inf)
    k = torch.where(top_k > 0, top_k, num_tokens)
    kth = values.gather(1, (k.clamp(max=width) - 1)[:, None])[:, 0]
    by_rank = k < num_tokens
    known = ~by_rank | (k <= width) & (values[:, -1] < kth) | (width == num_tokens)
    kth = torch.where(by_rank & known, kth, minus_inf)
    by_mass = top_p < 1
    if not bool(by_mass.any()):
        return kth
    # float64: where the cut falls must not depend on the width or on the batch.
    mass = values.to(torch.float64).exp_().masked_fill_(values < kth[:, None], 0.0)
    total = mass.sum(dim=-1)
    if width < num_tokens and not bool(by_rank.all()):
        total = torch.where(by_rank, total, log_weights.to(torch.float64).exp_().sum(dim=-1))
    before = mass.cumsum(dim=-1).sub_(mass)  # mass of the more probable tokens
    count = (before < (top_p.to(torch.float64) * total)[:, None]).sum(dim=-1).clamp_(min=1)
    cut = values.gather(1, (count - 1)[:, None])[:, 0]
    return torch.where(known & by_mass, torch.maximum(kth, cut), kth)
