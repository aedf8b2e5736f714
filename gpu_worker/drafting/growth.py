"""How a head or draft model drafts: in one call of the kernels where that is possible, else level by level."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_worker.draft_tree import DraftTree
from gpu_worker.drafting.chain_growth import grow_chains
from gpu_worker.drafting.choice import ChoiceOfDrafts
from gpu_worker.drafting.one_call import OneCall
from gpu_worker.drafting.tree_growth import Expand, TreeShape, grow_trees
from gpu_worker.models.heads.base import HeadRows
from gpu_worker.request_state import RequestTable


def grow_drafts(
    table: RequestTable,
    slots: list[int],
    budgets: Sequence[int],
    shape: TreeShape,
    state: HeadRows,
    expand: Expand,
    choice: ChoiceOfDrafts,
    one_call: OneCall | None,
) -> DraftTree:
    """At most budgets[r] drafts for each slot in the form of `shape`; see grow_trees and grow_chains.

    one_call: where head, shape and kernels allow it; it serves slots of plain draws alone. Chains that may end early
    grow as trees of one child, unless a slot needs more than plain draws, as the laws of its drafts, which trees do not
    carry: then no draft is left out.
    """
    draws = choice.plain(slots)
    if one_call is not None and draws is not None and any(budgets):
        return one_call.draft(table, slots, budgets, shape, draws, state)
    if shape.is_chain and (draws is None or not shape.prunes):
        return grow_chains(table, slots, budgets, state, expand, choice)
    return grow_trees(table, slots, budgets, shape, state, expand, choice)
