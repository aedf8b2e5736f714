"""The worker's domain errors; a leaf that every floor of gpu_worker may import."""

from __future__ import annotations


class WorkerError(Exception):
    """Base of every expected failure of a worker."""


class ModelError(WorkerError):
    """A model cannot be loaded; the message names the file or tensor, what was found and what was expected."""


class DeviceError(WorkerError):
    """The device or its memory does not allow what the configuration asks for."""


class SchedulerGoneError(WorkerError):
    """The scheduler's process ended without a word; the next one has to be greeted by a worker that starts afresh."""
