"""Engines that draft in every way there is, by name; all serve the same target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu_worker.drafting.tree_growth import CHAINS, TreeShape
from gpu_worker.drafting.tree_shape import assumed_hit_rates, build_product_tree
from gpu_worker.models.base import CausalLM
from gpu_worker.request_state import RequestTable
from shared_mem.enums import SpeculationMethod
from tests.harness.engine import InProcessEngine
from tests.harness.scripted_drafters import Script, ScriptedDrafter, junk, oracle, wrong_at
from tests.harness.tiny_heads import KINDS, tiny_head, tiny_medusa

NAMES = (
    "ngram",
    "draft-model",
    "oracle",
    "wrong-at-2",
    "junk",
    "oracle-tree",
    "wrong-tree",
    "junk-tree",
    "portfolio",
)
HEAD_NAMES = (
    *(
        f"{kind}/{shape}"
        for kind in (*KINDS, "medusa", "portfolio", "draft-model-of-some-ids")
        for shape in ("chain", "tree")
    ),
    "eagle/fixed-tree",
    "eagle3/pruned-chain",
    "eagle3/pruned-tree",
)

METHOD_OF_HEAD = {
    "eagle": SpeculationMethod.EAGLE,
    "eagle-full": SpeculationMethod.EAGLE,
    "eagle3": SpeculationMethod.EAGLE3,
    "eagle3-normed": SpeculationMethod.EAGLE3,
    "mtp": SpeculationMethod.MTP,
    "mtp-published": SpeculationMethod.MTP,
    "eagle-shipped": SpeculationMethod.EAGLE,
    "mtp-shipped": SpeculationMethod.MTP,
}

_SHAPES = {
    "chain": CHAINS,
    "tree": TreeShape(max_depth=3, max_children=4),
    "fixed-tree": TreeShape(3, 4, build_product_tree(assumed_hit_rates(3), 9)),
    "pruned-chain": replace(CHAINS, least_value=-5.0),
    "pruned-tree": TreeShape(max_depth=3, max_children=4, least_value=-3.0),
}

# Scripted drafters stand in for the n-gram method: no plan can tell them apart.
SCRIPTED = SpeculationMethod.NGRAM


def make_engine(
    name: str,
    target: CausalLM,
    references: Mapping[tuple[int, ...], Sequence[int]],
    directory: Path | None = None,
    **settings: Any,
) -> InProcessEngine:
    """An engine whose default method drafts as `name` says; `directory`: the target's, for a head made from it."""
    vocab_size = target.config.vocab_size
    if name == "ngram":
        return InProcessEngine(target, ngram=True, **settings)
    if name == "draft-model":
        return InProcessEngine(target, draft=target.truncated(1), **settings)
    if name == "portfolio":
        settings = {"num_draft_tokens": 9, "tree": TreeShape(max_depth=3, max_children=4)} | settings
        heads = {SpeculationMethod.EAGLE3: tiny_head("eagle3", target, None)}
        draft = target.truncated(1)
        return InProcessEngine(target, ngram=True, draft=draft, heads=heads, portfolio=True, **settings)
    if "/" in name:
        kind, shape = name.split("/")
        tree = _SHAPES[shape]
        settings = {"num_draft_tokens": 4 if tree.is_chain else 9} | settings
        if kind == "draft-model-of-some-ids":
            some = torch.arange(0, vocab_size, 2)
            return InProcessEngine(target, draft=target.truncated(1), draft_ids=some, tree=tree, **settings)
        if kind == "medusa":
            return InProcessEngine(target, medusa=tiny_medusa(target), tree=tree, **settings)
        if kind == "portfolio":
            heads = {SpeculationMethod.EAGLE: tiny_head("eagle-full", target, directory)}
            medusa = tiny_medusa(target, num_layers=2, own_lm_head=True)
            settings |= {"heads": heads, "medusa": medusa, "ngram": True}
            return InProcessEngine(target, portfolio=True, tree=tree, **settings)
        head = tiny_head(kind, target, directory)
        return InProcessEngine(target, heads={METHOD_OF_HEAD[kind]: head}, tree=tree, **settings)
    scripts: dict[str, Script] = {
        "oracle": oracle(references),
        "wrong": wrong_at(2, oracle(references), vocab_size),
        "junk": junk(vocab_size),
    }
    script = scripts[name.split("-")[0]]
    num_siblings = 2 if name.endswith("-tree") else 0
    if num_siblings:
        settings = {"num_draft_tokens": 12} | settings

    def factory(table: RequestTable) -> ScriptedDrafter:
        return ScriptedDrafter(table, script, num_siblings=num_siblings, vocab_size=vocab_size)

    return InProcessEngine(target, scripted={SCRIPTED: factory}, **settings)
