"""Verification of single drafts on the device: what `verify` says, once it is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.draft_tree import DraftTree, chain_tree, single_drafts_tree
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.sampling.verification import accept_single_drafts
from shared_mem.enums import AcceptanceRule
from shared_mem.records import SamplingRecord

V = 12
RECORDS = (
    SamplingRecord(temperature=0.0),
    SamplingRecord(temperature=0.0, num_logprobs=2),
    SamplingRecord(temperature=1.0, seed=3),
    SamplingRecord(temperature=0.7, seed=4, num_logprobs=0),
    SamplingRecord(temperature=0.7, top_k=3, top_p=0.8, seed=5),
    SamplingRecord(temperature=0.0, presence_penalty=2.0, repetition_penalty=1.5),
    SamplingRecord(temperature=1.0, frequency_penalty=1.0, logit_bias=((2, 3.0),), seed=6),
    SamplingRecord(temperature=1.0, min_tokens=5, end_ids=(1, 2, 3), seed=7),
)


@settings(deadline=None, max_examples=60)
@given(
    kinds=st.lists(st.integers(0, len(RECORDS) - 1), min_size=1, max_size=6),
    drafted=st.lists(st.booleans(), min_size=6, max_size=6),
    seed=st.integers(0, 1 << 30),
)
def test_it_is_what_verify_gives(kinds: list[int], drafted: list[bool], seed: int) -> None:
    """Any mix of slots that draw first, each with a draft or without; few ids, so that drafts are often right."""
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(len(kinds), V, "cpu")
    for slot, kind in enumerate(kinds):
        sampler.admit(slot, RECORDS[kind], [1, 5, 7], 2)
    slots = list(range(len(kinds)))
    drafts = torch.randint(0, 3, (len(kinds),), generator=generator).tolist()
    tree = chain_tree([7] * len(kinds), [[draft] * has for draft, has in zip(drafts, drafted, strict=False)])
    logits = 2 * torch.randn(tree.num_nodes, V + 4, generator=generator)
    logits[:, :3] += 2
    lengths = [3] * len(kinds)
    expected = sampler.verify(tree, logits, slots, lengths)
    assert sampler.draws_first(slots)
    unread = sampler.verify_unread(tree, logits, slots, lengths)
    assert unread.num_accepted.tolist() == expected.num_accepted
    got = sampler.with_logprobs(unread.read(), logits, slots)
    assert (got.num_accepted, got.path_nodes, got.token_ids) == (
        expected.num_accepted,
        expected.path_nodes,
        expected.token_ids,
    )
    for ours, theirs in zip(got.logprobs, expected.logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
            np.testing.assert_allclose(ours.values, theirs.values)


@pytest.mark.parametrize(
    "rule",
    [AcceptanceRule.REJECTION, AcceptanceRule.BLOCK, AcceptanceRule.TYPICAL, AcceptanceRule.THRESHOLD],
)
def test_slots_that_judge_by_probabilities_do_not_draw_first(rule: AcceptanceRule) -> None:
    sampler = Sampler(3, V, "cpu")
    sampler.admit(0, SamplingRecord(temperature=1.0, acceptance_rule=rule), [1], 1)
    sampler.admit(1, SamplingRecord(temperature=0.0, acceptance_rule=rule), [1], 1)
    sampler.admit(2, SamplingRecord(temperature=1.0), [1], 1)
    assert not sampler.draws_first([0, 2])
    assert sampler.draws_first([1, 2])  # at temperature 0 every rule accepts the best id alone


def test_longer_drafts_are_refused() -> None:
    with pytest.raises(AssertionError, match="walked on the host"):
        accept_single_drafts(chain_tree([1], [[2, 3]]), torch.zeros(3, dtype=torch.int64))


def test_drafts_for_unknown_positions_are_those_of_propose() -> None:
    sampler = Sampler(4, V, "cpu")
    rules = (AcceptanceRule.COUPLED, AcceptanceRule.TYPICAL, AcceptanceRule.COUPLED, AcceptanceRule.COUPLED)
    for slot, (temperature, rule) in enumerate(zip((0.0, 1.0, 1.0, 0.3), rules, strict=True)):
        sampler.admit(slot, SamplingRecord(temperature=temperature, seed=slot, acceptance_rule=rule), [1], 1)
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(1))
    for order in ([0, 1, 2, 3], [2, 3], [0, 1], [3, 0]):
        positions = [5 + slot for slot in order]
        expected, q = sampler.propose(logits[order], order, positions, [[]] * len(order))
        assert q is None
        assert sampler.propose_unread(logits[order], order, torch.tensor(positions)).tolist() == expected
        assert all(sampler.draws_plainly(slot) for slot in order)


@pytest.mark.parametrize("drafted", [[], [1], [0, 2], [0, 1, 2]])
def test_single_drafts_tree_is_a_chain_tree(drafted: list[int]) -> None:
    tree = single_drafts_tree([7, 8, 9], drafted, torch.arange(20, 20 + len(drafted)))
    chains = chain_tree([7, 8, 9], [[20 + drafted.index(r)] if r in drafted else [] for r in range(3)])
    assert tree.host == chains.host
    assert _arrays(tree) == _arrays(chains)


def _arrays(tree: DraftTree) -> list[list[int]]:
    return [values.tolist() for values in (tree.indptr, tree.tokens, tree.parents, tree.depths)]
