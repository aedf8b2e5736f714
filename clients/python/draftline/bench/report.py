"""Sums a benchmark up: medians over rounds, a table for people, JSON with every figure for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from statistics import median
from typing import Any

from draftline.bench.runner import BenchResult, Run
from draftline.bench.settings import Load

FORMAT_VERSION = 1


def summaries(result: BenchResult) -> list[dict[str, Any]]:
    """One entry per load and speculation setting: the median over rounds of every figure, errors added up.

    speedup: median over rounds of tokens/s over that of "off" in the same round and load; None without it.
    """
    settings = result.settings
    return [
        _summary(result.runs, load, method) for load in settings.loads() for method in settings.speculation
    ]


def report_object(result: BenchResult) -> dict[str, Any]:
    """The JSON report: settings, model, server, summaries, and each run with its requests."""
    return {
        "format_version": FORMAT_VERSION,
        "settings": {
            name: str(value) if name in ("prompts", "trace") and value is not None else value
            for name, value in asdict(result.settings).items()
        },
        "model": asdict(result.model),
        "server": {**asdict(result.server), "start_time": result.server.start_time.isoformat()},
        "num_clipped": result.num_clipped,
        "summaries": summaries(result),
        "runs": [
            {
                "round": run.round,
                "load": asdict(run.load),
                "speculation": run.speculation,
                "figures": run.figures,
                "requests": [record.row() for record in run.records],
            }
            for run in result.runs
        ],
    }


COLUMNS = (
    "load",
    "speculation",
    "tokens/s",
    "speedup",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "token p50 ms",
    "token p99 ms",
    "acceptance length",
    "tokens/step",
    "errors",
)


def table_rows(result: BenchResult) -> list[list[str]]:
    """The end table's cells, one row per summary, in the order of COLUMNS."""
    return [
        [
            str(Load(**entry["load"])),
            entry["speculation"],
            _number(entry["tokens_per_second"], 1),
            _number(entry["speedup"], 2),
            _number(entry["time_to_first_token_p50"], 1, 1000),
            _number(entry["time_to_first_token_p99"], 1, 1000),
            _number(entry["inter_token_p50"], 1, 1000),
            _number(entry["inter_token_p99"], 1, 1000),
            _number(entry["acceptance_length"], 2),
            _number(entry["tokens_per_step"], 2),
            str(entry["num_errors"]),
        ]
        for entry in summaries(result)
    ]


def _summary(runs: list[Run], load: Load, method: str) -> dict[str, Any]:
    mine = [run for run in runs if (run.load, run.speculation) == (load, method)]
    base = {
        run.round: run.figures["tokens_per_second"]
        for run in runs
        if (run.load, run.speculation) == (load, "off")
    }
    ratios = [run.figures["tokens_per_second"] / base[run.round] for run in mine if base.get(run.round)]
    errors: Counter[str] = Counter()
    for run in mine:
        errors.update(run.figures["errors"])
    summary: dict[str, Any] = {
        "load": asdict(load),
        "speculation": method,
        "num_rounds": len(mine),
        "speedup": median(ratios) if ratios else None,
    }
    for name in mine[0].figures:
        if name not in ("errors", "num_errors"):
            values = [run.figures[name] for run in mine if run.figures[name] is not None]
            summary[name] = median(values) if values else None
    return {**summary, "num_errors": errors.total(), "errors": dict(errors)}


def _number(value: float | None, digits: int, factor: float = 1) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"
