"""Gives the frontend a directory with tokenizer.json, tokenizer_config.json and the chat template."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from gpu_worker.errors import ModelError
from gpu_worker.weights.gguf_file import GGUFFile
from gpu_worker.weights.gguf_tokenizer import TOKENIZER_KEYS, convert_tokenizer
from gpu_worker.weights.resolve import ModelSource

DEFAULT_CACHE = Path("~/.cache/draftline/tokenizers")
_FORMAT = b"1"  # part of the cache key: raise it when convert_tokenizer gives other files for the same GGUF


def export_tokenizer(source: ModelSource, cache_directory: Path = DEFAULT_CACHE) -> Path:
    """The directory with the model's tokenizer files.

    For a model directory it is the directory itself. The tokenizer of a GGUF file is converted once and kept
    under cache_directory / <hash of its metadata>, which two processes may do at the same time. Raises
    ModelError naming the file when there is no tokenizer or the cache cannot be written.
    """
    if source.kind == "directory":
        if not (source.path / "tokenizer.json").is_file():
            raise ModelError(f"{source.path / 'tokenizer.json'}: missing, the model cannot be served without")
        return source.path
    file = GGUFFile(source.path)
    digest = hashlib.sha256(_FORMAT)
    for key in TOKENIZER_KEYS:
        value = file.raw_metadata(key)
        digest.update(f"{key} {len(value)} ".encode() + value)
    directory = cache_directory.expanduser() / digest.hexdigest()[:24]
    if not directory.is_dir():
        _write_atomically(directory, *convert_tokenizer(file))
    return directory


def _write_atomically(directory: Path, tokenizer: dict[str, object], config: dict[str, object]) -> None:
    """Writes beside the target and renames, so that a directory which exists is whole."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
                (unfinished / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
            unfinished.chmod(0o755)  # the frontend may run as another user
            os.rename(unfinished, directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if not directory.is_dir():  # else another process was first: its files are the same
            raise ModelError(f"{directory}: the tokenizer cannot be written: {error}") from error
