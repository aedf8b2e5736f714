"""Beside every step of training: files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from gpu_worker.training.errors import TrainingError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` when the block ends; after an error nothing of it is left.

    Raises TrainingError naming the file where it cannot be written, as on a full disk.
    """
    unfinished = path.with_name(f"{path.name}.partial")
    try:
        yield unfinished
        unfinished.chmod(
            0o644
        )  # safetensors creates its files for their owner alone; all of these are to be shared
        os.replace(unfinished, path)
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # torch raises RuntimeError for what it cannot write
        raise TrainingError(f"{path}: cannot be written: {str(error).splitlines()[0]}") from error
    finally:
        unfinished.unlink(missing_ok=True)
