"""Token-level ends inside the tokens of one step, which may be several when drafts were accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared_mem.enums import FinishReason


@dataclass(frozen=True)
class EndRules:
    """What ends one sequence."""

    eos_token_ids: frozenset[int]  # empty where EOS is ignored
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int
    max_context_tokens: int
    num_prompt_tokens: int

    @property
    def max_generated_tokens(self) -> int:
        """The token of this number ends the sequence, whatever it is."""
        return min(self.max_tokens, self.max_context_tokens - self.num_prompt_tokens)


@dataclass(frozen=True)
class End:
    """Why a sequence ended; stop_token_id is set for STOP."""

    reason: FinishReason
    stop_token_id: int | None = None


def find_end(rules: EndRules, num_generated: int, new_tokens: Sequence[int]) -> tuple[int, End | None]:
    """How many of new_tokens a sequence with num_generated tokens keeps, and how it ended, if it did.

    Token by token: EOS, then stop ids, then the limits; so a stop id that also reaches max_tokens is a STOP.
    The ending token itself is kept, everything behind it is cut. EOS and stop ids count only once min_tokens
    tokens stand before them.
    """
    limit = rules.max_generated_tokens
    for i, token in enumerate(new_tokens):
        position = num_generated + i
        if position >= rules.min_tokens:
            if token in rules.eos_token_ids:
                return i + 1, End(FinishReason.EOS)
            if token in rules.stop_token_ids:
                return i + 1, End(FinishReason.STOP, token)
        if position + 1 >= limit:
            return i + 1, End(FinishReason.LENGTH)
    return len(new_tokens), None
