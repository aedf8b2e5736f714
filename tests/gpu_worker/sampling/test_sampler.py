"""The sampler's own part: logprobs, padded vocabularies, slots, and the shape of what it returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker.draft_tree import chain_tree
from gpu_worker.sampling.law import SURE_FACTOR, Law
from gpu_worker.sampling.random import gumbel_noise
from gpu_worker.sampling.sampler import Sampler
from shared_mem.enums import AcceptanceRule
from shared_mem.records import SamplingRecord

V = 20


def random_logits(num: int, width: int = V) -> torch.Tensor:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(9)) * 2


def test_logprobs_are_raw_and_one_row_per_emitted_token():
    """0, 2 and all drafts accepted, different numbers of alternatives, penalties and bias on."""
    sampler = Sampler(4, V, "cpu")
    logits = random_logits(10)
    best = logits.argmax(dim=1).tolist()
    record = {"logit_bias": ((3, 0.001),), "frequency_penalty": 0.001}
    for slot, wanted in enumerate((0, 2, 30, -1)):
        sampler.admit(slot, SamplingRecord(num_logprobs=wanted, **record), [1], 1)
    drafts = [[(best[0] + 1) % V], [best[2], best[3], (best[4] + 1) % V], [best[6], best[7]], []]
    tree = chain_tree([1, 1, 1, 1], drafts)
    verification = sampler.verify(tree, logits, [0, 1, 2, 3], [1] * 4)
    assert verification.num_accepted == [0, 2, 2, 0]
    assert verification.path_nodes == [[0], [2, 3, 4], [6, 7, 8], [9]]
    assert verification.token_ids == [[best[0]], best[2:5], best[6:9], [best[9]]]
    reference = torch.log_softmax(logits, dim=-1)
    for r, columns in enumerate((1, 3, 1 + V)):
        logprobs = verification.logprobs[r]
        nodes = verification.path_nodes[r]
        assert logprobs.token_ids.shape == logprobs.values.shape == (len(nodes), columns)
        assert logprobs.token_ids.dtype == np.int32
        assert logprobs.values.dtype == np.float32
        for row, node in enumerate(nodes):
            assert logprobs.token_ids[row, 0] == verification.token_ids[r][row]
            expected = reference[node, logprobs.token_ids[row]].numpy()
            np.testing.assert_allclose(logprobs.values[row], expected, rtol=1e-5)
            alternatives = reference[node].sort(descending=True).values[: columns - 1].numpy()
            np.testing.assert_allclose(logprobs.values[row, 1:], alternatives, rtol=1e-5)
    assert verification.logprobs[3] is None


@pytest.mark.parametrize("num_rows", [1, 63, 64, 130])
def test_prompt_logprobs(num_rows):
    sampler = Sampler(1, V, "cpu")
    logits = random_logits(num_rows)
    tokens = torch.arange(num_rows) % V
    result = sampler.prompt_logprobs(logits, tokens, 3)
    reference = torch.log_softmax(logits, dim=-1)
    assert result.token_ids[:, 0].tolist() == tokens.tolist()
    np.testing.assert_allclose(result.values[:, 0], reference[torch.arange(num_rows), tokens], rtol=1e-5)
    np.testing.assert_array_equal(result.token_ids[:, 1:], reference.topk(3).indices.numpy())
    assert sampler.prompt_logprobs(logits, tokens, 0).values.shape == (num_rows, 1)


@pytest.mark.parametrize("rule", list(AcceptanceRule))
@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_padded_ids_are_never_drawn_nor_drafted(rule, temperature):
    """Embeddings are often padded: ids past the vocabulary have logits, here the greatest of all."""
    sampler = Sampler(8, V, "cpu")
    logits = random_logits(8, V + 12)
    logits[:, V:] = 50.0
    for slot in range(8):
        record = SamplingRecord(temperature=temperature, seed=slot, acceptance_rule=rule, num_logprobs=4)
        sampler.admit(slot, record, [1], 1)
    slots = list(range(8))
    tokens, q = sampler.propose(logits, slots, [1] * 8, [[]] * 8)
    assert max(tokens) < V
    assert q is None or q.shape == (8, V)
    verification = sampler.verify(chain_tree([1] * 8, [[]] * 8), logits, slots, [1] * 8)
    assert max(token for tokens in verification.token_ids for token in tokens) < V
    assert max(logprobs.token_ids.max() for logprobs in verification.logprobs) < V


def test_proposals_by_rule():
    """Greedy, typical, threshold: the best token; coupled: the target's noise; rejection and block: a draw."""
    rules = [AcceptanceRule.COUPLED, *AcceptanceRule]
    num = len(rules)
    sampler = Sampler(num, V, "cpu")
    for slot, rule in enumerate(rules):
        temperature = 0.0 if slot == 0 else 3.0
        sampler.admit(slot, SamplingRecord(temperature=temperature, seed=6, acceptance_rule=rule), [1], 1)
    logits = random_logits(1).expand(num, -1)
    tokens, q = sampler.propose(logits, list(range(num)), [7] * num, [[2, 4]] * num)
    best = int(logits[0].argmax())
    noise = gumbel_noise(torch.tensor([6]), torch.tensor([7]), V)[0]
    coupled = int((torch.log_softmax(logits[0] / 3.0, -1) + noise).argmax())
    by_rule = dict(zip(rules[1:], tokens[1:], strict=True))
    assert tokens[0] == by_rule[AcceptanceRule.TYPICAL] == by_rule[AcceptanceRule.THRESHOLD] == best
    assert by_rule[AcceptanceRule.COUPLED] == coupled
    assert by_rule[AcceptanceRule.REJECTION] == by_rule[AcceptanceRule.BLOCK]
    sampled = [
        1 + list(AcceptanceRule).index(rule) for rule in (AcceptanceRule.REJECTION, AcceptanceRule.BLOCK)
    ]
    torch.testing.assert_close(q[sampled], torch.softmax(logits[:2] / 3.0, -1))
    assert not q[[row for row in range(num) if row not in sampled]].any()
    assert sampler.propose(logits[:1], [0], [7], [[]])[1] is None


