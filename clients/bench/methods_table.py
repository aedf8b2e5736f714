"""Measures every drafting method by category: acceptance by position, acceptance length, speed against off and n-gram.

One service per shape of drafts ("chain:4", "tree:15"), whose methods take turns, so that a speedup compares runs of the
same minutes. Prefixes are never shared between runs, the suffix store is off, and acceptance ends with EOS.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from draftline.bench.runner import BenchResult, run_bench
from draftline.bench.settings import BenchSettings
from draftline.bench.workload import WorkloadError
from draftline.errors import DraftlineError
from methods.categories import ALL, Tally, by_category, decode_speed
from speed_table import Lines, ServerFailedError, local_server

COLUMNS = (
    "batch",
    "T",
    "method",
    "drafts",
    "acceptance by position",
    "length",
    "tokens/step",
    "tokens/s",
    "x off",
    "x ngram",
    "decode x off",
)


def measure(
    prompts: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Rows {id, category, turns}.")],
    methods: Annotated[
        str, typer.Option(metavar="METHOD,...", help="All are loaded; off and ngram are added.")
    ] = "eagle3,mtp",
    heads: Annotated[
        str, typer.Option(metavar="METHOD=PATH,...", help="Unset: those that ship for the embedded model.")
    ] = "",
    shapes: Annotated[
        str, typer.Option(metavar="SHAPE:TOKENS,...", help="chain or tree, and the budget.")
    ] = ("chain:4,tree:15"),
    max_depth: Annotated[int, typer.Option(min=1, help="Levels of a tree.")] = 5,
    concurrency: Annotated[str, typer.Option(metavar="N,...")] = "1,4,16",
    temperatures: Annotated[str, typer.Option(metavar="T,...")] = "0,1",
    acceptance_rule: Annotated[
        str | None,
        typer.Option(help="coupled, rejection or block; greedy requests have none. Unset: the service's."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most this many prompts, spread over the file.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 1,
    server_flags: Annotated[str, typer.Option(help='For draftline-server, e.g. "--dtype bfloat16".')] = "",
    json_out: Annotated[Path | None, typer.Option("--json", metavar="OUT")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Acceptance length by category.")
    ] = None,
) -> None:
    """Prints a Markdown table over all categories, then acceptance lengths by category.

    tokens/s has the time of the prompts in it; `decode x off` compares the mean time of a token behind the first, at
    batch 1 alone: in larger batches other requests' prompts fall into it. Speeds are medians over the rounds, each
    `x` the median of its rounds' own ratios.
    """
    loaded = list(dict.fromkeys([*methods.split(","), "ngram"]))
    rows: list[dict[str, Any]] = []
    for shape_text in shapes.split(","):
        shape, _, budget = shape_text.partition(":")
        flags = ["--speculation", ",".join(loaded), "--draft-shape", shape, "--num-draft-tokens", budget]
        flags += ["--max-draft-depth", str(max_depth if shape == "tree" else min(int(budget), 64))]
        flags += [part for head in heads.split(",") if head for part in ("--head", head)]
        with local_server(*flags, *server_flags.split()) as address:
            for temperature in map(float, temperatures.split(",")):
                settings = BenchSettings(
                    server=address,
                    prompts=prompts,
                    speculation=("off", *loaded),
                    concurrency=tuple(int(level) for level in concurrency.split(",")),
                    max_tokens=max_tokens,
                    limit=limit,
                    temperature=temperature,
                    acceptance_rule=acceptance_rule,
                    rounds=rounds,
                )
                result = asyncio.run(run_bench(settings, Lines(shape_text)))
                rows += summarise(result, shape_text, temperature)
    print("\n".join(overall_table(rows)))
    print()
    print("\n".join(category_table(rows)))
    if json_out is not None:
        json_out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        draw(rows, plot)


def summarise(result: BenchResult, shape: str, temperature: float) -> list[dict[str, Any]]:
    """One object per load and method: speeds as medians over rounds, tallies of the first round by category."""
    speeds: dict[tuple[float, str], list[float]] = {}
    decode_speeds: dict[tuple[float, str], list[float | None]] = {}
    records = {}
    for run in result.runs:
        key = (run.load.value, run.speculation)
        speeds.setdefault(key, []).append(run.figures["tokens_per_second"])
        decode_speeds.setdefault(key, []).append(decode_speed(run.records))
        records.setdefault(key, run.records)
    rows = []
    for (batch, method), values in speeds.items():
        rows.append(
            {
                "shape": shape if method != "off" else "",
                "temperature": temperature,
                "batch": batch,
                "method": method,
                "tokens_per_second": median(values),
                "speedup_over_off": _ratio(values, speeds[batch, "off"]),
                "speedup_over_ngram": _ratio(values, speeds[batch, "ngram"]),
                "decode_speedup_over_off": _ratio(decode_speeds[batch, method], decode_speeds[batch, "off"])
                if batch == 1
                else None,
                "categories": {
                    name: _figures(tally) for name, tally in by_category(records[batch, method]).items()
                },
            }
        )
    return rows


def overall_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown lines over all categories."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in rows:
        figures = row["categories"][ALL]
        positions = " ".join(f"{share:.2f}" for share in figures["acceptance_by_position"]) or "-"
        cells = [
            f"{row['batch']:g}",
            f"{row['temperature']:g}",
            row["method"],
            row["shape"] or "-",
            positions,
            _text(figures["acceptance_length"]),
            _text(figures["tokens_per_step"]),
            f"{row['tokens_per_second']:.1f}",
            _text(row["speedup_over_off"]),
            _text(row["speedup_over_ngram"]),
            _text(row["decode_speedup_over_off"]),
        ]
        errors = f" {figures['num_errors']} failed" if figures["num_errors"] else ""
        lines.append(f"| {' | '.join(cells)} |{errors}")
    return lines


def category_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown lines: acceptance length at batch 1 (the least batch), a column per category."""
    least = min(row["batch"] for row in rows)
    chosen = [row for row in rows if row["batch"] == least and row["method"] != "off"]
    names = list(chosen[0]["categories"]) if chosen else []
    lines = [f"| T | method | drafts | {' | '.join(names)} |", f"|{'---|' * (3 + len(names))}"]
    for row in chosen:
        lengths = [_text(row["categories"][name]["acceptance_length"]) for name in names]
        lines.append(f"| {row['temperature']:g} | {row['method']} | {row['shape']} | {' | '.join(lengths)} |")
    return lines


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of acceptance length by category and method, greedy, least batch. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    least, coldest = min(row["batch"] for row in rows), min(row["temperature"] for row in rows)
    chosen = [
        row
        for row in rows
        if (row["batch"], row["temperature"]) == (least, coldest) and row["method"] != "off"
    ]
    names = list(chosen[0]["categories"])
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.3 * len(names), 4.5))
    width = 0.8 / len(chosen)
    for i, row in enumerate(chosen):
        lengths = [row["categories"][name]["acceptance_length"] or 1.0 for name in names]
        places = [x - 0.4 + (i + 0.5) * width for x in range(len(names))]
        axes.bar(places, lengths, width, label=f"{row['method']} {row['shape']}")
    axes.set_xticks(range(len(names)), names, rotation=20)
    axes.set_ylabel("tokens per step that drafted")
    axes.set_ylim(bottom=1.0)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _figures(tally: Tally) -> dict[str, Any]:
    return {
        "num_requests": tally.num_requests,
        "num_errors": tally.num_errors,
        "completion_tokens": tally.completion_tokens,
        "num_drafts": tally.num_drafts,
        "num_draft_tokens": tally.num_draft_tokens,
        "num_accepted_tokens": tally.num_accepted_tokens,
        "acceptance_by_position": tally.acceptance_by_position,
        "acceptance_length": tally.acceptance_length,
        "tokens_per_step": tally.tokens_per_step,
    }


def _ratio(values: Sequence[float | None], base: Sequence[float | None]) -> float | None:
    """Median over the rounds; None where there is nothing to compare."""
    ratios = [a / b for a, b in zip(values, base, strict=True) if a is not None and b]
    return median(ratios) if ratios else None


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    try:
        typer.run(measure)
    except (DraftlineError, ServerFailedError, WorkloadError) as error:
        sys.exit(f"error: {error}")
