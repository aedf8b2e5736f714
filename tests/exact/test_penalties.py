"""Penalties, bias and minimum lengths under speculation equal decoding one token at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_worker.draft_tree import DraftTree, chain_tree
from gpu_worker.sampling.sampler import Sampler
from shared_mem.enums import AcceptanceRule
from shared_mem.records import SamplingRecord
from tests.gpu_worker.sampling.naive import naive_adjusted

from . import simulation as sim

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SIZE = 12
# A strong pull to few tokens, so that penalties decide.
TABLE = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(11)) * 0.7 + torch.tensor(
    [2.0, 1.8, 1.6, *[0.0] * (SIZE - 3)]
)
PROMPT = [3, 1, 4, 1, 5]
PENALISED = SamplingRecord(frequency_penalty=0.7, presence_penalty=0.5, repetition_penalty=1.3)


def one_by_one(record: SamplingRecord, num: int) -> list[int]:
    """Greedy decoding in plain Python."""
    generated: list[int] = []
    for _ in range(num):
        last = (PROMPT + generated)[-1]
        values = naive_adjusted(TABLE[last].tolist(), record, PROMPT, generated)
        generated.append(max(range(SIZE), key=lambda token: (values[token], -token)))
    return generated


def speculate(record: SamplingRecord, num: int, drafts_of, seed: int = 0) -> tuple[list[int], list[int]]:
    """Decodes with drafts_of(known tokens, round) -> tree; returns (tokens, accepted drafts per round)."""
    sampler = Sampler(3, SIZE, "cpu")
    sampler.admit(1, replace(record, seed=seed), PROMPT, len(PROMPT))
    known = list(PROMPT)
    accepted = []
    while len(known) < len(PROMPT) + num:
        tree = drafts_of(known, len(accepted))
        verification = sampler.verify(tree, TABLE[tree.tokens], [1], [len(known)])
        sampler.commit([1], verification.token_ids)
        known += verification.token_ids[0]
        accepted.append(verification.num_accepted[0])
    return known[len(PROMPT) :][:num], accepted


def scripted(reference: list[int], wrong_at: int | None, k: int):
    """The reference's next k tokens, draft `wrong_at` (from 0) replaced."""

    def drafts(known: list[int], step: int) -> DraftTree:
        done = len(known) - len(PROMPT)
        draft = reference[done : done + k]
        if wrong_at is not None and wrong_at < len(draft):
            draft = [*draft[:wrong_at], (draft[wrong_at] + 1) % SIZE, *draft[wrong_at + 1 :]]
        return chain_tree([known[-1]], [draft])

    return drafts


def branching(reference: list[int]):
    """A tree: a wrong child first, then the right one, with a wrong and a right child of its own."""

    def drafts(known: list[int], step: int) -> DraftTree:
        done = len(known) - len(PROMPT)
        a, b = (*reference[done:], 0, 0)[:2]
        tokens = [[(a + 1) % SIZE, a, (b + 1) % SIZE, b, b]]
        return sim.regular_tree([known[-1]], torch.tensor(tokens), [0, 0, 2, 2, 1])

    return drafts


@pytest.mark.parametrize("min_tokens", [0, 6])
@pytest.mark.parametrize("record", [PENALISED, replace(PENALISED, repetition_penalty=0.8)])
def test_penalties_with_accepted_and_rejected_drafts_equal_one_by_one_decoding(record, min_tokens):
    record = replace(record, min_tokens=min_tokens, end_ids=(0, 2))
    expected = one_by_one(record, 40)
    assert len(set(expected)) > 3
    for wrong_at, k in ((None, 4), (0, 4), (1, 4), (2, 4), (3, 4), (2, 7)):
        tokens, accepted = speculate(record, 40, scripted(expected + [0] * k, wrong_at, k))
        assert tokens == expected
        limit = k if wrong_at is None else wrong_at
        assert set(accepted[:-2]) == {limit}
    tokens, accepted = speculate(record, 40, branching(expected))
    assert tokens == expected
    assert set(accepted[:-2]) == {2}


def test_penalties_leave_the_sampled_text_alone_under_speculation():
    record = replace(PENALISED, temperature=1.0, top_p=0.9)
    plain, _ = speculate(record, 40, lambda known, step: chain_tree([known[-1]], [[]]), seed=5)
    for drafts in (scripted(plain + [0] * 4, None, 4), scripted(plain + [0] * 4, 2, 4), branching(plain)):
        tokens, accepted = speculate(record, 40, drafts, seed=5)
        assert tokens == plain
        assert sum(accepted) > 0


def test_drafts_are_penalised_like_the_target():
    """A perfect draft model stays perfect: its own earlier drafts count against its next one."""
    sampler = Sampler(1, SIZE, "cpu")
    sampler.admit(0, PENALISED, PROMPT, len(PROMPT))
    expected = one_by_one(PENALISED, 6)
    drafted: list[int] = []
    for step in range(6):
        last = (PROMPT + drafted)[-1]
        (token,), q = sampler.propose(TABLE[[last]], [0], [len(PROMPT) + step], [drafted])
        assert q is None
        drafted = [*drafted, token]
    assert drafted == expected


def test_resuming_counts_what_was_generated_before():
    """Admission with the tokens so far leaves the same state as admission, steps and commits."""
    expected = one_by_one(PENALISED, 20)
    sampler = Sampler(1, SIZE, "cpu")
    sampler.admit(0, PENALISED, PROMPT + expected[:9], len(PROMPT))
    known = PROMPT + expected[:9]
    for token in expected[9:]:
        verification = sampler.verify(chain_tree([known[-1]], [[]]), TABLE[[known[-1]]], [0], [len(known)])
        assert verification.token_ids == [[token]]
        sampler.commit([0], [[token]])
        known.append(token)


def test_a_biased_token_is_never_emitted_though_it_is_always_drafted():
    second = one_by_one(SamplingRecord(), 2)[1]
    record = SamplingRecord(logit_bias=((second, -100.0),))
    expected = one_by_one(record, 30)
    assert second not in expected
    for rule in AcceptanceRule:
        for temperature in (0.0, 1.0):
            tokens, _ = speculate(
                replace(record, temperature=temperature, acceptance_rule=rule),
                30,
                lambda known, step: chain_tree([known[-1]], [[second, second]]),
            )
            assert second not in tokens
            if temperature == 0:
                assert tokens == expected


@pytest.mark.parametrize("rule", list(AcceptanceRule))
def test_min_p_of_one_equals_greedy(rule):
    expected = one_by_one(SamplingRecord(), 24)
    record = SamplingRecord(temperature=1.0, min_p=1.0, acceptance_rule=rule)
    for wrong_at in (None, 1):
        tokens, _ = speculate(record, 24, scripted(expected + [0] * 4, wrong_at, 4))
        assert tokens == expected


@pytest.mark.parametrize("rule", list(AcceptanceRule))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_min_tokens_12_the_first_possible_end_is_token_13(rule, temperature):
    """The end id is by far the most likely token everywhere, and drafted everywhere."""
    end = 7
    record = SamplingRecord(
        temperature=temperature,
        acceptance_rule=rule,
        min_tokens=12,
        end_ids=(end,),
        logit_bias=((end, 30.0),),
    )
    for k in (0, 1, 4, 7):
        tokens, _ = speculate(record, 16, lambda known, step, k=k: chain_tree([known[-1]], [[end] * k]))
        assert tokens.index(end) == 12
