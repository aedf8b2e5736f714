"""A finished generation in one line for people and in one object for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from draftline.admin import SpeculationSettings
from draftline.results import Completion, Sample, SpeculationStats


def statistics_line(sample: Sample) -> str:
    """Tokens, speed, speculation and the reason of the end."""
    timing, tokens = sample.timing, sample.usage.completion_tokens
    parts = [f"{tokens} tokens in {timing.total:.2f} s"]
    if tokens and timing.total > 0:
        parts.append(f"{tokens / timing.total:.1f} tokens/s")
    parts.append(f"first token {timing.time_to_first_token:.2f} s")
    parts.append(speculation_text(sample.speculation))
    matched = f" {sample.matched_stop!r}" if sample.matched_stop is not None else ""
    parts.append(f"finish: {sample.finish_reason}{matched}")
    return " | ".join(parts)


def speculation_text(stats: SpeculationStats | None) -> str:
    """The counters in words."""
    if stats is None or not stats.num_drafts:
        return "nothing drafted"
    return (
        f"{stats.method}: {stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens accepted "
        f"({stats.acceptance_rate:.0%}), acceptance length {stats.acceptance_length:.2f}"
    )


def settings_text(settings: SpeculationSettings) -> str:
    """What is in force, in words."""
    limit = f"up to {settings.max_draft_tokens} draft tokens a step"
    size = settings.disable_at_batch_size
    return f"{settings.method} by default, {limit}" + (f", none from {size} sequences on" if size else "")


def completion_object(completion: Completion) -> dict[str, Any]:
    """What `generate --json` prints: the first sample at the top, all of them under `samples` if n > 1."""
    result = {
        "request_id": completion.request_id,
        "model": completion.model,
        **_sample_object(completion.samples[0]),
    }
    if completion.prompt_logprobs:
        result["prompt_logprobs"] = [asdict(entry) for entry in completion.prompt_logprobs]
    if len(completion.samples) > 1:
        result["samples"] = [
            {"index": sample.index, **_sample_object(sample)} for sample in completion.samples
        ]
    return result


def stats_object(stats: SpeculationStats) -> dict[str, Any]:
    """Counters with the two ratios drawn from them."""
    return {
        **asdict(stats),
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_length": stats.acceptance_length,
    }


def _sample_object(sample: Sample) -> dict[str, Any]:
    timing = sample.timing
    result: dict[str, Any] = {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "matched_stop": sample.matched_stop,
        "usage": asdict(sample.usage),
        "speculation": stats_object(sample.speculation) if sample.speculation else None,
        "timing": {
            "queue_seconds": timing.queue,
            "time_to_first_token_seconds": timing.time_to_first_token,
            "total_seconds": timing.total,
            "num_steps": timing.num_steps,
            "num_preemptions": timing.num_preemptions,
        },
    }
    if sample.logprobs:
        result["logprobs"] = [asdict(entry) for entry in sample.logprobs]
    return result
