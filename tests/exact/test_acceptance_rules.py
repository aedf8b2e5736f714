"""Rules node by node: coupled texts do not depend on drafts, opt-in rules accept exactly what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpu_worker.draft_tree import DraftTree, chain_tree
from gpu_worker.sampling.random import gumbel_noise
from gpu_worker.sampling.sampler import Sampler
from shared_mem.enums import AcceptanceRule
from shared_mem.records import SamplingRecord

from . import simulation as sim

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SIZE = 40
TABLE = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(3)) * 2
JUNK = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(4)) * 2
NEAR = TABLE + torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(5)) * 0.7
RECORDS = {
    "plain": SamplingRecord(temperature=1.0),
    "hot": SamplingRecord(temperature=2.0),
    "truncated": SamplingRecord(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    "greedy": SamplingRecord(),
}


def junk_tree(sampler: Sampler, slots: list[int], last: list[int], num_tokens: list[int]) -> DraftTree:
    """Three children, two of them with a child."""
    first = NEAR[last].topk(3).indices
    second = NEAR[first[:, :2]].argmax(dim=-1)
    return sim.regular_tree(last, torch.cat([first, second], dim=1), [0, 0, 0, 1, 2])


DRAFTERS = {
    "near-1": sim.model_chain(NEAR, 1),
    "near-4": sim.model_chain(NEAR, 4),
    "oracle-3": sim.model_chain(TABLE, 3),
    "junk-5": sim.model_chain(JUNK, 5),
    "tree": junk_tree,
}


def run(record: SamplingRecord, drafter: sim.Drafter, num_sequences: int = 24) -> np.ndarray:
    tokens, _ = sim.simulate(
        drafter,
        AcceptanceRule.COUPLED,
        num_sequences=num_sequences,
        num_tokens=24,
        target=TABLE,
        record=record,
    )
    return tokens


@pytest.mark.parametrize("record", RECORDS)
def test_coupled_text_is_the_same_with_any_drafter_number_of_drafts_and_batch(record):
    plain = run(RECORDS[record], sim.no_drafts)
    assert record == "greedy" or len(np.unique(plain, axis=0)) == len(plain)
    for drafter in DRAFTERS.values():
        assert np.array_equal(run(RECORDS[record], drafter), plain)
    # The first sequences alone: seeds are the slots', so they must not notice who else is there.
    assert np.array_equal(run(RECORDS[record], DRAFTERS["near-4"], num_sequences=3), plain[:3])


def test_coupled_drafts_use_the_targets_noise():
    """Otherwise a perfect draft model would be accepted only by chance."""
    _, rounds = sim.simulate(
        DRAFTERS["oracle-3"],
        AcceptanceRule.COUPLED,
        num_sequences=50,
        num_tokens=12,
        target=TABLE,
        record=RECORDS["hot"],
    )
    assert all(set(step.verification.num_accepted) == {3} for step in rounds)


def test_the_drawn_token_is_the_argmax_of_law_and_noise_at_its_position():
    sampler = Sampler(4, SIZE, "cpu")
    sampler.admit(2, SamplingRecord(temperature=1.7, seed=2**64 - 5), [1, 2, 3], 3)
    logits = torch.randn(1, SIZE)
    verification = sampler.verify(chain_tree([3], [[]]), logits, [2], [3])
    noise = gumbel_noise(torch.tensor([-5]), torch.tensor([3]), SIZE)
    assert verification.token_ids == [[int((torch.log_softmax(logits / 1.7, -1) + noise).argmax())]]


def test_rules_share_a_batch_without_changing_one_another():
    rules = list(AcceptanceRule)
    records = [
        SamplingRecord(temperature=t, seed=7, acceptance_rule=rule, top_k=k, threshold=0.2)
        for rule in rules
        for t, k in ((0.0, 0), (0.9, 0), (0.9, 5))
    ]
    sampler = Sampler(len(records), SIZE, "cpu")
    for slot, record in enumerate(records):
        sampler.admit(slot, record, [0], 1)
    drafts = [TABLE[0].topk(3).indices.tolist()[: slot % 4] for slot in range(len(records))]
    tree = chain_tree([0] * len(records), drafts)
    together = sampler.verify(tree, TABLE[tree.tokens], list(range(len(records))), [1] * len(records))
    for slot in range(len(records)):
        alone = chain_tree([0], [drafts[slot]])
        single = sampler.verify(alone, TABLE[alone.tokens], [slot], [1])
        assert single.token_ids[0] == together.token_ids[slot]
        start = int(tree.indptr[slot])
        assert [start + node for node in single.path_nodes[0]] == together.path_nodes[slot]


@pytest.mark.parametrize("rule", list(AcceptanceRule))
@pytest.mark.parametrize("drafter", ["oracle-3", "junk-5", "tree"])
def test_at_temperature_zero_every_rule_is_lossless(rule, drafter):
    tokens, _ = sim.simulate(
        DRAFTERS[drafter],
        rule,
        num_sequences=2,
        num_tokens=10,
        target=TABLE,
        record=SamplingRecord(threshold=0.01),
    )
    expected, last = [], 0
    for _ in range(10):
        last = int(TABLE[last].argmax())
        expected.append(last)
    assert tokens.tolist() == [expected] * 2


BOUNDED = {
    "typical": SamplingRecord(acceptance_rule=AcceptanceRule.TYPICAL, typical_epsilon=0.2, typical_delta=0.6),
    "typical-flat": SamplingRecord(
        acceptance_rule=AcceptanceRule.TYPICAL, typical_epsilon=0.9, typical_delta=0.3
    ),
    "threshold": SamplingRecord(acceptance_rule=AcceptanceRule.THRESHOLD, threshold=0.25),
}


def passes(record: SamplingRecord, law: np.ndarray, token: int) -> bool:
    if record.acceptance_rule == AcceptanceRule.THRESHOLD:
        return bool(law[token] >= record.threshold)
    kept = law[law > 0]
    entropy = -(kept * np.log(kept)).sum()
    return bool(law[token] > min(record.typical_epsilon, record.typical_delta * np.exp(-entropy)))


@pytest.mark.parametrize("name", BOUNDED)
def test_typical_and_threshold_accept_exactly_what_their_formulas_say(name):
    """Every chain of two drafts over five tokens, from every last token."""
    record = replace(BOUNDED[name], temperature=0.7, top_k=3, top_p=0.8)
    laws = sim.filtered_law(sim.TARGET)
    sampler = Sampler(1, 5, "cpu")
    sampler.admit(0, record, [0], 1)
    chains = [(root, a, b) for root in range(5) for a in range(5) for b in range(5)]
    tree = chain_tree([c[0] for c in chains], [list(c[1:]) for c in chains])
    verification = sampler.verify(tree, sim.TARGET[tree.tokens], [0] * len(chains), [1] * len(chains))
    accepted_counts = set()
    for (root, a, b), accepted, tokens in zip(
        chains, verification.num_accepted, verification.token_ids, strict=True
    ):
        first = passes(record, laws[root], a)
        expected = 0 if not first else 1 + passes(record, laws[a], b)
        assert accepted == expected
        assert tokens[:-1] == [a, b][:expected]
        assert laws[[root, a, b][expected], tokens[-1]] > 0
        accepted_counts.add(accepted)
    assert accepted_counts == {0, 1, 2}


@pytest.mark.parametrize("name", BOUNDED)
def test_the_token_behind_an_accepted_run_has_the_targets_law(name):
    record = replace(BOUNDED[name], temperature=0.7, top_k=3, top_p=0.8)
    laws = sim.filtered_law(sim.TARGET)
    _, rounds = sim.simulate(
        sim.lookup_chain, record.acceptance_rule, num_sequences=6000, record=record, num_tokens=4
    )
    table = np.zeros((5, 5))
    for step in rounds:
        for last, new in zip(step.last_tokens, step.verification.token_ids, strict=True):
            table[([last, *new])[-2], new[-1]] += 1
    assert table[laws == 0].sum() == 0
    for last in range(5):
        kept = laws[last] > 0
        if table[last].sum():
            sim.assert_counts(table[last][kept], laws[last][kept] * table[last].sum())


@pytest.mark.parametrize(
    ("threshold", "tokens", "parents", "expected"),
    [
        (0.35, [1, 0], [0, 0], [0, 2]),  # the elder child fails
        (0.35, [0, 1, 1], [0, 0, 2], [0, 1]),  # a passing grandchild under a failing child
        (0.35, [0, 1, 0], [0, 0, 1], [0, 1, 3]),
        (0.25, [1, 0, 0, 1, 2], [0, 0, 2, 1, 1], [0, 2, 3]),  # three deepest nodes: the first of them
    ],
)
def test_of_a_tree_the_deepest_passing_path_is_kept(threshold, tokens, parents, expected):
    laws = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.4, 0.4, 0.1], [0.4, 0.4, 0.1, 0.1], [0.25] * 4])
    record = SamplingRecord(temperature=1.0, acceptance_rule=AcceptanceRule.THRESHOLD, threshold=threshold)
    sampler = Sampler(1, 4, "cpu")
    sampler.admit(0, record, [0], 1)
    tree = sim.regular_tree([0], torch.tensor([tokens]), parents)
    result = sampler.verify(tree, laws[tree.tokens].log(), [0], [1])
    assert result.path_nodes == [expected]
    assert result.num_accepted == [len(expected) - 1]
    assert result.token_ids[0][:-1] == tree.tokens[expected[1:]].tolist()
