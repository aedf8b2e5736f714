"""Writes a trained head as the service loads it: config.json, model.safetensors in bfloat16, README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpu_worker.models.heads.config import SECTION, HeadConfig
from gpu_worker.models.heads.tensors import DRAFT_IDS, tensor_shapes
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.modules.decoder_head import DecoderHead
from gpu_worker.training.modules.medusa import MedusaHeads
from gpu_worker.training.training_log import Measures
from gpu_worker.training.whole_file import whole_file


def export_head(
    directory: Path,
    head: DecoderHead | MedusaHeads,
    config: HeadConfig,
    draft_ids: torch.Tensor,
    card: str,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Writes the three files, each replaced as a whole; the size of the weights in bytes."""
    tensors = {name: value.detach().to(dtype).contiguous() for name, value in head.tensors().items()}
    if config.draft_vocab_size < config.vocab_size:
        tensors[DRAFT_IDS] = draft_ids.long()
    shapes = tensor_shapes(config)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(shapes.keys() | found.keys()):
        if shapes.get(name) != found.get(name):
            raise TrainingError(
                f"{directory}: tensor {name} is {found.get(name)}, the configuration says {shapes.get(name)}"
            )
    return write_checkpoint(directory, tensors, {SECTION: config.to_json()}, card)


def write_checkpoint(
    directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], card: str
) -> int:
    """Writes model.safetensors, config.json and README.md, each as a whole; the size of the weights in bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = directory / "model.safetensors"
    with whole_file(weights) as unfinished:
        save_file(tensors, unfinished, metadata={"format": "pt"})
    for name, content in (("config.json", json.dumps(config, indent=2) + "\n"), ("README.md", card)):
        with whole_file(directory / name) as unfinished:
            unfinished.write_text(content, encoding="utf-8")
    return weights.stat().st_size


def model_card(title: str, tag: str, measures: Measures, facts: dict[str, Any]) -> str:
    """Markdown: what it is, what it learned from, how long, and what was measured. facts: printed as a table."""
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return (
        f"---\nlibrary_name: draftline\ntags: [speculative-decoding, {tag}]\n---\n\n"
        f"# {title}\n\n"
        "Drafts tokens for the target named below; the target verifies them, so its text does not change.\n\n"
        f"## Training\n\n| | |\n|---|---|\n{table}\n\n"
        "Data: answers that the target wrote itself, greedy and sampled, to prompts of its own (sampled behind the "
        "chat template's user turn) or given ones; beside them, where documents were given, answers taken from these. "
        "Losses look at answers only, and at passages where `--learn-passages` says so.\n\n"
        f"## Acceptance on held-out conversations\n\n{_acceptance(measures)}"
    )


def _acceptance(measures: Measures) -> str:
    if not measures.num_rows:
        return "Not measured: no conversation was held out.\n"
    positions = range(len(measures.acceptance))
    rows = [
        "| | " + " | ".join(f"{i + 1}" for i in positions) + " |",
        "|---|" + "---|" * len(positions),
        "| greedy | " + " | ".join(f"{value:.3f}" for value in measures.acceptance) + " |",
        "| temperature 1 | " + " | ".join(f"{value:.3f}" for value in measures.sampled_acceptance) + " |",
    ]
    return (
        "Share of rows whose drafts are right up to this position, teacher-forced; at temperature 1 the expected "
        "share for sampled drafts.\n\n" + "\n".join(rows) + "\n\n"
        f"Acceptance length of a greedy chain of {len(positions)}: {measures.acceptance_length:.2f}.\n"
    )
