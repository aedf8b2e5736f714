"""The lossless rules emit the target's law: chi-square over consecutive rounds, production generator."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from shared_mem.enums import AcceptanceRule

from . import simulation as sim

pytestmark = pytest.mark.usefixtures("one_torch_thread")

COUPLED, REJECTION, BLOCK = AcceptanceRule.COUPLED, AcceptanceRule.REJECTION, AcceptanceRule.BLOCK

CASES = {
    "rejection-sampled-chain": (REJECTION, sim.model_chain(sim.DRAFT, 2)),
    "rejection-lookup-chain": (REJECTION, sim.lookup_chain),
    "rejection-best-children": (REJECTION, sim.best_children_tree),
    "rejection-sampled-siblings": (REJECTION, sim.sampled_siblings_tree(1)),
    "rejection-plain": (REJECTION, sim.no_drafts),
    "coupled-sampled-chain": (COUPLED, sim.model_chain(sim.DRAFT, 2)),
    "coupled-lookup-chain": (COUPLED, sim.lookup_chain),
    "coupled-best-children": (COUPLED, sim.best_children_tree),
    "coupled-plain": (COUPLED, sim.no_drafts),
    "block-sampled-chain": (BLOCK, sim.model_chain(sim.DRAFT, 2)),
    "block-long-chain": (BLOCK, sim.model_chain(sim.DRAFT, 4)),
    "block-uneven-chains": (BLOCK, sim.uneven_chains(sim.DRAFT, 3)),
    "block-point-masses": (BLOCK, sim.point_mass_chain),
    "block-lookup-chain": (BLOCK, sim.lookup_chain),
    "block-best-children": (BLOCK, sim.best_children_tree),
    "block-sampled-siblings": (BLOCK, sim.sampled_siblings_tree(1)),
}
BATCH = 10_000


@pytest.mark.parametrize("case", CASES)
def test_law_of_consecutive_rounds(case):
    check_law(case, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_law_of_consecutive_rounds_200000_trials(case):
    check_law(case, 200_000)


def check_law(case: str, trials: int) -> None:
    rule, drafter = CASES[case]
    laws = sim.filtered_law(sim.TARGET)
    sequences, rounds = [], []
    # Sequences of later batches start far behind the earlier ones' positions: fresh random numbers.
    for start in range(1, 1 + 1000 * (trials // BATCH), 1000):
        tokens, some = sim.simulate(drafter, rule, num_sequences=BATCH, first_position=start)
        sequences.append(tokens)
        rounds += some
    tokens = np.concatenate(sequences)
    assert len(tokens) == trials
    sim.assert_joint_law(tokens[:, :3], laws)
    sim.assert_joint_law(tokens, laws)
    check_round_law(rounds, laws)


def check_round_law(rounds: list[sim.Round], laws: np.ndarray) -> None:
    """Within a round: the token at its first position, and the bonus behind a run that was accepted whole."""
    first = np.zeros((5, 5))
    bonus = np.zeros((5, 5))
    for step in rounds:
        indptr, depths = step.tree.indptr, step.tree.depths.tolist()
        verification = step.verification
        emitted = zip(step.last_tokens, verification.token_ids, verification.num_accepted, strict=True)
        for r, (last, tokens, num_accepted) in enumerate(emitted):
            first[last, tokens[0]] += 1
            depth = max(depths[indptr[r] : indptr[r + 1]])
            if depth and num_accepted == depth:
                bonus[tokens[-2], tokens[-1]] += 1
    tables = [first, bonus] if bonus.any() else [first]
    for table in tables:
        for last, counts in enumerate(table):
            if counts.sum():
                assert counts[laws[last] == 0].sum() == 0
                kept = laws[last] > 0
                sim.assert_counts(counts[kept], laws[last][kept] * counts.sum())


def test_speculation_is_accepted_as_often_as_its_theory_says():
    """Rejection: sum(min(p, q)) for sampled drafts, p(x) for others; coupled: p(x), or a bound."""
    p, q = sim.filtered_law(sim.TARGET)[0], sim.filtered_law(sim.DRAFT)[0]
    num = 10_000
    best = int(sim.TARGET[0].argmax())
    total_variation = np.abs(p - q).sum() / 2
    expected = {
        "rejection-sampled-chain": np.minimum(p, q).sum(),
        "rejection-lookup-chain": p[best],
        "coupled-lookup-chain": p[best],
    }
    for case, probability in expected.items():
        assert abs(_first_round_acceptance(case, num) - probability) < 4 * np.sqrt(0.25 / num)
    bound = (1 - total_variation) / (1 + total_variation)
    assert _first_round_acceptance("coupled-sampled-chain", num) > bound - 4 * np.sqrt(0.25 / num)


def _first_round_acceptance(case: str, num: int) -> float:
    rule, drafter = CASES[case]
    _, rounds = sim.simulate(drafter, rule, num_sequences=num, num_tokens=1, min_rounds=1)
    return float(np.mean([accepted > 0 for accepted in rounds[0].verification.num_accepted]))


def test_blocks_are_accepted_as_often_as_their_theory_says():
    """All chains of two and three drafts from token 0 enumerated; blocks are longer than what rejection keeps."""
    p, q = sim.filtered_law(sim.TARGET), sim.filtered_law(sim.DRAFT)
    num = 20_000
    for length in (2, 3):
        counts = {}
        for rule in (BLOCK, REJECTION):
            _, rounds = sim.simulate(
                sim.model_chain(sim.DRAFT, length), rule, num_sequences=num, num_tokens=1, min_rounds=1
            )
            counts[rule] = np.array(rounds[0].verification.num_accepted)
        expected = {BLOCK: np.zeros(length + 1), REJECTION: np.zeros(length + 1)}
        for chain in itertools.product(range(5), repeat=length):
            path = (0, *chain)
            steps = list(itertools.pairwise(path))
            drafted = np.prod([q[a, b] for a, b in steps])
            if drafted == 0:
                continue
            kept, stands, accepts = 1.0, [], []
            for i, (a, b) in enumerate(steps, start=1):
                accepts.append(min(1.0, p[a, b] / q[a, b]))
                kept = min(1.0, kept * p[a, b] / q[a, b])
                left = np.maximum(kept * p[b] - q[b], 0).sum()
                stands.append(kept if i == length else left / (left + 1 - kept))
            for i in range(length + 1):
                longer = np.prod([1 - h for h in stands[i:]])
                expected[BLOCK][i] += drafted * longer * (stands[i - 1] if i else 1.0)
                expected[REJECTION][i] += (
                    drafted * np.prod(accepts[:i]) * (1.0 if i == length else 1 - accepts[i])
                )
        for rule in (BLOCK, REJECTION):
            assert abs(expected[rule].sum() - 1) < 1e-9
            sim.assert_counts(np.bincount(counts[rule], minlength=length + 1), expected[rule] * num)
        lengths = np.arange(length + 1)
        gain = (expected[BLOCK] - expected[REJECTION]) @ lengths
        assert gain > 0.02
        assert counts[BLOCK].mean() - counts[REJECTION].mean() > gain - 5 * length / np.sqrt(num)


def test_point_masses_are_accepted_as_often_as_block_as_by_rejection():
    """No lossless rule keeps more: the first i drafts stand as often as the target writes them."""
    num = 20_000
    p = sim.filtered_law(sim.TARGET)
    first = int(sim.TARGET[0].argmax())
    second = (first + 1) % sim.VOCABULARY  # as lookup_chain drafts behind one known token
    expected = np.array(
        [1 - p[0, first], p[0, first] * (1 - p[first, second]), p[0, first] * p[first, second]]
    )
    for case in ("block-point-masses", "block-lookup-chain", "rejection-lookup-chain"):
        rule, drafter = CASES[case]
        _, rounds = sim.simulate(drafter, rule, num_sequences=num, num_tokens=1, min_rounds=1)
        counts = np.bincount(rounds[0].verification.num_accepted, minlength=3)
        sim.assert_counts(counts[expected > 0], expected[expected > 0] * num)


@pytest.mark.parametrize("rule", [COUPLED, REJECTION, BLOCK])
def test_a_draft_equal_to_the_target_is_always_accepted(rule):
    _, rounds = sim.simulate(sim.model_chain(sim.TARGET, 4), rule, num_sequences=5000, num_tokens=15)
    assert len(rounds) == 3
    for step in rounds:
        assert set(step.verification.num_accepted) == {4}


def test_three_children_have_the_marginal_law():
    """Counting a q-ratio for top-k children would be biased; walking them with p is not."""
    tokens, rounds = sim.simulate(
        sim.best_children_tree, REJECTION, num_sequences=20_000, num_tokens=1, min_rounds=1
    )
    p = sim.filtered_law(sim.TARGET)[0]
    counts = np.bincount(tokens[:, 0], minlength=5)
    assert counts[p == 0].sum() == 0
    sim.assert_counts(counts[p > 0], p[p > 0] * len(tokens))
    accepted = np.mean([a > 0 for a in rounds[0].verification.num_accepted])
    children = sim.DRAFT[0].topk(3).indices.numpy()
    assert abs(accepted - p[children].sum()) < 0.015


def test_rejected_siblings_leave_the_exact_residual():
    """Enumerated: a node with one sampled child x emits y != x with prob. sum_x q(x) P(reject x) r(y)."""
    generator = torch.Generator().manual_seed(4)
    q = torch.softmax(sim.DRAFT[0], dim=0)
    p = sim.filtered_law(sim.TARGET)[0]

    def one_child(sampler, slots, last, num_tokens):
        drafts = torch.multinomial(q.expand(len(last), -1), 1, generator=generator)
        return sim.regular_tree(last, drafts, [0], q.expand(len(last), 1, -1))

    num = 20_000
    _, rounds = sim.simulate(one_child, REJECTION, num_sequences=num, num_tokens=1, min_rounds=1)
    step = rounds[0]
    drafts = step.tree.tokens.view(num, 2)[:, 1].tolist()
    observed = np.zeros((5, 5))
    emitted = zip(drafts, step.verification.token_ids, step.verification.num_accepted, strict=True)
    for draft, tokens, accepted in emitted:
        assert not accepted or tokens[0] == draft
        observed[draft, tokens[0]] += 1
    q_exact = q.double().numpy()
    residual = np.maximum(p - q_exact, 0)
    residual /= residual.sum()
    accept = np.minimum(1, p / q_exact)
    expected = q_exact[:, None] * (np.diag(accept) + (1 - accept)[:, None] * residual[None, :])
    assert observed[expected == 0].sum() == 0
    sim.assert_counts(observed[expected > 0], expected[expected > 0] * num)
