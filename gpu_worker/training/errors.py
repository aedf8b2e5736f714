"""What a person can mend: wrong settings, missing data, no room. A leaf of the training package."""

from __future__ import annotations

from gpu_worker.errors import WorkerError


class TrainingError(WorkerError):
    """Training cannot go on; the message names the setting or file, its value and what was expected."""
