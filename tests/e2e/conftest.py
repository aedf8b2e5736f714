"""One service with a tiny model for the whole folder; tests that stop or break a service start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.service import Service, leftovers


@pytest.fixture(scope="session")
def service(tiny_model_dir: Path) -> Iterator[Service]:
    """float32, n-gram and draft-model (the target's first layer), pages of 4 tokens."""
    before = leftovers()
    flags = ["--model", str(tiny_model_dir), "--dtype", "float32", "--page-size", "4", "--num-pages", "2000"]
    flags += [
        "--speculation",
        "ngram,draft-model",
        "--draft-model",
        "layers:1",
        "--max-running-requests",
        "8",
    ]
    with Service(*flags) as running:
        yield running
    assert leftovers() <= before
