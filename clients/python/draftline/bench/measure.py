"""Times of single requests and the figures of a run drawn from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RequestRecord:
    """What happened to one request; times are seconds after the run's start, by this process's clock."""

    id: str
    category: str
    sent: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""
    error: str = ""  # CODE or CODE/REASON; "" if it went well
    error_message: str = ""
    messages: list[tuple[float, int]] = field(
        default_factory=list
    )  # (arrival, tokens) of each delta with tokens
    ended: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_tokens_per_pos: tuple[int, ...] = ()  # entry i: steps that proposed a token at draft position i
    num_accepted_tokens_per_pos: tuple[int, ...] = ()  # and those that kept it

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from sending to the first tokens, None if there were none."""
        return self.messages[0][0] - self.sent if self.messages else None

    def inter_token_seconds(self) -> list[float]:
        """One entry per token after the first message: the wait for its message, shared among its tokens.

        Several tokens in one message are what speculation gives, so each is charged its share of the wait.
        """
        gaps: list[float] = []
        for (before, _), (now, tokens) in zip(self.messages, self.messages[1:], strict=False):
            gaps += [(now - before) / tokens] * tokens
        return gaps

    def inter_message_seconds(self) -> list[float]:
        """Waits between messages, however many tokens each brought."""
        return [now - before for (before, _), (now, _) in zip(self.messages, self.messages[1:], strict=False)]

    def row(self) -> dict[str, Any]:
        """The record as the report stores it."""
        return {
            "id": self.id,
            "category": self.category,
            "sent": self.sent,
            "time_to_first_token": self.time_to_first_token,
            "latency": self.ended - self.sent,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self.finish_reason,
            "num_steps": self.num_steps,
            "num_preemptions": self.num_preemptions,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_draft_tokens_per_pos": list(self.num_draft_tokens_per_pos),
            "num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
            "error": self.error,
            "error_message": self.error_message,
        }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between the closest ranks (numpy's default); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def run_figures(records: Sequence[RequestRecord], seconds: float) -> dict[str, Any]:
    """The figures of one run that took `seconds`; latencies are seconds, None where nothing was measured.

    acceptance_length: mean tokens of a step that carried a draft, 1 + accepted / drafts.
    tokens_per_step: completion tokens / target forward passes of the sequences, prefill steps included.
    """
    good = [record for record in records if not record.error]
    tokens = sum(record.completion_tokens for record in good)
    num_steps = sum(record.num_steps for record in good)
    drafts = sum(record.num_drafts for record in good)
    draft_tokens = sum(record.num_draft_tokens for record in good)
    accepted = sum(record.num_accepted_tokens for record in good)
    first = [value for record in good if (value := record.time_to_first_token) is not None]
    between = [gap for record in good for gap in record.inter_token_seconds()]
    messages = [gap for record in good for gap in record.inter_message_seconds()]
    latencies = [record.ended - record.sent for record in good]
    figures: dict[str, Any] = {
        "seconds": seconds,
        "num_requests": len(records),
        "num_errors": len(records) - len(good),
        "errors": dict(Counter(record.error for record in records if record.error)),
        "requests_per_second": len(good) / seconds if seconds else None,
        "tokens_per_second": tokens / seconds if seconds else None,
        "prompt_tokens": sum(record.prompt_tokens for record in good),
        "cached_tokens": sum(record.cached_tokens for record in good),
        "completion_tokens": tokens,
        "num_steps": num_steps,
        "num_preemptions": sum(record.num_preemptions for record in good),
        "num_drafts": drafts,
        "num_draft_tokens": draft_tokens,
        "num_accepted_tokens": accepted,
        "acceptance_rate": accepted / draft_tokens if draft_tokens else None,
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "tokens_per_step": tokens / num_steps if num_steps else None,
    }
    for name, values in (
        ("time_to_first_token", first),
        ("inter_token", between),
        ("inter_message", messages),
        ("latency", latencies),
    ):
        figures[f"{name}_p50"] = percentile(values, 50)
        figures[f"{name}_p99"] = percentile(values, 99)
    return figures
