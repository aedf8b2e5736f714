"""How many draft tokens a row may carry, one bound at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.scheduler.speculation_policy import (
    NO_SPECULATION,
    FixedSpeculation,
    SpeculationDecision,
    SpeculationFacts,
)
from shared_mem.control import DrafterFacts
from shared_mem.enums import SpeculationMethod

NGRAM, DRAFT_MODEL = SpeculationMethod.NGRAM, SpeculationMethod.DRAFT_MODEL
POLICY = FixedSpeculation(
    {NGRAM: DrafterFacts(3, "", 16, 0), DRAFT_MODEL: DrafterFacts(2, "draft", 6, max_context_tokens=32)}
)
FACTS = SpeculationFacts(
    method=NGRAM,
    max_draft_tokens=5,
    num_tokens=20,
    decoding=True,
    num_remaining_tokens=100,
    num_budget_rows=100,
    num_coverable_tokens=1000,
)


def test_followers() -> None:
    portfolio = SpeculationMethod.PORTFOLIO
    assert POLICY.followers(NGRAM) == {NGRAM}
    assert POLICY.followers(SpeculationMethod.DISABLED) == set()
    assert POLICY.followers(portfolio) == set()  # not loaded
    combined = FixedSpeculation({m: DrafterFacts(int(m), "", 16, 0) for m in (portfolio, NGRAM, DRAFT_MODEL)})
    assert combined.followers(portfolio) == {portfolio, NGRAM, DRAFT_MODEL}
    assert combined.followers(DRAFT_MODEL) == {DRAFT_MODEL}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 5),
        ({"max_draft_tokens": 50}, 16),  # the drafter's own limit
        ({"num_budget_rows": 3}, 3),
        ({"num_budget_rows": 0}, 0),
        ({"num_remaining_tokens": 4}, 3),  # three drafts and one token more
        ({"num_coverable_tokens": 23}, 2),  # 20 known tokens, 2 drafts, the token behind them
        ({"num_coverable_tokens": 21}, 0),
        ({"decoding": False}, 0),
        ({"method": DRAFT_MODEL, "max_draft_tokens": 8}, 6),
        ({"method": DRAFT_MODEL, "num_tokens": 29}, 3),  # positions 29, 30, 31 of 32
        ({"num_unsure_tokens": 50}, 5),
        ({"num_unsure_tokens": 2, "num_coverable_tokens": 25}, 2),
        ({"num_unsure_tokens": 5, "num_coverable_tokens": 25}, 0),
        ({"method": DRAFT_MODEL, "num_tokens": 27, "num_unsure_tokens": 2}, 3),
        ({"method": DRAFT_MODEL, "num_tokens": 27, "num_unsure_tokens": 5}, 0),  # but the drafter follows
        ({"num_unsure_tokens": 50, "num_remaining_tokens": 4}, 3),
    ],
)
def test_bounds(changes: dict[str, object], expected: int) -> None:
    facts = replace(FACTS, **changes)
    assert POLICY.decide(facts) == SpeculationDecision(facts.method, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": SpeculationMethod.DISABLED},
        {"max_draft_tokens": 0},
        {"num_remaining_tokens": 1},  # the next token is the last one
        {"method": DRAFT_MODEL, "num_tokens": 32},  # the draft model's context is full
        {"method": DRAFT_MODEL, "num_tokens": 40, "decoding": False},
    ],
)
def test_no_drafter_follows_where_it_can_be_of_no_use(changes: dict[str, object]) -> None:
    assert POLICY.decide(replace(FACTS, **changes)) == NO_SPECULATION
