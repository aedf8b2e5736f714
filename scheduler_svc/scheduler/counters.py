"""Everything the scheduler counts since its start; LoadReply and the frontend's metrics are built from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.messages import MethodCounters, Step
from shared_mem.enums import SpeculationMethod


@dataclass(slots=True)
class _Speculation:
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """Plain sums; a sequence's prompt counts at its first admission, tokens when they are delivered."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    _speculation: dict[SpeculationMethod, _Speculation] = field(default_factory=dict)

    def record_delivery(self, step: Step, num_tokens: int) -> None:
        """One sequence's part of a step: num_tokens delivered, step.num_accepted_tokens of them drafted."""
        self.num_generated_tokens += num_tokens
        if step.num_draft_tokens == 0:
            return
        counted = self._speculation.setdefault(step.method, _Speculation())
        counted.num_drafts += 1
        counted.num_draft_tokens += step.num_draft_tokens
        counted.num_accepted_tokens += step.num_accepted_tokens
        for per_position, count in (
            (counted.num_draft_tokens_per_pos, step.draft_depth),
            (counted.num_accepted_tokens_per_pos, step.num_accepted_tokens),
        ):
            # Both lists are as long as the deepest draft so far.
            per_position.extend([0] * (step.draft_depth - len(per_position)))
            for i in range(count):
                per_position[i] += 1

    def speculation(self) -> tuple[MethodCounters, ...]:
        """One entry per method that ever drafted."""
        return tuple(
            MethodCounters(
                method,
                counted.num_drafts,
                counted.num_draft_tokens,
                counted.num_accepted_tokens,
                tuple(counted.num_draft_tokens_per_pos),
                tuple(counted.num_accepted_tokens_per_pos),
            )
            for method, counted in sorted(self._speculation.items())
        )
