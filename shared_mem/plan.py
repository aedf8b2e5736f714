"""Scheduler -> workers: what a StepPlan says. Its bytes are plan_layout.py's.

Indices: `position` and token counts are 0-based counts of tokens of one sequence (prompt + generated).
A sequence with n tokens has KV for its first `num_computed` tokens; a decoding one has num_computed == n - 1,
since the token sampled last has no KV yet.

Steps run in the order of their plans, but a plan may be made while earlier ones have no result yet: then nobody
but the worker knows how many tokens a sequence has when the step begins. Such rows say FOLLOWS.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shared_mem.enums import AcceptanceRule, SpeculationMethod
from shared_mem.layout import Int32Array

# RowPlan.num_computed of a decoding row behind one without a result: the worker's own count, known tokens - 1.
FOLLOWS = -1


@dataclass(frozen=True)
class SamplingRecord:
    """How a slot's next tokens are chosen; resolved values only, nothing is unset here.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0, presence 0, frequency 0 and repetition 1 are off.
    `end_ids` (EOS and stop ids) get probability 0 until `min_tokens` tokens were generated; they are empty
    when min_tokens is 0 or nothing may end the sequence: ends themselves are the scheduler's to find.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    end_ids: tuple[int, ...] = ()
    num_logprobs: int = -1  # alternatives per generated token; -1: no logprobs at all
    num_prompt_logprobs: int = -1  # the same for prompt tokens
    acceptance_rule: AcceptanceRule = AcceptanceRule.COUPLED
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    threshold: float = 0.5


@dataclass(frozen=True)
class SlotRelease:
    """The sequence in `slot` (of `epoch`) ended, was aborted or preempted: forget its state."""

    slot: int
    epoch: int


@dataclass(frozen=True)
class Admission:
    """A sequence takes `slot`: everything the worker will ever need to know of it but its pages."""

    slot: int
    epoch: int
    token_ids: Int32Array  # [n] prompt, then what was generated before a preemption
    num_prompt_tokens: int
    num_cached_tokens: int  # leading tokens whose target KV the given pages already hold
    num_draft_cached_tokens: int  # the same for the draft model's KV
    sampling: SamplingRecord
    # Bit mask (SpeculationMethod.bit) of the drafters that follow this sequence: while it holds the slot their draft
    # KV is kept complete for every token, whatever method a row uses. Where the mask holds drafters that read hidden
    # states, the cached tokens hold the KV of all of them.
    methods: int = 0
    salt_id: int = 0  # sequences of different salts must not learn of each other; 0: of no salt


@dataclass(frozen=True)
class PageUpdate:
    """Pages `page_ids` are the slot's logical pages first_index, first_index + 1, ... from now on."""

    slot: int
    first_index: int
    page_ids: Int32Array  # [k]


class RowPlan(msgspec.Struct, frozen=True):
    """What one sequence does in this step.

    Target rows are the sequence's tokens num_computed .. num_computed + num_query - 1. `samples` says that
    the last of them is the sequence's last known token, so that the next token is drawn behind it. A
    decoding row has num_query 1 and may carry up to num_draft_tokens draft tokens of `method`, one of the
    admission's methods, from row to row another if need be; the worker may propose fewer. Pages cover
    num_computed + num_query + num_draft_tokens + 1 tokens, at most those of the context limit.

    Where the sequence has a sampling row in a step without a result yet, num_computed is FOLLOWS: the worker
    puts its own count there, known tokens - 1. Pages and draft tokens then fit even if it accepted every draft.
    The sequence may have ended with that row. Then this one is computed in vain, within the same bounds, and its
    result is dropped: in the worst case it draws one token behind the context limit, but computes none there.
    """

    slot: int
    epoch: int
    num_computed: int
    num_query: int
    samples: bool
    method: SpeculationMethod = SpeculationMethod.DISABLED
    num_draft_tokens: int = 0


@dataclass(frozen=True)
class StepPlan:
    """One step for every rank. Applied in this order: releases, admissions, page updates, rows."""

    step_id: int
    releases: tuple[SlotRelease, ...] = ()
    admissions: tuple[Admission, ...] = ()
    page_updates: tuple[PageUpdate, ...] = ()
    rows: tuple[RowPlan, ...] = ()
