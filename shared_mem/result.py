"""Leader -> scheduler: what a StepResult says. Its bytes are result_layout.py's."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from shared_mem.enums import SpeculationMethod
from shared_mem.layout import Float32Array, Int32Array


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of m consecutive tokens: column 0 is the token itself, then the best others."""

    token_ids: Int32Array  # [m, 1 + num_logprobs]
    values: Float32Array  # [m, 1 + num_logprobs]


class RowResult(msgspec.Struct, frozen=True):
    """What one row of the plan came to.

    token_ids holds the accepted draft tokens and then the one that the target drew itself (empty for a
    prefill chunk that does not sample). num_draft_tokens counts proposed tree nodes, draft_depth the
    deepest of them. num_draft_computed: leading tokens whose KV of the draft model (not of any other drafter) is
    valid once this step's catch-up is done; 0 where it does not follow the sequence.
    """

    slot: int
    epoch: int
    token_ids: Int32Array  # [a + 1] or [0]
    method: SpeculationMethod = SpeculationMethod.DISABLED
    num_draft_tokens: int = 0
    draft_depth: int = 0
    num_accepted_tokens: int = 0
    num_draft_computed: int = 0
    logprobs: Logprobs | None = None  # one row per token of token_ids
    prompt_logprobs: Logprobs | None = None  # of prompt tokens num_computed + 1 .. num_computed + num_query


@dataclass(frozen=True)
class StepResult:
    """Published by the leader before the draft catch-up runs; rows in the order of the plan."""

    step_id: int
    rows: tuple[RowResult, ...]
    duration_us: int = field(default=0, compare=False)  # wall time of the step on the leader up to here
