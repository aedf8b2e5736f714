"""Sampling laws computed token by token in plain Python: what the vectorised processor must equal."""

from __future__ import annotations

import math

from shared_mem.records import SamplingRecord


def naive_adjusted(
    logits: list[float], record: SamplingRecord, prompt: list[int], generated: list[int]
) -> list[float]:
    """Logits after penalties, bias and bans, for the token that follows prompt + generated."""
    values = []
    for token, value in enumerate(logits):
        if token in prompt or token in generated:
            value = value / record.repetition_penalty if value > 0 else value * record.repetition_penalty
        value -= record.presence_penalty * (token in generated)
        value -= record.frequency_penalty * generated.count(token)
        value += sum(bias for biased, bias in record.logit_bias if biased == token)
        if len(generated) + 1 <= record.min_tokens and token in record.end_ids:
            value = -math.inf
        values.append(value)
    return values


def naive_law(adjusted: list[float], record: SamplingRecord) -> list[float]:
    """Probabilities after temperature, top-k, top-p and min-p; one-hot at temperature 0."""
    if record.temperature == 0:
        best = max(range(len(adjusted)), key=lambda token: (adjusted[token], -token))
        return [float(token == best) for token in range(len(adjusted))]
    peak = max(adjusted)
    weights = [math.exp((value - peak) / record.temperature) for value in adjusted]
    if 0 < record.top_k < len(weights):
        least = sorted(weights, reverse=True)[record.top_k - 1]
        weights = [w if w >= least else 0.0 for w in weights]
    total = sum(weights)
    if record.top_p < 1:
        mass, least = 0.0, 0.0
        for weight in sorted(weights, reverse=True):
            if mass >= record.top_p * total:
                break
            mass, least = mass + weight, weight
        weights = [w if w >= least else 0.0 for w in weights]
    if record.min_p > 0:
        least = record.min_p * max(weights) * (1 - 1e-6)
        weights = [w if w >= least else 0.0 for w in weights]
    total = sum(weights)
    return [w / total for w in weights]
