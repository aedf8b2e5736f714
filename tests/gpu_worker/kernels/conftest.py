"""The compiled kernels by instruction set, and tiny models on them."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from gpu_worker.kernels import native
from gpu_worker.kernels.linear import WeightFormat
from gpu_worker.kernels.native import Isa, NativeKernels, ThreadTeam
from gpu_worker.models.native import NativeCausalLM, build_native
from gpu_worker.weights.gguf_checkpoint import GGUFCheckpoint
from gpu_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.gpu_worker.gguf_models import write_gguf
from tests.gpu_worker.kernels.heads import FORMS, Head, make_head
from tests.models import make_tiny_llama

# run_sanitized.sh tests a build of its own.
if chosen_library := os.environ.get("DRAFTLINE_TEST_KERNELS"):
    native._LIBRARY = Path(chosen_library)

QUANTISED = {
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}


def installed() -> NativeKernels:
    kernels = native.load()
    assert kernels is not None, "the kernels are not built: python gpu_worker/kernels/build.py"
    return kernels


@pytest.fixture(scope="session", params=list(Isa), ids=lambda isa: isa.name.lower())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    """The library with one instruction set after the other; those this processor lacks are skipped."""
    if request.param not in installed().supported_isas():
        pytest.skip(f"this processor has no {request.param.name}")
    loaded = native.load(request.param)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def teams() -> Callable[[int], ThreadTeam]:
    """teams(n): a team of n threads, the same one every time."""
    return functools.cache(lambda num_threads: ThreadTeam(installed(), num_threads))


@pytest.fixture(scope="session")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """model_files(kind, **make_tiny_llama's): a directory, or a GGUF file for kinds q4_0, q4_1, q8_0; kept."""

    made: dict[str, Path] = {}

    def make(kind: str = "float", **options: object) -> Path:
        key = f"{kind} {options}"
        if key not in made:
            directory = make_tiny_llama(tmp_path_factory.mktemp("kernels"), **options)  # type: ignore[arg-type]
            file = directory / f"{kind}.gguf"
            made[key] = directory if kind == "float" else write_gguf(directory, file, QUANTISED[kind])
        return made[key]

    return make


BuildModel = Callable[..., NativeCausalLM]
BuildHead = Callable[..., Head]
Teams = Callable[[int], ThreadTeam]


@pytest.fixture(scope="session")
def build(
    kernels: NativeKernels, teams: Callable[[int], ThreadTeam], model_files: Callable[..., Path]
) -> BuildModel:
    """build(format, threads, **make_tiny_llama's): formats are those of QUANTISED, w8, float_q8_0 and bf16."""

    made: dict[str, NativeCausalLM] = {}

    def make(format: str = "q4_1", threads: int = 2, **options: object) -> NativeCausalLM:
        key = f"{format} {threads} {options}"
        if key in made:
            return made[key]
        path = model_files(format if format in QUANTISED else "float", **options)
        checkpoint = GGUFCheckpoint(path) if path.is_file() else SafetensorsCheckpoint(path)
        config = dataclasses.replace(checkpoint.config, vocab_size=300)
        precision = "bfloat16" if format == "bf16" else "int8"
        chosen = WeightFormat.W8 if format == "w8" else None
        made[key] = build_native(config, checkpoint, precision, kernels, teams(threads), float_format=chosen)
        return made[key]

    return make


@pytest.fixture(scope="session")
def heads(kernels: NativeKernels) -> BuildHead:
    """heads(name of the form, format): kept."""
    return functools.cache(
        lambda name, format=WeightFormat.Q8_0: make_head(kernels, FORMS[name], format, seed=len(name))
    )