def test_an_empty_step():
    sampler = Sampler(1, V, "cpu")
    verification = sampler.verify(chain_tree([], []), torch.zeros(0, V), [], [])
    assert verification.token_ids == verification.path_nodes == verification.logprobs == []


def test_seeds_use_all_64_bits():
    sampler = Sampler(2, V, "cpu")
    logits = torch.zeros(2, V)
    drawn = []
    for seeds in ((1, 1 + 2**63), (2**64 - 1, 2**32 - 1)):
        for slot, seed in enumerate(seeds):
            sampler.admit(slot, SamplingRecord(temperature=1.0, seed=seed), [1], 1)
        steps = [sampler.verify(chain_tree([1, 1], [[], []]), logits, [0, 1], [n, n]) for n in range(1, 9)]
        texts = [[step.token_ids[slot][0] for step in steps] for slot in (0, 1)]
        drawn += texts
    assert len({tuple(text) for text in drawn}) == 4


def test_a_draft_under_noise_knows_how_sure_it_is() -> None:
    """The same probability however many candidates are asked for; a similar law draws the same where it is high."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(4000, 300, generator=generator) * 3
    similar = Law(weights + 0.5 * torch.randn(4000, 300, generator=generator), None)
    keys = torch.arange(4000) * 7919
    ids, sure = Law(weights, None).best(1, keys)
    of_three = Law(weights, None).best(3, keys)
    assert torch.equal(ids[:, 0], of_three[0][:, 0])
    torch.testing.assert_close(sure[:, 0], of_three[1][:, 0])
    right = (similar.draw(keys) == ids[:, 0]).float()
    doubtful, certain = sure[:, 0].exp() < 0.35, sure[:, 0].exp() > 0.65
    assert right[certain].mean() > right[doubtful].mean() + 0.3
    assert sure.exp().max() <= SURE_FACTOR
