"""Chains of drafts that grow a token at a time, all sequences together; a draft may carry the law it was drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_worker.batching import SequenceRows
from gpu_worker.draft_tree import DraftTree, chain_tree
from gpu_worker.drafting.choice import ChoiceOfDrafts
from gpu_worker.drafting.tree_growth import Expand
from gpu_worker.models.heads.base import HeadRows
from gpu_worker.request_state import RequestTable


def grow_chains(
    table: RequestTable,
    slots: Sequence[int],
    budgets: Sequence[int],
    state: HeadRows,
    expand: Expand,
    choice: ChoiceOfDrafts,
) -> DraftTree:
    """A chain of budgets[r] drafts per slot (0: the root alone).

    state [R, h]: what head or model gave at each root. expand(rows, recycled) runs it over a row of each sequence that
    goes on, so the last draft of a chain is never run.
    """
    drafts: list[list[int]] = [[] for _ in slots]
    laws: list[list[torch.Tensor]] = [[] for _ in slots]
    active = list(range(len(slots)))  # the requests that `state` has rows of
    for step in range(max(budgets, default=0)):
        still = [j for j, i in enumerate(active) if budgets[i] > step]
        if len(still) < len(active):
            state = state.select(torch.tensor(still, device=state.normed.device))
            active = [active[j] for j in still]
        names = [slots[i] for i in active]
        lengths = [int(table.num_tokens[slot]) for slot in names]
        if step:
            rows = [
                SequenceRows(slot, n + step - 1, 0, (drafts[i][-1],), (n + step - 1,))
                for i, slot, n in zip(active, names, lengths, strict=True)
            ]
            state = expand(rows, state.recycled)
        positions = [n + step for n in lengths]
        tokens, q = choice.best(state.normed, names, positions, [drafts[i] for i in active])
        for j, i in enumerate(active):
            drafts[i].append(tokens[j])
            if q is not None:
                laws[i].append(q[j])
    roots = [int(table.known(slot)[-1]) for slot in slots]
    return chain_tree(roots, drafts, table.device).with_laws(laws)
