"""How much one sequence drafts in one step; the one place that decides it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shared_mem.control import DrafterFacts
from shared_mem.enums import SpeculationMethod


@dataclass(frozen=True, slots=True)
class SpeculationFacts:
    """What a decision may look at: one sequence that is about to get a row.

    Rows in flight may add to what is known of it: counts are those without any accepted draft, and
    num_unsure_tokens says how many more tokens there can be when the row runs. What is of use is judged without
    them, what fits with them.

    num_remaining_tokens, num_budget_rows and num_coverable_tokens bound what one step can take: tokens still to
    generate, rows left in the step's budget for this sequence, tokens that its pages could cover.
    """

    method: SpeculationMethod  # the caller's wish or the server's default; DISABLED or one of `methods`
    max_draft_tokens: int
    num_tokens: int  # prompt + generated
    decoding: bool  # False for a row that still computes the prompt: it cannot draft yet
    num_remaining_tokens: int
    num_budget_rows: int
    num_coverable_tokens: int  # never more than the context limit
    num_unsure_tokens: int = 0
    methods: int = 0  # bit mask of the drafters that follow the sequence: any of them may draft in any step


@dataclass(frozen=True, slots=True)
class SpeculationDecision:
    """What one row may do: num_draft_tokens drafts of `method`. Who follows the sequence is no part of it."""

    method: SpeculationMethod
    num_draft_tokens: int


NO_SPECULATION = SpeculationDecision(SpeculationMethod.DISABLED, 0)


class SpeculationPolicy(Protocol):
    """Chooses for each sequence and step; never more than fits."""

    def decide(self, facts: SpeculationFacts) -> SpeculationDecision:
        """The method (DISABLED or one of facts.methods) and the most draft tokens (tree nodes) for one row."""
        ...

    def followers(self, method: SpeculationMethod) -> frozenset[SpeculationMethod]:
        """The drafters that keep their KV complete for a sequence that is admitted now with `method`.

        Asked once per admission. Only they can draft for the sequence while it has its slot: whoever came later
        would miss the KV that it never wrote.
        """
        ...


class FixedSpeculation:
    """As many draft tokens as were wished for, the drafter can serve and the step has room for."""

    def __init__(self, drafters: Mapping[SpeculationMethod, DrafterFacts]) -> None:
        self._drafters = drafters

    def followers(self, method: SpeculationMethod) -> frozenset[SpeculationMethod]:
        """See SpeculationMethod.followers; nobody's where the method is not loaded."""
        return method.followers(self._drafters) if method in self._drafters else frozenset()

    def decide(self, facts: SpeculationFacts) -> SpeculationDecision:
        """See SpeculationPolicy.decide."""
        drafter = self._drafters.get(facts.method)
        num_tokens_at_most = facts.num_tokens + facts.num_unsure_tokens
        wished = min(facts.max_draft_tokens, drafter.max_draft_tokens) if drafter is not None else 0
        if drafter is None or wished <= 0:
            return NO_SPECULATION
        if drafter.max_context_tokens:
            # Every draft token gets a position of the draft model. A sequence only grows: past that limit the
            # drafter is of no more use to it.
            if facts.num_tokens >= drafter.max_context_tokens:
                return NO_SPECULATION
            wished = min(wished, drafter.max_context_tokens - num_tokens_at_most)
        if not facts.decoding:
            return SpeculationDecision(facts.method, 0)
        # A step yields its accepted drafts and one token more: drafting the last token would be in vain.
        useful = facts.num_remaining_tokens - 1
        if useful <= 0:
            return NO_SPECULATION
        # A decoding row computes the last known token; its pages cover one token more than the drafts behind it.
        covered = facts.num_coverable_tokens - num_tokens_at_most - 1
        return SpeculationDecision(facts.method, max(0, min(wished, useful, facts.num_budget_rows, covered)))
