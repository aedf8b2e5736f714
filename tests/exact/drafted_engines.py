"""Engines that draft in every way there is, by name; all serve the same target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_worker.models.base import CausalLM
from gpu_worker.request_state import RequestTable
from shared_mem.enums import SpeculationMethod
from tests.harness.engine import InProcessEngine
from tests.harness.scripted_drafters import Script, ScriptedDrafter, junk, oracle, wrong_at

NAMES = ("ngram", "draft-model", "oracle", "wrong-at-2", "junk", "oracle-tree", "wrong-tree", "junk-tree")

# Scripted drafters stand in for the n-gram method: no plan can tell them apart.
SCRIPTED = SpeculationMethod.NGRAM


def make_engine(
    name: str, target: CausalLM, references: Mapping[tuple[int, ...], Sequence[int]], **settings: Any
) -> InProcessEngine:
    """An engine whose default method drafts as `name` says."""
    vocab_size = target.config.vocab_size
    if name == "ngram":
        return InProcessEngine(target, ngram=True, **settings)
    if name == "draft-model":
        return InProcessEngine(target, draft=target.truncated(1), **settings)
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
