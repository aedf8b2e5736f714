"""The heads that come with the embedded model: they fit it, they are small, and each says what it was measured at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import gpu_worker
from gpu_worker.models.base import CausalLM
from gpu_worker.weights.draft_checkpoint import load_draft_model
from gpu_worker.weights.head_checkpoint import load_head
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from gpu_worker.weights.tokenizer_export import export_tokenizer
from shared_mem.enums import SpeculationMethod

SHIPPED = Path(gpu_worker.__file__).parent / "shipped_heads"
LABELS = ("draft-model", "eagle", "eagle3", "medusa", "mtp")
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def embedded() -> CausalLM:
    return load_model(resolve_model(""), "float32", "cpu")


def test_every_method_has_one_and_they_are_small() -> None:
    assert sorted(path.name for path in SHIPPED.iterdir() if path.is_dir()) == sorted(LABELS)
    sizes = {path: path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 70 * MEGABYTE
    assert max(sizes.values()) < 20 * MEGABYTE


@pytest.mark.parametrize("label", [label for label in LABELS if label != "draft-model"])
def test_heads_fit_the_embedded_model(label: str, embedded: CausalLM) -> None:
    checkpoint = load_head(str(SHIPPED / label), embedded.config)
    assert checkpoint.config.kind.value == SpeculationMethod.from_label(label).label
    assert all(tensor.isfinite().all() for tensor in checkpoint.tensors.values())
    assert len(checkpoint.config.hit_rates) >= 4
    assert checkpoint.config.hit_rates[0][0] > 0.1


def test_the_draft_model_borrows_the_embedding(embedded: CausalLM) -> None:
    tokenizer = export_tokenizer(resolve_model(""))
    draft = load_draft_model(
        str(SHIPPED / "draft-model"), embedded, tokenizer, "float32", torch.device("cpu"), None
    )
    assert draft.model.num_layers < embedded.num_layers
    assert draft.draft_ids is not None


@pytest.mark.parametrize("label", LABELS)
def test_each_has_a_card_with_its_data_and_what_was_measured(label: str) -> None:
    card = (SHIPPED / label / "README.md").read_text(encoding="utf-8")
    for fact in ("target", "conversations", "optimizer steps", "rows seen"):
        assert re.search(rf"^\| {fact} \| .+ \|$", card, re.MULTILINE), fact
    assert re.search(r"^\| greedy \| (0\.\d{3} \| ?)+", card, re.MULTILINE)
