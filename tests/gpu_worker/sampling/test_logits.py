"""Laws of rows against a token-by-token implementation, and what greedy rows must not cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.sampling.logits import LogitsProcessor, Rows
from gpu_worker.sampling.slot_states import SlotStates
from gpu_worker.sampling.truncation import tempered, truncate
from shared_mem.records import SamplingRecord

from .naive import naive_adjusted, naive_law

V = 12


def dense(law, num_tokens: int) -> torch.Tensor:
    return law.scatter(law.probabilities(), num_tokens)


tokens = st.lists(st.integers(0, V - 1), max_size=6)
records = st.builds(
    SamplingRecord,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, V, 99]),
    top_p=st.sampled_from([1.0, 0.2, 0.8, 0.99]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    min_tokens=st.sampled_from([0, 3]),
    logit_bias=st.sampled_from([(), ((2, -100.0), (5, 1.5))]),
    end_ids=st.sampled_from([(), (0, 7)]),
)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    requests=st.lists(st.tuples(records, tokens, tokens, tokens), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_laws_of_mixed_slots_equal_the_naive_ones(requests, seed):
    """Each request: a record, its prompt, committed output, and drafts on the row's path."""
    states = SlotStates(8, V, torch.device("cpu"))
    processor = LogitsProcessor(states)
    for slot, (record, prompt, generated, _) in enumerate(requests):
        states.admit(slot, record, prompt + generated[:1], len(prompt))
        states.commit(slot, generated[1:])
    slots = np.arange(len(requests)).repeat(2)  # every request has its row twice
    positions = np.array([len(p) + len(g) + len(d) for _, p, g, d in requests]).repeat(2)
    logits = torch.randn(len(slots), V, generator=torch.Generator().manual_seed(seed)) * 2
    before = logits.clone()
    rows = Rows(np.arange(len(slots)), slots, positions, lambda row: requests[row // 2][3])
    adjusted = processor.adjusted(logits, rows)
    law = dense(processor.law(adjusted, slots), V)
    assert torch.equal(logits, before)
    for row, slot in enumerate(slots.tolist()):
        record, prompt, generated, drafts = requests[slot]
        expected = naive_adjusted(logits[row].tolist(), record, prompt, generated + drafts)
        torch.testing.assert_close(adjusted[row], torch.tensor(expected), rtol=1e-5, atol=1e-5)
        expected_law = naive_law(adjusted[row].double().tolist(), record)
        torch.testing.assert_close(law[row], torch.tensor(expected_law), rtol=1e-4, atol=1e-6)


def test_rows_that_need_nothing_are_not_copied():
    states = SlotStates(2, V, torch.device("cpu"))
    states.admit(0, SamplingRecord(), [1], 1)
    states.admit(1, SamplingRecord(temperature=1.0), [1], 1)
    logits = torch.randn(3, V)
    rows = Rows(np.arange(3), np.array([0, 1, 1]), np.array([1, 1, 2]), lambda row: [])
    assert LogitsProcessor(states).adjusted(logits, rows) is logits
    assert not states.penalties


def test_min_tokens_bans_ends_of_the_first_tokens_only():
    states = SlotStates(1, V, torch.device("cpu"))
    states.admit(0, SamplingRecord(min_tokens=12, end_ids=(4,)), [1, 2, 3], 3)
    positions = np.arange(3, 3 + 14)  # draws generated tokens 1 .. 14
    rows = Rows(np.arange(14), np.zeros(14, dtype=np.int64), positions, lambda row: [])
    adjusted = LogitsProcessor(states).adjusted(torch.zeros(14, V), rows)
    assert torch.isinf(adjusted[:, 4]).tolist() == [True] * 12 + [False] * 2
    assert torch.isfinite(adjusted[:, :4]).all()


def test_a_released_slot_keeps_nothing():
    states = SlotStates(1, V, torch.device("cpu"))
    record = SamplingRecord(presence_penalty=1.0, logit_bias=((1, 2.0),), min_tokens=5, end_ids=(0,))
    states.admit(0, record, [1, 2], 1)
    states.release(0)
    states.release(0)
    assert (states.penalties, states.bias, states.end_ids) == ({}, {}, {})
    states.admit(0, SamplingRecord(), [1, 2], 1)
    states.commit(0, [3])
    assert not states.parameters["adjusts"][0]


def random_rows(num: int, size: int, scale: float) -> torch.Tensor:
    logits = torch.randn(num, size, generator=torch.Generator().manual_seed(num)) * scale
    return tempered(logits, torch.ones(num))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "scale"),
    [
        (50, 1.0, 0.0, 3.0),  # within the first candidates
        (255, 0.9, 0.0, 1.0),
        (300, 1.0, 0.0, 3.0),  # beyond the first candidates
        (0, 0.9, 0.0, 4.0),
        (0, 0.999, 0.0, 1.0),  # most of the vocabulary: a full sort
        (0, 1.0, 0.02, 1.0),
        (5000, 0.95, 0.001, 1.0),
    ],
)
def test_truncation_of_a_large_vocabulary(top_k, top_p, min_p, scale):
    x = random_rows(3, 9000, scale)
    law = truncate(x, torch.full((3,), top_k), torch.full((3,), top_p), torch.full((3,), min_p))
    actual = dense(law, 9000)
    record = SamplingRecord(temperature=1.0, top_k=top_k, top_p=np.float32(top_p), min_p=np.float32(min_p))
    for row in range(3):
        expected = torch.tensor(naive_law(x[row].double().tolist(), record))
        assert torch.equal(actual[row] > 0, expected > 0)
        torch.testing.assert_close(actual[row], expected, rtol=1e-4, atol=1e-7)


def test_a_row_is_truncated_alike_beside_any_other():
    """A flat neighbour forces more candidates; the kept set and the probabilities must not move."""
    peaked, flat = random_rows(1, 9000, 5.0), random_rows(1, 9000, 0.1)

    def law(rows: torch.Tensor) -> torch.Tensor:
        n = len(rows)
        full = torch.full((n,), 0.9)
        return dense(truncate(rows, torch.zeros(n, dtype=torch.int64), full, torch.zeros(n)), 9000)

    assert torch.equal(law(torch.cat([peaked, flat]))[0], law(peaked)[0])


def test_ties_with_the_last_kept_token_are_kept():
    """What is kept must not depend on how a sort orders equal values, nor on the number of candidates."""
    x = tempered(torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]]), torch.ones(2))
    law = truncate(x, torch.tensor([2, 2]), torch.ones(2), torch.zeros(2))
    assert (dense(law, 5) > 0).tolist() == [[True] * 4 + [False], [True] * 5]


def test_tiny_temperature_does_not_overflow():
    x = tempered(torch.tensor([[30.0, 29.0, -30.0]]), torch.tensor([1e-38]))
    assert not torch.isnan(x).any()
    assert x[0, 0] == 0
