"""What a run reports: a CSV line per interval and per validation, a JSON summary, and a plot."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_worker.training.objective import ACCEPTED, LAW_LOSS, REACHED, REGRESSION, ROWS
from gpu_worker.training.whole_file import whole_file


@dataclass(frozen=True)
class Measures:
    """Means over rows, by draft step."""

    law_loss: list[float]
    regression: list[float]
    acceptance: list[float]  # greedy, this and every earlier step
    sampled_acceptance: list[float]  # expected at temperature 1, this and every earlier step
    num_rows: int  # of the first step; 0: nothing was measured

    @classmethod
    def of(cls, sums: torch.Tensor) -> Measures:
        """sums [steps, 5] as BatchOutcome has them, added up over batches."""
        means = (sums / sums[:, ROWS : ROWS + 1].clamp_min(1)).T.tolist()
        rows = int(sums[0, ROWS])
        return cls(means[LAW_LOSS], means[REGRESSION], means[ACCEPTED], means[REACHED], rows)

    @property
    def acceptance_length(self) -> float:
        """Tokens of a greedy verify step over a chain of as many drafts as there are steps."""
        return 1.0 + sum(self.acceptance)


class TrainingLog:
    """train.csv, validation.csv, summary.json and progress.png in the output directory."""

    def __init__(self, directory: Path, resumed_at: int) -> None:
        """Lines of steps after resumed_at, which will be done again, are dropped."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        for name in ("train", "validation"):
            _keep_until(directory / f"{name}.csv", resumed_at)

    def train(self, step: int, fields: dict[str, float], measures: Measures) -> None:
        """One line of train.csv."""
        self._append("train", step, fields, measures)

    def validation(self, step: int, fields: dict[str, float], measures: Measures) -> None:
        """One line of validation.csv."""
        self._append("validation", step, fields, measures)

    def summary(self, facts: dict[str, Any]) -> None:
        """Replaces summary.json."""
        with whole_file(self._directory / "summary.json") as unfinished:
            unfinished.write_text(json.dumps(facts, indent=2), encoding="utf-8")

    def plot(self) -> bool:
        """Draws progress.png from the CSV files; False where matplotlib is not installed."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return False
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        losses, accepted = figure.subplots(1, 2)
        for name, style in (("train", {"alpha": 0.5, "linewidth": 0.8}), ("validation", {"marker": "o"})):
            rows = _read(self._directory / f"{name}.csv")
            if not rows:
                continue
            steps = [float(row["step"]) for row in rows]
            losses.plot(steps, [float(row["loss"]) for row in rows], label=name, **style)
            columns = [key for key in rows[0] if key.startswith("acceptance_")]
            for i, key in enumerate(columns):
                values = [float(row[key]) for row in rows]
                label = f"position {i + 1}" if name == "validation" else None
                accepted.plot(steps, values, label=label, color=f"C{i}", **style)
        losses.set(xlabel="step", ylabel="loss", title="Loss")
        losses.legend()
        accepted.set(
            xlabel="step", ylabel="share of rows", title="Accepted up to position (greedy)", ylim=(0, 1)
        )
        if accepted.get_legend_handles_labels()[1]:
            accepted.legend()
        for axes in (losses, accepted):
            axes.grid(alpha=0.3)
        figure.savefig(self._directory / "progress.png", dpi=110)
        return True

    def _append(self, name: str, step: int, fields: dict[str, float], measures: Measures) -> None:
        row: dict[str, Any] = {"step": step, **{key: f"{value:.6g}" for key, value in fields.items()}}
        for prefix, values in (
            ("law_loss", measures.law_loss),
            ("regression", measures.regression),
            ("acceptance", measures.acceptance),
            ("sampled_acceptance", measures.sampled_acceptance),
        ):
            row |= {f"{prefix}_{i + 1}": f"{value:.5f}" for i, value in enumerate(values)}
        path = self._directory / f"{name}.csv"
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _keep_until(path: Path, step: int) -> None:
    rows = _read(path)
    kept = [row for row in rows if int(row["step"]) <= step]
    if len(kept) == len(rows):
        return
    if not kept:
        path.unlink()
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(kept[0]))
        writer.writeheader()
        writer.writerows(kept)
