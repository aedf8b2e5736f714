"""From measurements to figures: per round, medians over rounds, ratios within a round, texts that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from peers.catalogue import OURS, OURS_NGRAM, PEERS
from peers.rounds import LoadResult, Measurement


def round_figures(measurement: Measurement) -> dict[str, float]:
    """The figures of one engine in one round; tokens/s, seconds, bytes. What was not measured is missing.

    decode: median over prompts of the tokens after the first / the time after the first; decode_total: the same
    of all prompts together. batch_N: all tokens of the load / its time, prefill included.
    """
    figures: dict[str, float] = {}
    for batch, load in measurement.loads.items():
        if batch == 1:
            figures |= _single_figures(load)
        else:
            tokens = sum(len(answer["token_ids"]) for answer in load.answers)
            figures[f"batch_{batch}"] = tokens / load.seconds
    if measurement.long_cold:
        figures["long_cold"] = median(measurement.long_cold)
        figures["long_warm"] = median(measurement.long_warm)
    if measurement.memory:
        figures["memory"] = max(measurement.memory.values())
    figures["load"] = measurement.load_seconds
    return figures


def _single_figures(load: LoadResult) -> dict[str, float]:
    timed = [
        (len(answer["token_ids"]) - 1, answer["seconds"] - answer["time_to_first_token"])
        for answer in load.answers
        if len(answer["token_ids"]) > 1 and answer["time_to_first_token"] is not None
    ]
    figures = {"answer_tokens": sum(len(answer["token_ids"]) for answer in load.answers) / len(load.answers)}
    if first := [a["time_to_first_token"] for a in load.answers if a["time_to_first_token"] is not None]:
        figures["ttft"] = median(first)
    if timed:
        figures["decode"] = median(tokens / seconds for tokens, seconds in timed)
        figures["decode_total"] = sum(tokens for tokens, _ in timed) / sum(seconds for _, seconds in timed)
    return figures


def summary(measurements: Sequence[Measurement]) -> dict[str, dict[str, dict[str, float]]]:
    """engine -> figure -> {median, ratio}: ratio is the median of figure / ours within one round."""
    by_peer: dict[str, dict[int, dict[str, float]]] = {}
    for measurement in measurements:
        by_peer.setdefault(measurement.peer, {})[measurement.round] = round_figures(measurement)
    result: dict[str, dict[str, dict[str, float]]] = {}
    for peer, rounds in by_peer.items():
        names = dict.fromkeys(name for figures in rounds.values() for name in figures)
        result[peer] = {}
        for name in names:
            entry = {"median": median(figures[name] for figures in rounds.values() if name in figures)}
            if (ratio := _ratio(rounds, by_peer.get(OURS, {}), name)) is not None:
                entry["ratio"] = ratio
            result[peer][name] = entry
    return result


def _ratio(theirs: dict[int, dict[str, float]], ours: dict[int, dict[str, float]], name: str) -> float | None:
    ratios = [
        figures[name] / ours[number][name]
        for number, figures in theirs.items()
        if name in figures and ours.get(number, {}).get(name)
    ]
    return median(ratios) if ratios else None


def comparisons(measurements: Sequence[Measurement], batches: Sequence[int]) -> list[dict[str, Any]]:
    """Ours against the best peer of each kind: {what, ours, best, times}; times > 1 means ours is better.

    Plain decoding is compared with engines that do not speculate, ours-ngram with those that look prompts up.
    """
    medians = summary(measurements)
    plain = [name for name in medians if name != OURS and not PEERS[name].lookup_tokens]
    lookup = [name for name in medians if name != OURS_NGRAM and PEERS[name].lookup_tokens]
    speeds = [("decode", "batch 1")] + [(f"batch_{n}", f"batch {n}") for n in batches if n > 1]
    wanted = [(OURS, plain, name, f"{what}, no speculation", True) for name, what in speeds]
    wanted += [(OURS_NGRAM, lookup, name, f"{what}, prompt lookup", True) for name, what in speeds]
    wanted += [
        (OURS, plain, "long_cold", "long prompt, first token", False),
        (OURS, plain, "long_warm", "long prompt with a warm prefix, first token", False),
        (OURS, plain, "memory", "resident memory", False),
    ]
    found = []
    for ours, peers, name, what, more_is_better in wanted:
        candidates = [peer for peer in peers if name in medians[peer]]
        if not candidates or name not in medians.get(ours, {}):
            continue
        pick: Callable[..., str] = max if more_is_better else min
        best = pick(candidates, key=lambda peer, name=name: medians[peer][name]["median"])
        times = _times(measurements, ours, best, name)
        if times is not None:
            times = times if more_is_better else 1 / times
            found.append({"what": what, "ours": ours, "best": best, "times": times})
    return found


def _times(measurements: Sequence[Measurement], ours: str, other: str, name: str) -> float | None:
    rounds = {
        peer: {m.round: round_figures(m) for m in measurements if m.peer == peer} for peer in (ours, other)
    }
    return _ratio(rounds[ours], rounds[other], name)


def differing(measurements: Sequence[Measurement], peer: str, batch: int) -> tuple[int, int] | None:
    """Answers of `peer` whose ids are not ours of the same round and prompt, and all that were compared."""
    theirs = {m.round: m.loads[batch].answers for m in measurements if m.peer == peer and batch in m.loads}
    ours = {m.round: m.loads[batch].answers for m in measurements if m.peer == OURS and batch in m.loads}
    pairs = [
        (mine["token_ids"], other["token_ids"])
        for number in theirs.keys() & ours.keys()
        for mine, other in zip(ours[number], theirs[number], strict=True)
    ]
    return (sum(mine != other for mine, other in pairs), len(pairs)) if pairs else None
