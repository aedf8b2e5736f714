"""Drafters whose proposals a test scripts: they make acceptance deterministic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from gpu_worker.draft_tree import DraftTree, chain_tree
from gpu_worker.drafting.base import DraftRequest, TargetHidden, TargetProgress
from gpu_worker.request_state import RequestTable
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission

# (known tokens of the sequence, number of its prompt tokens, most drafts) -> drafts
Script = Callable[[list[int], int, int], list[int]]


def oracle(references: Mapping[tuple[int, ...], Sequence[int]]) -> Script:
    """Proposes the continuation that speculation off gave: `references` maps a prompt to its generated ids."""

    def propose(tokens: list[int], num_prompt: int, k: int) -> list[int]:
        generated = len(tokens) - num_prompt
        return list(references[tuple(tokens[:num_prompt])][generated : generated + k])

    return propose


def wrong_at(j: int, script: Script, vocab_size: int) -> Script:
    """The script with draft j (1-based) replaced by another id."""

    def propose(tokens: list[int], num_prompt: int, k: int) -> list[int]:
        drafts = script(tokens, num_prompt, k)
        if len(drafts) >= j:
            drafts[j - 1] = (drafts[j - 1] + 1) % vocab_size
        return drafts

    return propose


def junk(vocab_size: int) -> Script:
    """Random ids, a function of the sequence's length alone."""

    def propose(tokens: list[int], num_prompt: int, k: int) -> list[int]:
        return np.random.default_rng(len(tokens)).integers(0, vocab_size, k).tolist()

    return propose


class ScriptedDrafter:
    """A chain from the script or, with siblings, a tree whose true path comes after junk siblings at every level."""

    keeps_state = False
    hidden_layers = None

    def __init__(
        self,
        table: RequestTable,
        script: Script,
        *,
        method: SpeculationMethod = SpeculationMethod.NGRAM,
        num_siblings: int = 0,
        vocab_size: int = 0,
    ) -> None:
        self.method = method
        self._table = table
        self._script = script
        self._num_siblings = num_siblings
        self._vocab_size = vocab_size
        self.num_proposed = 0

    def admit(self, admission: Admission) -> None:
        """Nothing to keep."""

    def release(self, slot: int) -> None:
        """Nothing to forget."""

    def prefill(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """Nothing to compute."""

    def catch_up(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """Nothing to compute."""

    def num_computed_after(self, progress: TargetProgress) -> int:
        """There is no draft KV."""
        return 0

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTree:
        """See Drafter.propose."""
        roots, drafts = [], []
        for request in requests:
            tokens = self._table.known(request.slot).tolist()
            k = request.num_draft_tokens // (1 + self._num_siblings)
            roots.append(tokens[-1])
            drafts.append(self._script(tokens, int(self._table.num_prompt_tokens[request.slot]), k))
        self.num_proposed += sum(len(draft) for draft in drafts)
        if not self._num_siblings:
            return chain_tree(roots, drafts)
        return self._with_siblings(roots, drafts)

    def _with_siblings(self, roots: list[int], drafts: list[list[int]]) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        indptr = [0]
        for root, draft in zip(roots, drafts, strict=True):
            tokens.append(root)
            parents.append(len(tokens) - 1)
            depths.append(0)
            parent = len(tokens) - 1
            for depth, token in enumerate(draft, start=1):
                for sibling in range(1, self._num_siblings + 1):
                    tokens.append((token + sibling) % self._vocab_size)
                    parents.append(parent)
                    depths.append(depth)
                tokens.append(token)
                parents.append(parent)
                depths.append(depth)
                parent = len(tokens) - 1
            indptr.append(len(tokens))
        return DraftTree.of_tensors(
            np.array(indptr, dtype=np.int32),
            torch.tensor(tokens),
            torch.tensor(parents),
            torch.tensor(depths),
        )
