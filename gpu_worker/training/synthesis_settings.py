"""How many conversations `synthesize.py` writes, and of what kinds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class SynthesisSettings:
    """How many conversations of what kind; lengths are tokens."""

    num_conversations: int
    shard_size: int = 512
    seed: int = 1
    max_prompt_tokens: int = 320
    max_answer_tokens: int = 448
    greedy_share: float = 0.6  # of the answers; the others are sampled
    # Of the conversations that the target begins itself; those about documents have one turn, and nobody quotes them.
    second_turn_share: float = 0.25  # go on for a second prompt and answer
    opening_share: float = (
        0.75  # of users' turns begin as openings.py says; the others are the target's alone
    )
    quoting_share: float = 0.15  # are followed by one that quotes their answer
    document_share: float = 0.5  # of all conversations are about documents, where there are any
    answered_share: float = 0.0  # of those have an answer that the document gives (document_answers.py)
    learn_passages: bool = False  # of those the prompts, which hold the passage, count as part of the answer
    prompt_temperature: float = 0.8  # at 1 a small model's prompts fall apart
    answer_temperature: float = 1.0  # of the answers that are sampled
    top_k: int = 100  # noise for the whole vocabulary would cost more than the model's own step

    @property
    def of_every_shard(self) -> dict[str, Any]:
        """All but how many conversations there are: a shard depends on these and its own number."""
        return {name: value for name, value in asdict(self).items() if name != "num_conversations"}

    @property
    def max_context_tokens(self) -> int:
        """Room for two turns, or one that quotes an answer, and the template around them."""
        return 2 * (self.max_prompt_tokens + self.max_answer_tokens) + 128
